"""Compiled loops: numba, which keeps what it compiled where it can."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`numba.njit`, cached; compiled anew in every process where no cache can be written."""
    try:
        decorated: Callable[..., Any] = numba.njit(cache=True)(function)
    except RuntimeError:  # neither this folder nor the user's can be written
        decorated = numba.njit(function)
    return decorated
