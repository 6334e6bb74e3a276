"""What a CPU computes in bf16, and what is computed in fp32 in its place."""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

_log = logging.getLogger(__name__)


def cpu_has_fast_bf16() -> bool:
    """Whether oneDNN computes bf16 matrix products and LSTMs on this CPU.

    It needs AVX-512 on x86. Without it, torch's native bf16 products take more than ten times as
    long as fp32 products, and oneDNN refuses to train an LSTM in bf16.
    """
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def backbone_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in fp32 under bf16 autocast on a CPU without fast bf16; a warning says so once."""
    is_bf16 = (
        device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )
    if not is_bf16 or cpu_has_fast_bf16():
        return nullcontext()
    _report_fp32()
    return torch.autocast("cpu", enabled=False)


@cache
def _report_fp32() -> None:
    _log.warning("this CPU has no fast bf16 arithmetic: bf16 mixed precision computes in fp32")
