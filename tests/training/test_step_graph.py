"""`StepGraph`: when a step is run, watched, recorded and replayed, on a device that notes calls."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from data_prep.errors import UserError
from lm.config import TrainConfig
from lm.training import cuda_graph
from lm.training.cuda_graph import StepGraph


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that notes what `StepGraph` does with it."""
    device = SimpleNamespace(done=[], mode="default", problem="")

    @contextmanager
    def recording(graph: object, stream: object) -> Iterator[None]:
        device.done.append("record")
        if device.problem:
            raise RuntimeError(device.problem)
        yield

    cuda = MagicMock(graph=recording, set_sync_debug_mode=partial(setattr, device, "mode"))
    cuda.CUDAGraph.return_value.replay = lambda: device.done.append("replay")
    for name in ("Stream", "current_stream", "stream", "set_sync_debug_mode", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(cuda_graph, "why_eager", lambda *_, **__: None)
    return device


def new_graph() -> StepGraph:
    parameter = torch.zeros(3, requires_grad=True)
    fabric: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1, is_global_zero=True)
    return StepGraph(fabric, TrainConfig(), torch.optim.AdamW([parameter], lr=0.1))


def test_a_step_is_recorded_after_those_that_warm_up_and_then_replayed(
    device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    graph = new_graph()
    for _ in range(6):
        graph.run(lambda: device.done.append(f"run, {device.mode}"))
    run = "run, default"
    assert device.done == [run, run, "run, warn", "record", run, *3 * ["replay"]]
    assert device.mode == "default"
    (message,) = caplog.messages
    assert message.startswith("training steps are launched as a CUDA graph from now on,")


def test_steps_that_wait_for_the_device_are_never_recorded(
    device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def step() -> None:
        device.done.append("run")
        if device.mode == "warn":
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("another one", stacklevel=1)

    graph = new_graph()
    for _ in range(2):
        graph.run(step)
    with pytest.warns(UserWarning, match="another one"):
        graph.run(step)
    for _ in range(3):
        graph.run(step)
    assert device.done == 6 * ["run"]
    assert not graph.records
    (record,) = caplog.records
    assert "without a CUDA graph: the host waits for the device" in record.message


def test_a_step_that_cannot_be_recorded_ends_with_what_to_do(device: Any) -> None:
    device.problem = "operation not permitted\nwhen stream is capturing"
    graph = new_graph()
    for _ in range(3):
        graph.run(lambda: None)
    with pytest.raises(UserError, match="off trains without: operation not permitted when stream"):
        graph.run(lambda: None)
