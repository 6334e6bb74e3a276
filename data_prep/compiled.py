"""Compilation of Python loops by numba, cached on disk where possible.

numba's cache notices changes to a function's own file only, so a compiled function and the compiled
functions that it calls belong in the same file.
"""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; without a folder for the cache, again in every process."""
    try:
        decorated: Callable[..., Any] = numba.njit(cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        decorated = numba.njit(function)
    return decorated
