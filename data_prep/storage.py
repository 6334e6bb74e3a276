"""Files and folders, complete or absent; arrays with checksums; validated JSON; locks.

Knows nothing of what the files contain.
"""

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from data_prep.errors import BusyError, DataError, StorageError, UserError
from data_prep.settings import NonNegative, Strict

CHUNK_BYTES = 1 << 24
ABANDONED_SECONDS = 3600
"""Age from which a temporary file of another process is that of one that was killed."""
LONGEST_NAME = 128
"""Bytes of a file name that its temporary one is made of: file systems allow 143 to 255."""
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems that have no locks, or cannot write a folder to the disk."""
_log = logging.getLogger(__name__)

ArrayType = Literal["uint16", "uint32", "int32", "int64"]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ArrayInfo(Strict):
    """What is recorded about a one-dimensional `.npy` file."""

    dtype: ArrayType
    length: NonNegative
    sha256: str  # checksum of the values; the header follows from `dtype` and `length`


def write_array(path: Path, chunks: Iterable[NDArray[Any]], dtype: ArrayType) -> ArrayInfo:
    """Write chunks, one in memory at a time, as one little-endian `.npy` array, atomically.

    Returns the record that `map_array` checks the file against.
    """
    stored = np.dtype(dtype).newbyteorder("<")

    def write(file: BinaryIO) -> ArrayInfo:
        digest, length = hashlib.sha256(), 0
        file.write(_npy_header(stored, 0))
        for chunk in chunks:
            raw = np.ascontiguousarray(chunk, stored).view(np.uint8).data
            digest.update(raw)
            file.write(raw)
            length += chunk.size
        file.seek(0)
        file.write(_npy_header(stored, length))
        return ArrayInfo(dtype=dtype, length=length, sha256=digest.hexdigest())

    return write_atomically(path, write)


def map_array(
    path: Path, info: ArrayInfo, *, verify: bool = False, below: int | None = None, least: int = 0
) -> NDArray[Any]:
    """Map a `.npy` file read-only into memory.

    With `verify`, the values are compared with their checksum (about 1 GB/s), and must be in
    [least, below). UserError if the size, the header or a verified value is not as recorded.
    """
    dtype = np.dtype(info.dtype).newbyteorder("<")
    header = _npy_header(dtype, info.length)
    expected_bytes = len(header) + info.length * dtype.itemsize
    with open_to_read(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != expected_bytes:
            raise DataError(
                f"{path} is damaged: {num_bytes} bytes, expected {expected_bytes}"
                f" ({info.length} × {info.dtype})"
            )
        if file.read(len(header)) != header:
            raise DataError(
                f"{path} is damaged: its header is not that of {info.length} × {info.dtype}"
            )
        if verify:  # from the file, because mapped pages count as memory of the process
            digest, lowest, highest = hashlib.sha256(), least, -1
            while raw := file.read(CHUNK_BYTES):
                digest.update(raw)
                chunk = np.frombuffer(raw, dtype)
                lowest, highest = min(lowest, int(chunk.min())), max(highest, int(chunk.max()))
            check_sha256(path, digest.hexdigest(), info.sha256)
            if below is not None and not least <= lowest <= highest < below:
                worst = lowest if lowest < least else highest
                raise DataError(f"{path} holds the value {worst}: expected {least} to {below - 1}")
        if info.length == 0:
            return np.empty(0, dtype)
        return np.memmap(file, dtype, mode="r", offset=len(header), shape=(info.length,))


def check_sha256(path: Path, found: str, expected: str | None) -> None:
    """UserError if the checksum of a file is not the recorded one."""
    if found != expected:
        raise DataError(f"{path} is damaged: its SHA-256 is not the recorded one")


def sha256_file(path: Path | str) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal; UserError if it cannot be read."""
    with open_to_read(Path(path)) as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def write_atomically(
    path: Path | str, writer: Callable[[BinaryIO], Result], *, shared: bool = False
) -> Result:
    """Write a file that is complete or absent; a previous version stays until the new one is whole.

    `writer` is called with a seekable binary file in the same folder, open for writing; returns
    what it returns. Several processes may write a `shared` file at once; the temporary file of one
    that is killed is then not overwritten by the next one, but deleted after an hour. UserError if
    the file system refuses (full, read-only, no permission), or the name is that of a folder, a
    device or a pipe.
    """
    path = Path(path)
    is_stream = path.is_symlink() and os.readlink(path).startswith("/proc/")  # as /dev/stdout
    if is_stream or (path.exists() and not path.is_file()):
        raise StorageError(f"{path} cannot be written: it is not a file that can be replaced")
    temporary = temporary_name(path, os.getpid() if shared else None)
    try:
        with writing(path):
            with open(temporary, "wb") as file:
                result = writer(file)
                file.flush()
                _sync(file.fileno())
            os.replace(temporary, path)
            sync(path.parent)
        if shared:
            _delete_abandoned(temporary)
    finally:
        with suppress(OSError):  # of a read-only file system
            temporary.unlink(missing_ok=True)
    return result


def _delete_abandoned(temporary: Path) -> None:
    """Delete files that other processes wrote in its place and left an hour ago."""
    start = temporary.name.removesuffix(f"{os.getpid()}.tmp")
    for other in temporary.parent.glob(f"{glob.escape(start)}*.tmp"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > ABANDONED_SECONDS:
                other.unlink()


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file with `write_atomically`; UserError also if it cannot be read."""
    with open_to_read(source) as file:
        write_atomically(target, partial(shutil.copyfileobj, file, length=1 << 20))


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name, atomically; without hard links, as `copy_atomically`."""
    link = temporary_name(target)
    try:
        link.unlink(missing_ok=True)
        os.link(source, link)
        try:
            os.replace(link, target)
        finally:
            link.unlink(missing_ok=True)  # if that failed, or both were one file already
        sync(target.parent)
    except OSError:  # for instance a file system without hard links
        copy_atomically(source, target)


def temporary_name(path: Path, process: int | None = None) -> Path:
    """Where a file is written before it has its name, by one process or any; not much longer."""
    name = path.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return path.with_name(f".{name}{'' if process is None else f'.{process}'}.tmp")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A `with` block that writes a file; a UserError names the file if the system refuses."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents if they do not exist, durably; UserError if that fails."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for each in new:
            sync(each.parent)
    except OSError as error:
        file = next((each for each in (path, *path.parents) if each.is_file()), None)
        reason = error.strerror if file is None else f"{file} is a file, not a folder"
        raise StorageError(f"{path} cannot be written: {reason}") from error


@contextmanager
def folder_to_fill(path: Path) -> Iterator[None]:
    """`make_folder`, before a `with` block; after it, new folders that are empty are removed."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    try:
        make_folder(path)
        yield
    finally:
        for each in new:
            with suppress(OSError):  # unless it is empty
                each.rmdir()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder of files that is complete or absent: filled under another name, then renamed.

    Its parents are made. The folder to fill, which is yielded, and new parents are deleted if that
    fails. UserError if the folder exists or the file system refuses.
    """
    if path.exists():
        raise UserError(f"{path} already exists: delete it, or choose another name")
    temporary = temporary_name(path)
    with folder_to_fill(path.parent), writing(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for each in [*temporary.iterdir(), temporary]:
                sync(each)
            os.replace(temporary, path)
            sync(path.parent)
        except FileNotFoundError as error:
            raise BusyError(f"{path} is written by another process at the same time") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_hashed(path: Path | str, chunks: Iterable[bytes], *, shared: bool = False) -> str:
    """Write chunks with `write_atomically`, and return their SHA-256 in hexadecimal."""
    digest = hashlib.sha256()

    def write(file: BinaryIO) -> None:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)

    write_atomically(path, write, shared=shared)
    return digest.hexdigest()


def write_json_atomically(path: Path | str, content: Any) -> str:
    """Write indented UTF-8 JSON, with ? for what is not Unicode; ValueError for NaN, infinities."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return write_hashed(path, [text.encode(errors="replace")], shared=True)


def read_json(path: Path, kind: type[Any], format_version: int | None = None) -> Any:
    """Read a JSON object, with a format version if it has one, as an instance of `kind`.

    UserError if the file is absent, has unknown, missing or wrong keys, or has another format
    version.
    """
    with open_to_read(path) as file:
        content = file.read()
    try:
        record = TypeAdapter(dict[str, Any]).validate_json(content)
        if (found := record.get("format_version")) != format_version:
            raise DataError(f"{path} has format version {found}: expected {format_version}")
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{path} is damaged: {where}: {first['msg']}".replace(": : ", ": ")
        if first["type"] == "unexpected_keyword_argument":
            problem = f"{path}: unknown key {where}: use the version of sqrtlm that wrote the file"
        raise DataError(problem) from error


@contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold a lock that one process has at a time, and which ends with the process.

    The lock file is created if necessary and never deleted. On a file system without locks there is
    none, which a warning says. If another process has the lock, `busy` is the UserError's message;
    None waits. UserError if the file cannot be opened.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        try:
            lock = os.open(path, os.O_RDONLY)  # in another user's folder
        except OSError:
            raise StorageError(f"{path.parent} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError as error:
            raise BusyError(str(busy)) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise StorageError(f"{path} cannot be locked: {error.strerror}") from error
            _log.warning("%s: %s: two processes must not write here", path, error.strerror)
        yield
    finally:
        os.close(lock)


def open_to_read(path: Path) -> BufferedReader:
    """Open a binary file for reading; UserError if that fails."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def sync(path: Path) -> None:
    """Write the names in a folder, or a file, to the disk, if they are there and may be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (PermissionError, FileNotFoundError):
        return
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Write a file or folder to the disk, where the file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def _npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """Header of format 1.0, which numpy pads to the same size for every length."""
    buffer = BytesIO()
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    npy.write_array_header_1_0(buffer, header)
    return buffer.getvalue()
