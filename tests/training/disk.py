"""A disk that loses power: what was synchronized is there, the rest perhaps.

`Disk` watches `os.fsync`. At each call it keeps the content of the file, or the names in the
folder, as what the disk holds from then on. When the power fails, the folder as it is then shows
what has been written or renamed since. The disk may have each of these changes or not, one by one:

    names   of a folder that was not synchronized after a rename, a link or a deletion: each is as
            it was synchronized or as it is now
    bytes   of a file that was not synchronized after a write: as synchronized, empty if it never
            was; as now; or the first bytes of the change, then zeros

`policy` "dropped" takes what was synchronized and nothing else; "any" draws at random.

All writes are seen, those of libraries as well, because the file system itself is compared; a
synchronization that does not go through Python is not, so more is dropped than a disk would, never
less. Not shown: a disk that says it has written and has not; of two renames to the same name since
the folder was synchronized, the state between them; a folder that is deleted and made again.
"""

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

Policy = Literal["dropped", "any"]


class Disk:
    """What of a folder is on the disk; all that is in it at first.

    `journal` is an empty folder on the same file system, for links to files.
    """

    def __init__(self, folder: Path, journal: Path) -> None:
        self.folder, self.journal, self.kept = folder, journal, dict[int, bytes]()
        for path in [folder, *folder.rglob("*")]:
            self._keep(path)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A `with` block whose calls of `os.fsync` are recorded, and not executed."""
        with mock.patch("os.fsync", self.fsync):
            yield

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(self.folder) and path.exists():  # safetensors replaces an open file
            self._keep(path)

    def lose_power(self, target: Path, policy: Policy, rng: Random) -> None:
        """Make what the disk holds, in a new folder."""
        choose = rng if policy == "any" else None
        self._build_folder(os.stat(self.folder).st_ino, self.folder, target, choose, {})

    def _keep(self, path: Path) -> None:
        """Record the content of a file or the names of a folder."""
        number = os.stat(path).st_ino
        if path.is_dir():
            names = {entry.name: _identity(entry.stat()) for entry in os.scandir(path)}
            self.kept[number] = json.dumps(names).encode()
        else:
            self.kept[number] = path.read_bytes()
            link = self.journal / f"{number}.link"  # so that no other file gets the number
            if not link.exists():
                os.link(path, link)

    def _build_folder(
        self, number: int, live: Path | None, new: Path, rng: Random | None, built: dict[int, Path]
    ) -> None:
        """Make the folder of an inode; `live` is where it is now, if it still is."""
        new.mkdir()
        names: dict[str, Any] = json.loads(self.kept.get(number, b"{}"))
        now = {} if live is None else {e.name: _identity(e.stat()) for e in os.scandir(live)}
        for name in sorted({*names, *now}):
            found = (now if rng and rng.random() < 0.5 else names).get(name)
            if found is None:
                continue
            child, is_folder = found
            place = live / name if live and now.get(name) == found else None
            if is_folder:
                self._build_folder(child, place, new / name, rng, built)
            elif child in built:
                os.link(built[child], new / name)
            else:
                (new / name).write_bytes(self._content(child, place, rng))
                built[child] = new / name

    def _content(self, number: int, live: Path | None, rng: Random | None) -> bytes:
        kept = self.kept.get(number, b"")
        if rng is None:
            return kept
        link = self.journal / f"{number}.link"
        path = live or (link if link.exists() else None)
        now = path.read_bytes() if path else kept
        shorter = min(len(kept), len(now))
        first = next((i for i in range(shorter) if kept[i] != now[i]), shorter)
        torn = now[: rng.randrange(first, len(now) + 1)].ljust(len(now), b"\0")
        return rng.choice((kept, now, torn)) if now != kept else kept


class Moments:
    """Numbers the moments at which a process changes files, and acts at one of them.

    A moment is the time before a file is opened, renamed, linked or deleted, a folder is made, or
    either is synchronized. Writes are not: kill at random times for these.
    """

    EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
    _active: "Moments | None" = None
    _is_installed = False

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.num_moments = 0

    @contextmanager
    def acting(self, moment: int | None, action: Callable[[], None]) -> Iterator[None]:
        """A `with` block in which `action()` is called at a moment, counted from 0; None: never."""
        if not Moments._is_installed:  # hooks stay until the process ends
            sys.addaudithook(_hook)
            Moments._is_installed = True
        self.num_moments, self._moment, self._action = 0, moment, action
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self._count(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        Moments._active = self
        try:
            with mock.patch("os.fsync", counted):
                yield
        finally:
            Moments._active = None

    def _count(self, path: str) -> None:
        if path.startswith(self.folder) and Moments._active is self:
            self.num_moments += 1
            if self.num_moments - 1 == self._moment:
                Moments._active = None
                self._action()
                Moments._active = self


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    active = Moments._active
    if active is not None and event in Moments.EVENTS:
        path = arguments[0]
        if isinstance(path, str | os.PathLike):
            active._count(os.fspath(path))


def _identity(status: os.stat_result) -> list[Any]:
    return [status.st_ino, stat.S_ISDIR(status.st_mode)]
