"""Compiled loops as functions of Python: NumPy checks every index, and coverage sees every line."""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numba
import pytest

from lm.output.backends import compiled as package
from lm.output.backends.compiled.codegen import compilation

LOOPS = ("columns", "factors", "rows", "sorting", "tiles")
"""Modules with compiled loops, besides those that are named so."""


@cache
def as_python(*names: str) -> dict[str, ModuleType]:
    """Modules of the package once more, with those that they import, but not compiled.

    Functions whose code is emitted for LLVM are still compiled, each for itself.
    """

    def emitted(code: Any, **settings: Any) -> Any:
        function = compiled_emitted(code, **settings)
        return jit(lambda *arguments: function(*arguments))

    jit, compiled_emitted = numba.njit, compilation.emitted
    found = {name: import_module(f"{package.__name__}.{name}") for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in sys.modules if each.startswith(f"{package.__name__}.")]:
            parent, _, child = name.rpartition(".")
            if child.endswith("loops") or child in LOOPS:
                patch.setattr(sys.modules[parent], child, sys.modules[name])  # and back
                patch.delitem(sys.modules, name)
        patch.setattr(numba, "njit", lambda **_: lambda function: function)
        patch.setattr(compilation, "compiled", lambda function: function)
        patch.setattr(compilation, "emitted", emitted)
        return {name: import_module(module.__name__) for name, module in found.items()}
