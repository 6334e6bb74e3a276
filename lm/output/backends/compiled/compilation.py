"""How loops are compiled, and when the compiled code is kept on disk."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba

from lm.output.backends.compiled import (
    column_loops,
    columns,
    expansion_loops,
    row_operations,
    sorting,
    tile_loops,
    tiles,
    vectors,
)

EMITTING = (
    vectors,
    tiles,
    row_operations,
    tile_loops,
    columns,
    column_loops,
    expansion_loops,
    sorting,
)
EMITTED = hashlib.sha256(
    b"".join(Path(str(module.__file__)).read_bytes() for module in EMITTING)
).hexdigest()[:16]
"""Hash of the files whose code is compiled into functions of other files."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


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


def compiler(emitted: str) -> Decorator:
    """A decorator: compile a function when it is first called; it does not hold Python's lock.

    numba keeps compiled code on disk, and notices changes to the file of the function alone. So
    that file must contain the current `EMITTED`, or nothing is kept.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            found: Callable[..., Any] = numba.njit(nogil=True, cache=emitted == EMITTED)(function)
        except RuntimeError:  # no folder for a cache can be written
            found = numba.njit(nogil=True)(function)
        _tolerate_damage(found)
        return found

    return compiled
