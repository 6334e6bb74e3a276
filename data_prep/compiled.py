"""Compilation of Python loops by numba, cached on disk where possible.

numba's cache notices changes to a function's own file only, so a compiled function and the compiled
functions that it calls belong in the same file.
"""

import fcntl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba


def _protect(function: Any) -> None:
    """Let numba's cache of a function take a file that is damaged, or a full disk's, for none.

    Processes use it one after the other: numba could give one of them another function's code.
    """
    cache = function._cache
    load, save = cache.load_overload, cache.save_overload
    if hasattr(cache, "_cache_file"):
        files, lock = cache._cache_file, Path(cache.cache_path) / "lock"
        files.load, files.save = _one_by_one(files.load, lock), _one_by_one(files.save, lock)

    def load_overload(*key: object) -> Any:
        try:
            return load(*key)
        except Exception:  # any, by what damaged bytes are unpickled to
            with suppress(OSError):
                cache.flush()
            return None

    def save_overload(*code: object) -> None:
        with suppress(OSError):
            save(*code)

    cache.load_overload, cache.save_overload = load_overload, save_overload


def _one_by_one(function: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """A function that runs in one process at a time, where there are locks."""

    def run(*arguments: object) -> Any:
        try:
            file = lock.open("a")
        except OSError:
            return function(*arguments)
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            return function(*arguments)

    return run


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; without a folder for the cache, again in every process."""
    try:
        decorated: Callable[..., Any] = numba.njit(cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        decorated = numba.njit(function)
    _protect(decorated)
    return decorated
