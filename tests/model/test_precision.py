"""bf16 autocast on CPUs without fast bf16 arithmetic."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from lm.model import language_model
from lm.model.lstm import LSTM

BF16_TRAINING = """
import torch
from lm.model.lstm import LSTM
from lm.model.language_model import backbone_autocast, cpu_has_fast_bf16

assert not cpu_has_fast_bf16()
torch.manual_seed(0)
lstm, inputs = LSTM(8, 8, 2), torch.randn(5, 2, 8)
truth, _ = lstm(inputs)
with torch.autocast("cpu", torch.bfloat16), backbone_autocast(inputs.device):
    hidden, _ = lstm(inputs)
hidden.sum().backward()
assert torch.equal(hidden, truth)
"""


@pytest.fixture(autouse=True)
def no_report_yet() -> None:
    language_model._report_fp32.cache_clear()


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_without_fast_bf16_computes_in_fp32_and_reports_it_once(
    fast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(language_model, "cpu_has_fast_bf16", lambda: fast)
    left, right = torch.randn(2, 16, 16).unbind()
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with language_model.backbone_autocast(left.device):
                product = left @ right
    assert product.dtype == (torch.bfloat16 if fast else torch.float32)
    assert fast or torch.equal(product, left @ right)
    assert len(caplog.records) == (0 if fast else 1)


def test_nothing_changes_outside_of_bf16_autocast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(language_model, "cpu_has_fast_bf16", lambda: False)
    lstm, inputs = LSTM(8, 8, 1), torch.randn(3, 2, 8)
    with language_model.backbone_autocast(inputs.device):
        hidden, _ = lstm(inputs)
    assert torch.equal(hidden, lstm(inputs)[0])
    assert not caplog.records


def test_an_lstm_trains_under_bf16_autocast_without_avx512() -> None:
    avx2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", BF16_TRAINING], env=os.environ | avx2, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
