"""Clocks of a GPU are what nvidia-smi prints for that GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.benchmarks.measure import gpu_clocks

CPU = torch.device("cpu")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of nvidia-smi, and a CPU in place of the GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return tmp_path / "nvidia-smi"


@pytest.mark.parametrize(
    ("printed", "clocks"),
    [("1980, 2619", [1980, 2619]), ("[N/A], 2619", None), ("Unable to determine the device", None)],
)
def test_clocks_are_those_of_the_device(
    program: Path, printed: str, clocks: list[int] | None
) -> None:
    program.write_text(f'#!/bin/sh\n[ "$1" = "--id=GPU-12-34" ] && echo "{printed}"\n')
    program.chmod(0o755)
    assert gpu_clocks(CPU) == clocks


def test_clocks_are_unknown_without_the_program(program: Path) -> None:
    assert not program.exists()
    assert gpu_clocks(CPU) is None
