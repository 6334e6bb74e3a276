"""The ways in which the output layer computes, for its tests."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.decoding import compiled

from .definition import SMALL_TILES, TREES
from .laws import SETTINGS


@pytest.fixture(scope="session", autouse=True)
def _language_is_replaced_once_a_launch() -> Iterator[None]:
    """Triton's interpreter replaces the functions of its language at each call of a helper, which
    takes a third of its time; here once in a launch for the names of each module.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        yield
        return
    from triton.runtime import interpreter

    replace, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set[int]()

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) in done:
            return None
        done.add(id(fn.__globals__))
        return replace(fn)

    def execute_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return execute(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.GridExecutor, "__call__", execute_launch)
        yield


@pytest.fixture(params=["reference", "compiled", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What "auto" chooses: the reference backend in blocks of few children, the compiled loops, or
    the fused kernels in tiles so small that a node has several.
    """
    kind = str(request.param)
    if kind == "compiled":
        yield kind
        return
    monkeypatch.setattr(BACKENDS["compiled"], "automatic_on", frozenset())
    if kind == "reference":
        with SETTINGS["blocks"]():
            yield kind
        return
    pytest.importorskip("triton")
    monkeypatch.setattr(BACKENDS["triton"], "automatic_on", frozenset({"cpu"}))
    with instrumented(tiles=SMALL_TILES):
        yield kind


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """Launches of the fused kernels, as they are executed."""
    found: list[Launch] = []

    def run(launch: Launch) -> None:
        found.append(launch)
        execute(launch)

    with instrumented(run=run):
        yield found


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest) -> ClassTree:
    return TREES[request.param]


@pytest.fixture(params=["compiled", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decoding by compiled loops, and by operations of PyTorch alone."""
    if request.param == "reference":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    return str(request.param)
