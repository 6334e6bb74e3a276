"""What the logs say of the computer: the name of the processor, the memory that was used."""

import platform
from pathlib import Path

import pytest

from lm.training import environment


def test_the_processor_is_named_with_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    # Without the file, the architecture is named.
    assert environment.processor_name() in (platform.processor(), platform.machine())
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: A B 7\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse\n\n"
    )
    assert environment.processor_name() == "A B 7, avx2, avx512f, avx512_bf16"


def test_the_most_memory_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(environment, "STATUS", status)
    assert environment.peak_memory() is None
    status.write_text("Name:\ta: b\nVmPeak:\t 9000000 kB\nVmHWM:\t 1234567 kB\n")
    assert environment.peak_memory() == "1,264 MB"
