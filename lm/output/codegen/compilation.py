"""How functions are compiled, and where the compiled code is kept."""

import hashlib
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from numba import types
from numba.extending import intrinsic

import data_prep.compiled

FOLDER = Path(__file__).parent
STAMP = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for file in sorted([*FOLDER.glob("*.py"), *FOLDER.parent.rglob("*loops.py")])
    )
).hexdigest()
"""Hash of the files whose code is compiled into functions of other files."""


compiled = partial(data_prep.compiled.compiled, stamp=STAMP)
"""Decorator of the loops of `lm.output`, see `data_prep.compiled`."""


def emitted(code: Callable[..., Any], *, returns: bool = False) -> Any:
    """Decorator: make a function that emits LLVM instructions one that compiled loops call.

    `code` is called with LLVM's builder and what is known of each argument while a loop is
    compiled: the dtype of an array, the value of a number, those of a tuple, or None. If the
    function `returns` a number, it has the dtype of the first argument, an array.
    """

    @intrinsic
    @wraps(code)
    def typed(typing: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            known = (_known(builder, *each) for each in zip(kinds, values, strict=True))
            result = code(builder, *known)
            return result if returns else context.get_dummy_value()

        return (kinds[0].dtype if returns else types.void)(*kinds), generate

    return typed


def _known(builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        return kind.dtype
    if isinstance(kind, types.BaseTuple):
        return [builder.extract_value(value, i) for i in range(len(kind))]
    return None if isinstance(kind, types.NoneType) else value
