"""`StepGraph`: when a step is run, watched, recorded and replayed, on a device that notes calls."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep.errors import UserError
from lm.config import TrainConfig
from lm.training import cuda_graph
from lm.training.cuda_graph import StepGraph


class Device:
    """A device that notes what `StepGraph` does with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.mode, self.problem = "default", ""
        stream = SimpleNamespace(wait_stream=lambda _: None)
        graph = SimpleNamespace(replay=lambda: self.done.append("replay"))
        fakes = {
            "Stream": lambda _: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "CUDAGraph": lambda: graph,
            "graph": self.recording,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def recording(self, graph: object, stream: object) -> Iterator[None]:
        self.done.append("record")
        if self.problem:
            raise RuntimeError(self.problem)
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(cuda_graph, "why_eager", lambda *_, **__: None)
    return Device(monkeypatch)


def new_graph() -> StepGraph:
    parameter = torch.zeros(3, requires_grad=True)
    fabric: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1, is_global_zero=True)
    return StepGraph(fabric, TrainConfig(), torch.optim.AdamW([parameter], lr=0.1))


def test_a_step_is_recorded_after_those_that_warm_up_and_then_replayed(
    device: Device, caplog: pytest.LogCaptureFixture
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
    device: Device, caplog: pytest.LogCaptureFixture
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


def test_a_step_that_cannot_be_recorded_ends_with_what_to_do(device: Device) -> None:
    device.problem = "operation not permitted\nwhen stream is capturing"
    graph = new_graph()
    for _ in range(3):
        graph.run(lambda: None)
    with pytest.raises(UserError, match="off trains without: operation not permitted when stream"):
        graph.run(lambda: None)
