"""Compiled loops as functions of Python: NumPy checks every index, and coverage sees every line."""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numba
import pytest

from lm.output.codegen import compilation

LOOPS = (
    *("_loops", "compiled.loops", "compiled.row_updates"),
    *("codegen.row_operations", "codegen.sorting", "codegen.tiles"),
)
"""Ends of the names of modules with compiled loops."""


@cache
def as_python(*names: str) -> dict[str, ModuleType]:
    """Modules of `lm.output` once more, with those that they import, but not compiled.

    Functions whose code is emitted for LLVM are still compiled, each for itself.
    """

    def emitted(code: Any, **settings: Any) -> Any:
        function = compiled_emitted(code, **settings)
        return jit(lambda *arguments: function(*arguments))

    jit, compiled_emitted = numba.njit, compilation.emitted
    found = {name: import_module(f"lm.output.{name}") for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in sys.modules if each.startswith("lm.output.")]:
            parent, _, child = name.rpartition(".")
            if name.endswith(LOOPS):
                patch.setattr(sys.modules[parent], child, sys.modules[name])  # and back
                patch.delitem(sys.modules, name)
        patch.setattr(numba, "njit", lambda **_: lambda function: function)
        patch.setattr(compilation, "compiled", lambda function: function)
        patch.setattr(compilation, "emitted", emitted)
        again = (import_module(module.__name__) for module in found.values())
        return {module.__name__.rpartition(".")[2]: module for module in again}
