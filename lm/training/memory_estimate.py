"""The memory that a training run needs and what is available, before any is allocated."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import UserError
from lm.config import Config, WordTable, resolve_word_table, to_dict, validate
from lm.model.build import build_model
from lm.output import ClassTree
from lm.output.backends import expected_backend, saved_bytes

LIBRARY_BYTES = 600 << 20
"""Memory of Python and the libraries."""
TOLERANCE = 0.1
"""A run is refused if its estimate exceeds the available memory by more than this fraction: less is
within the accuracy of the estimate, and within what other programs take and return.
"""
PROC = Path("/proc")
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Of cgroups 2 and 1: folder, files of limit and usage, and which usage is released on demand."""
_LIGHTER: tuple[tuple[str, dict[str, dict[str, Any]]], ...] = (
    ("--word_table.optimizer=adagrad", {"word_table": {"optimizer": "adagrad"}}),
    ("--word_table.tied=true", {"word_table": {"tied": True}}),
    (
        "--word_table.dtype=bf16 --train.precision=bf16-mixed",
        {"word_table": {"dtype": "bf16"}, "train": {"precision": "bf16-mixed"}},
    ),
)
"""Settings that save memory, the smallest change first."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory at the peak of a training step, in bytes: of one GPU, or of all processes on a CPU.

    Attributes:
        weights: all parameters.
        gradients: dense gradients.
        optimizer: state of the optimizer.
        batch: what the forward pass of a batch saves, including row-wise gradients.
        other: the tree, the vocabulary and the libraries.
    """

    weights: int
    gradients: int
    optimizer: int
    batch: int
    other: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.batch + self.other


def estimate_memory(config: Config, tree: ClassTree | None, vocab_size: int) -> MemoryEstimate:
    """Estimate the memory that a training run needs.

    Args:
        config: configuration of the run.
        tree: what `build_tree` returned.
        vocab_size: N.

    Returns:
        The estimate.
    """
    word_table = resolve_word_table(config, vocab_size if tree is None else tree.num_rows)
    with torch.device("meta"):
        model = build_model(
            config.model,
            config.output,
            word_table,
            tree,
            config.train.seq_len,
            vocab_size=vocab_size,
        )
    element = {"bf16-true": 2, "64-true": 8}.get(config.train.precision, 4)
    table_element = 2 if word_table.dtype == "bf16" else element
    table = sum(parameter.numel() for parameter in model.table)
    others = sum(parameter.numel() for parameter in model.parameters()) - table
    num_moments = 2 if config.optim.optimizer == "adamw" else int(config.optim.momentum > 0)
    table_state = {
        None: num_moments * table * element,
        "sgd": 0,
        "adagrad": sum(len(parameter) for parameter in model.table) * max(element, 4),
        "adam": 2 * table * max(element, 4),
    }[word_table.optimizer]
    num_devices = _num_devices(config)
    gradients = others * element + (0 if word_table.row_wise else table * table_element)
    tree_bytes = 0 if tree is None else sum(buffer.nbytes for buffer in tree.buffers())
    parts = {
        "weights": table * table_element + others * element,
        "gradients": gradients if num_devices == 1 else 2 * gradients,  # a copy is summed
        "optimizer": num_moments * others * element + table_state,
        "batch": _batch_bytes(config, word_table, tree, vocab_size),
        "other": LIBRARY_BYTES + tree_bytes + 12 * vocab_size,
    }
    num_processes = 1 if _is_on_gpu(config) else num_devices
    return MemoryEstimate(**{name: num_processes * size for name, size in parts.items()})


def check_memory(config: Config, tree: ClassTree | None, vocab_size: int) -> None:
    """Refuse a run whose estimate exceeds the available memory by more than `TOLERANCE`.

    Args:
        config: configuration of the run.
        tree: what `build_tree` returned.
        vocab_size: N.

    Raises:
        UserError: with the estimate, the available memory, and the settings that would fit.
    """
    estimate, available = estimate_memory(config, tree, vocab_size), available_bytes(config)
    if available is None or _fits(estimate, available):
        return
    raise UserError(
        f"training {config.name} needs {_gb(estimate.total)} of memory (weights"
        f" {_gb(estimate.weights)}, gradients {_gb(estimate.gradients)}, optimizer"
        f" {_gb(estimate.optimizer)}, a batch {_gb(estimate.batch)}, other"
        f" {_gb(estimate.other)}), {_gb(available)} are available:"
        f" {_what_fits(config, tree, vocab_size, available)}"
    )


def available_bytes(config: Config) -> int | None:
    """Memory that the run can have on the device that it trains on.

    Returns:
        On a GPU its free memory. On a CPU the memory that Linux can provide without swapping,
        within the limit of the cgroup, and what this process has already, which the estimate
        includes. None on other systems.
    """
    if _is_on_gpu(config):
        return torch.cuda.mem_get_info(0)[0]
    if not (PROC / "meminfo").exists():
        return None
    resident = int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free = _read_fields(PROC / "meminfo")["MemAvailable:"] * 1024
    for folder, limit_file, usage_file, reclaimable in CGROUPS:
        path = Path(folder, limit_file)
        limit = path.read_text().strip() if path.exists() else "max"
        if limit.isdigit():
            usage = int(path.with_name(usage_file).read_text())
            usage -= _read_fields(path.with_name("memory.stat")).get(reclaimable, 0)
            free = min(free, int(limit) - usage)
    return max(free, 0) + resident


def _read_fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number …`."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines}


def _is_on_gpu(config: Config) -> bool:
    return config.train.accelerator != "cpu" and torch.cuda.is_available()


def _num_devices(config: Config) -> int:
    if config.train.devices != "auto":
        return config.train.devices
    return torch.cuda.device_count() if _is_on_gpu(config) else 1


def _batch_bytes(
    config: Config, word_table: WordTable, tree: ClassTree | None, vocab_size: int
) -> int:
    """Hidden vectors of all layers and the output layer's saved state, with their gradients."""
    model, precision = config.model, config.train.precision
    num_positions = config.train.batch_size // _num_devices(config) * config.train.seq_len
    per_position = 12 if model.backbone == "lstm" else 24
    element = 8 if precision == "64-true" else 4
    vectors = element * num_positions * model.hidden * (per_position * model.layers + 4)
    if tree is None:  # the adaptive softmax: the clusters, which few positions visit, are left out
        shortlist = (config.output.cutoffs or [vocab_size // 10])[0]
        return vectors + 2 * element * num_positions * shortlist
    dtype = {"64-true": torch.float64, "32-true": torch.float32}.get(precision, torch.bfloat16)
    batch = {"num_positions": num_positions, "hidden_size": model.hidden}
    backend: str = config.output.backend
    if backend == "auto":
        device = torch.device("cuda" if _is_on_gpu(config) else "cpu")
        backend = expected_backend(device, **batch, tree=tree, dtype=dtype)
    row_wise = word_table.row_wise
    return vectors + 2 * saved_bytes(backend, **batch, tree=tree, dtype=dtype, row_wise=row_wise)


def _fits(estimate: MemoryEstimate, available: int) -> bool:
    return estimate.total <= (1 + TOLERANCE) * available


def _what_fits(config: Config, tree: ClassTree | None, vocab_size: int, available: int) -> str:
    """The first of the lighter settings, each with those before it, that fits."""
    changes: list[str] = []
    total = 0
    for options, sections in _LIGHTER:
        changed = {
            name: replace(getattr(config, name), **values) for name, values in sections.items()
        }
        lighter = replace(config, **changed)
        if lighter == config or not _is_valid(lighter):
            continue
        config, changes = lighter, [*changes, options]
        estimate = estimate_memory(config, tree, vocab_size)
        total = estimate.total
        if _fits(estimate, available):
            return f"{' '.join(changes)} would fit, with {_gb(total)}"
    even = f"even {' '.join(changes)} would need {_gb(total)}; " if changes else ""
    return f"{even}use fewer words or a smaller model.hidden"


def _is_valid(config: Config) -> bool:
    """Whether the settings can be combined."""
    try:
        validate(to_dict(config), config.name)
    except UserError:
        return False
    return True


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
