"""Compilation of Python loops by numba, cached on disk where possible.

numba's cache notices changes to a function's own file only: compiled functions that it calls belong
in the same file, or their files' hash is its `stamp`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let no other process read or write a cache; nothing, where there are no locks."""
    try:
        import fcntl

        file = (Path(folder) / "lock").open("a")
    except (ImportError, OSError):
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Files(IndexDataCacheFile):
    """numba's files, which it writes one after the other, so that processes could mix them up."""

    def load(self, key: object) -> Any:
        """The code of a key, or None."""
        with _locked(self._cache_path):
            return super().load(key)

    def save(self, key: object, data: object) -> None:
        """Write the code of a key."""
        with _locked(self._cache_path):
            super().save(key, data)


class _Cache(FunctionCache):
    """numba's cache of a function on disk, which notices changes to its file and to a stamp.

    A file that is damaged, or a full disk's, counts as none.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        both = self._impl.locator.get_source_stamp(), stamp
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, both)

    def load_overload(self, *key: object) -> Any:
        """Compiled code, or None."""
        try:
            return super().load_overload(*key)
        except Exception:  # any, by what damaged bytes are unpickled to
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *code: object) -> None:
        """Keep compiled code, if the disk can."""
        with suppress(OSError):
            super().save_overload(*code)


def compiled(function: Callable[..., Any], stamp: str = "") -> Any:
    """Decorator: numba compiles a function when it is first called; it does not hold Python's lock.

    The code is kept on disk, unless no folder for it can be written.
    """
    made: Any = numba.njit(nogil=True)(function)
    with suppress(RuntimeError):  # numba finds no folder
        made._cache = _Cache(function, stamp)
    return made
