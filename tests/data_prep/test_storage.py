"""Files are complete or absent; damaged arrays are refused before they are mapped."""

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import storage
from data_prep.errors import UserError
from data_prep.storage import link_or_copy, locked, map_array, new_folder, write_atomically

UNSUPPORTED = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL]


@pytest.fixture
def array(tmp_path: Path) -> tuple[Path, storage.ArrayInfo]:
    path = tmp_path / "x.npy"
    chunks = [np.arange(5), np.arange(0), np.arange(5, 300)]
    return path, storage.write_array(path, chunks, "uint16")


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=5))
def test_chunks_come_back_as_one_array_that_numpy_reads(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "chunks.npy"
    info = storage.write_array(path, [np.array(chunk, np.int64) for chunk in chunks], "uint32")
    flat = [value for chunk in chunks for value in chunk]
    assert np.load(path).tolist() == map_array(path, info).tolist() == flat
    assert info.sha256 == hashlib.sha256(np.array(flat, "<u4").tobytes()).hexdigest()
    mapped = map_array(path, info, verify=True)
    assert not mapped.size or not mapped.flags.writeable


def test_a_file_of_another_size_or_header_and_every_flipped_byte_are_refused(array: Any) -> None:
    path, info = array
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-500], content + b"\0"):
        path.write_bytes(damaged)
        message = rf"x\.npy is damaged: {len(damaged)} bytes, expected 728 \(300 × uint16\)$"
        with pytest.raises(UserError, match=message):
            map_array(path, info)
    path.write_bytes(content.replace(b"<u2", b"<i2"))
    with pytest.raises(UserError, match=r"x\.npy is damaged: its header is not that of 300 × ui"):
        map_array(path, info)
    for place in range(128, len(content), 41):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"x\.npy is damaged: its SHA-256 is not the recorded"):
            map_array(path, info, verify=True)


def test_values_out_of_range_are_refused(array: tuple[Path, storage.ArrayInfo]) -> None:
    path, info = array
    map_array(path, info, verify=True, below=300)
    with pytest.raises(UserError, match=r"x\.npy holds the value 299: expected 0 to 298$"):
        map_array(path, info, verify=True, below=299)


def test_a_failed_write_leaves_the_previous_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_folder_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "run" / "text"

    def fail(error: type[BaseException]) -> None:
        with new_folder(path) as unfinished:
            (unfinished / "a").write_text("half")
            raise error

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "run" / ".text.tmp").mkdir(parents=True)
    (tmp_path / "run" / ".text.tmp" / "b").touch()  # of a process that was killed
    with new_folder(path) as unfinished:
        (unfinished / "a").write_text("whole")
        assert not path.exists()
    assert [each.name for each in path.parent.rglob("*")] == ["text", "a"]
    assert (path / "a").read_text() == "whole"
    with pytest.raises(UserError, match="text already exists: delete it"), new_folder(path):
        pass
    message = "a/b/c cannot be written: .*text/a is a file, not a folder"
    with pytest.raises(UserError, match=message):
        storage.make_folder(path / "a" / "b" / "c")


def test_a_new_folder_that_another_process_writes_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"text is written by another process at the same time$"),
        new_folder(tmp_path / "text"),
        new_folder(tmp_path / "text") as unfinished,
    ):
        (unfinished / "a").touch()
    assert [each.name for each in (tmp_path / "text").iterdir()] == ["a"]


def test_an_unwritable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"nowhere/file cannot be written: No such file or direc"):
        write_atomically(tmp_path / "nowhere" / "file", Mock())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    for name in ("pipe", "stdout"):
        with pytest.raises(UserError, match=f"{name} cannot be written: it is not a file that"):
            write_atomically(tmp_path / name, Mock())
    refused = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(UserError, match=r"file cannot be written: Read-only file system$"):
        write_atomically(tmp_path / "file", refused)


def test_a_link_replaces_its_target_or_leaves_both(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"whole")
    target.mkdir()
    with pytest.raises(UserError, match="target cannot be written: it is not a file"):
        link_or_copy(source, target)
    assert source.read_bytes() == b"whole"
    target.rmdir()
    for _ in range(2):  # the second one finds that it is one file already
        link_or_copy(source, target)
        assert target.samefile(source)
    assert {each.name for each in tmp_path.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("function", ["mkdir", "fsync", "replace"])
def test_a_full_disk_leaves_no_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, function, Mock(side_effect=full))
    message = "text cannot be written: No space left on device$"
    with pytest.raises(UserError, match=message), new_folder(tmp_path / "text") as unfinished:
        (unfinished / "a").touch()
    assert list(tmp_path.iterdir()) == []


def test_json_is_exact_and_finite(tmp_path: Path) -> None:
    storage.write_json_atomically(tmp_path / "x.json", {"é": [1, 0.1, "\udcff"]})
    expected = '{\n  "é": [\n    1,\n    0.1,\n    "?"\n  ]\n}\n'
    assert (tmp_path / "x.json").read_text() == expected
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_json_atomically(tmp_path / "x.json", float("nan"))


@pytest.mark.parametrize("is_of_another_user", [False, True])
def test_a_lock_is_held_by_one_and_its_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_another_user: bool
) -> None:
    path, real = tmp_path / ".lock", os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *mode)

    with pytest.raises(UserError, match=r"nothing cannot be written: No such file"):
        locked(tmp_path / "nothing" / ".lock").__enter__()
    if is_of_another_user:
        path.touch()
        monkeypatch.setattr(os, "open", refuse)
    with locked(path), pytest.raises(UserError, match="it is taken"):
        locked(path, busy="it is taken").__enter__()
    with locked(path, busy="it is taken"):
        assert path.exists()


def test_two_processes_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "x.json", os.fsync
    code = "import sys; from data_prep.storage import *; write_json_atomically(sys.argv[1], [1])"

    def another_process_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        assert path.read_text() == "[\n  1\n]\n"

    monkeypatch.setattr(os, "fsync", another_process_writes)
    storage.write_json_atomically(path, [2])
    assert path.read_text() == "[\n  2\n]\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Locks and synchronisation raise an error; its message."""
    message = os.strerror(request.param)
    for name in ("fcntl.flock", "os.fsync"):
        monkeypatch.setattr(name, Mock(side_effect=OSError(request.param, message)))
    return message


@pytest.mark.parametrize("refused", UNSUPPORTED, indirect=True)
def test_file_systems_without_locks_and_folders_to_sync_are_written_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    with locked(tmp_path / ".lock", busy="taken"):
        write_atomically(tmp_path / "x", lambda file: file.write(b"abc"))
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert caplog.messages == [f"{tmp_path}/.lock: {refused}: two processes must not write here"]
    with new_folder(tmp_path / "new") as unfinished:
        (unfinished / "a").touch()
    assert (tmp_path / "new" / "a").exists()


@pytest.mark.parametrize("refused", [errno.EIO, errno.ENOSPC], indirect=True)
def test_other_errors_of_locks_and_the_disk_are_named(tmp_path: Path, refused: str) -> None:
    with pytest.raises(UserError, match=rf"/\.lock cannot be locked: {refused}$"):
        locked(tmp_path / ".lock").__enter__()
    with pytest.raises(UserError, match=rf"/x cannot be written: {refused}$"):
        write_atomically(tmp_path / "x", lambda file: file.write(b"abc"))


@pytest.mark.parametrize("name", ["c" * 255, "c" * 248 + ".yaml", "é" * 127, "日" * 85])
@pytest.mark.parametrize("shared", [False, True])
def test_the_longest_names_of_files_can_be_written(tmp_path: Path, name: str, shared: bool) -> None:
    write_atomically(tmp_path / name, lambda file: file.write(b"abc"), shared=shared)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with new_folder(tmp_path / "folder" / name) as unfinished:
        assert len(os.fsencode(unfinished.name)) < 143
    assert (tmp_path / "folder" / name).is_dir()


def test_what_a_killed_process_left_of_a_file_is_deleted_after_an_hour(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.1.tmp", ".a.2.tmp", ".b.1.tmp"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, times=(0, 0))
    write_atomically(tmp_path / "a", lambda file: file.write(b"abc"), shared=True)
    assert {*tmp_path.iterdir()} == {tmp_path / "a", new, other}
