"""Compilation of Python loops by numba, cached on disk where possible.

numba's cache notices changes to a function's own file only, so a compiled function and the compiled
functions that it calls belong in the same file.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba


def _tolerate_damage(function: Any) -> None:
    """Let numba's cache of a function take a file that is damaged, or a full disk's, for none."""
    cache = function._cache
    load, save = cache.load_overload, cache.save_overload

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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; without a folder for the cache, again in every process."""
    try:
        decorated: Callable[..., Any] = numba.njit(cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        decorated = numba.njit(function)
    _tolerate_damage(decorated)
    return decorated
