"""The name of the processor in the logs."""

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
