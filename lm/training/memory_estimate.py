"""How much memory a training will need, before any is allocated, and what to change where that is
more than there is.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import UserError
from lm.config import Config, has_sparse_table, to_dict, validate
from lm.model.language_model import LanguageModel, build_model
from lm.output import ClassTree
from lm.output.backends.reference.backend import saved_size

LIBRARIES = 600 << 20
"""Bytes that Python and the libraries take."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LIGHTER: tuple[tuple[str, dict[str, dict[str, Any]]], ...] = (
    ("--optim.table=adagrad", {"optim": {"table": "adagrad"}}),
    ("--model.tied=true", {"model": {"tied": True}}),
    (
        "--output.dtype=bf16 --train.precision=bf16-mixed",
        {"output": {"dtype": "bf16"}, "train": {"precision": "bf16-mixed"}},
    ),
)
"""What makes a training lighter, the least change first."""


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a training step.

    Attributes:
        weights: all parameters.
        gradients: those of the size of what they belong to.
        optimizer: its state.
        batch: what forward and backward keep of a batch, sparse gradients among it.
        other: the tree, tables of words, and the libraries.
    """

    weights: int
    gradients: int
    optimizer: int
    batch: int
    other: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.batch + self.other


def footprint(config: Config, tree: ClassTree) -> Footprint:
    """What the training of `config` over the words of `tree` will take: on one GPU, or of all the
    processes that share a CPU's memory.
    """
    sparse = has_sparse_table(config, tree.num_rows)
    with torch.device("meta"):
        model = build_model(config.model, config.output, tree, config.train.seq_len, sparse=sparse)
    each = {"bf16-true": 2, "64-true": 8}.get(config.train.precision, 4)
    table, rest = _sizes(model)
    in_table = 2 if config.output.dtype == "bf16" else each
    usual = {"adamw": 2, "sgd": int(config.optim.momentum > 0)}[config.optim.optimizer]
    num_vectors = sum(len(parameter) for parameter in model.table)
    state_of_table = {
        None: usual * table * each,
        "sgd": 0,
        "adagrad": num_vectors * max(each, 4),
        "adam": 2 * table * max(each, 4),
    }[config.optim.table]
    devices = _num_devices(config)
    gradients = rest * each + (0 if sparse else table * in_table)
    parts = {
        "weights": table * in_table + rest * each,
        "gradients": gradients if devices == 1 else 2 * gradients,  # a copy, to be summed
        "optimizer": usual * rest * each + state_of_table,
        "batch": _batch_bytes(config, tree, max(each, 4), sparse),
        "other": LIBRARIES + sum(buffer.nbytes for buffer in tree.buffers()) + 12 * tree.vocab_size,
    }
    processes = 1 if _is_on_gpu(config) else devices
    return Footprint(**{name: processes * size for name, size in parts.items()})


def check_memory(config: Config, tree: ClassTree) -> None:
    """Refuse a training that cannot fit, before anything is allocated.

    Raises:
        UserError: saying what it needs, what there is, and what would fit.
    """
    need, there = footprint(config, tree), available(config)
    if there is None or need.total <= there:
        return
    lighter = _what_fits(config, tree, there)
    raise UserError(
        f"training {config.name} needs {_gb(need.total)} of memory (weights {_gb(need.weights)},"
        f" gradients {_gb(need.gradients)}, optimizer {_gb(need.optimizer)}, a batch"
        f" {_gb(need.batch)}, other {_gb(need.other)}), there are {_gb(there)}: {lighter}"
    )


def available(config: Config) -> int | None:
    """Bytes of memory of the device that is trained on; None if that cannot be told."""
    if _is_on_gpu(config):
        return torch.cuda.get_device_properties(0).total_memory
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _CGROUP_LIMITS:
        path = Path(name)
        text = path.read_text().strip() if path.exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _is_on_gpu(config: Config) -> bool:
    return config.train.accelerator != "cpu" and torch.cuda.is_available()


def _num_devices(config: Config) -> int:
    if config.train.devices != "auto":
        return config.train.devices
    return torch.cuda.device_count() if _is_on_gpu(config) else 1


def _sizes(model: LanguageModel) -> tuple[int, int]:
    """Parameters of the table of words, and all others."""
    table = sum(parameter.numel() for parameter in model.table)
    return table, sum(parameter.numel() for parameter in model.parameters()) - table


def _batch_bytes(config: Config, tree: ClassTree, each: int, sparse: bool) -> int:
    """Hidden vectors of all layers with what their gradients need, and log-probabilities with
    theirs.
    """
    positions = config.train.batch_size // _num_devices(config) * config.train.seq_len
    columns = saved_size(positions, tree.max_path_columns, tree.depth, sparse=sparse)
    per_position = 12 if config.model.backbone == "lstm" else 24
    vectors = positions * config.model.hidden * (per_position * config.model.layers + 4)
    return each * (2 * columns + vectors)


def _what_fits(config: Config, tree: ClassTree, there: int) -> str:
    """The first of the lighter settings, each with those before it, that fits."""
    said: list[str] = []
    need = footprint(config, tree).total
    for options, sections in _LIGHTER:
        changed = {
            name: replace(getattr(config, name), **values) for name, values in sections.items()
        }
        lighter = replace(config, **changed)
        if lighter == config or not _is_valid(lighter):
            continue
        config, said = lighter, [*said, options]
        need = footprint(config, tree).total
        if need <= there:
            return f"{' '.join(said)} would fit, with {_gb(need)}"
    even = f"even {' '.join(said)} would need {_gb(need)}; " if said else ""
    return f"{even}fewer words or a smaller model.hidden"


def _is_valid(config: Config) -> bool:
    """Whether the settings go together."""
    try:
        validate(to_dict(config), config.name)
    except UserError:
        return False
    return True


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
