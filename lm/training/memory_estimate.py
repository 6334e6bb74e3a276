"""The memory that a training run needs and what is available, before any is allocated."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from data_prep.errors import UserError
from lm.config import Config, WordTable, resolve_word_table, to_dict, validate
from lm.device import available_bytes, is_on_gpu, num_devices
from lm.model.build import build_model, without_weights
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.output.backends import expected_backend, saved_bytes

LIBRARY_BYTES = 600 << 20
"""Memory of Python and the libraries."""
TOLERANCE = 0.1
"""A run is refused if its estimate exceeds the available memory by more than this fraction: less is
within the accuracy of the estimate, and within what other programs take and return.
"""
_LIGHTER: tuple[dict[str, Any], ...] = (
    {"word_table.optimizer": "adagrad"},
    {"word_table.tied": True},
    {"word_table.dtype": "bf16", "train.precision": "bf16-mixed"},
)
"""Settings that save memory, the smallest change first."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory at the peak of a training step, in bytes: of one GPU, or of all processes on a CPU."""

    weights: int
    gradients: int  # dense ones
    optimizer: int
    batch: int  # what the forward pass of a batch saves, including row-wise gradients
    other: int  # the tree, the vocabulary and the libraries

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.batch + self.other


def estimate_memory(config: Config, tree: ClassTree | None, vocab_size: int) -> MemoryEstimate:
    """Estimate the memory that a training run needs."""
    word_table = resolve_word_table(
        config, vocab_size if tree is None else tree.num_rows, num_devices(config)
    )
    model = _build(config, word_table, tree, vocab_size, num_layers=1)
    element = {"bf16-true": 2, "64-true": 8}.get(config.train.precision, 4)
    table_element = 2 if word_table.dtype == "bf16" else element
    table = sum(parameter.numel() for parameter in model.table)
    sizes = [
        sum(parameter.numel() for parameter in each.parameters())
        for each in (model, _build(config, word_table, tree, vocab_size, num_layers=2))
    ]  # every layer but the first has as many parameters as the second
    others = sizes[0] + (config.model.layers - 1) * (sizes[1] - sizes[0]) - table
    num_moments = 2 if config.optim.optimizer == "adamw" else int(config.optim.momentum > 0)
    table_state = {
        None: num_moments * table * element,
        "sgd": 0,
        "adagrad": sum(len(parameter) for parameter in model.table) * max(element, 4),
        "adam": 2 * table * max(element, 4),
    }[word_table.optimizer]
    devices = num_devices(config)
    gradients = others * element + (0 if word_table.row_wise else table * table_element)
    tree_bytes = 0 if tree is None else sum(buffer.nbytes for buffer in tree.buffers())
    parts = {
        "weights": table * table_element + others * element,
        "gradients": gradients if devices == 1 else 2 * gradients,  # a copy is summed
        "optimizer": num_moments * others * element + table_state,
        "batch": _batch_bytes(config, word_table, tree, vocab_size),
        "other": LIBRARY_BYTES + tree_bytes + 12 * vocab_size,
    }
    num_processes = 1 if is_on_gpu(config) else devices
    return MemoryEstimate(**{name: num_processes * size for name, size in parts.items()})


def check_memory(config: Config, tree: ClassTree | None, vocab_size: int) -> None:
    """Refuse a run whose estimate exceeds the available memory by more than `TOLERANCE`.

    Raises:
        UserError: with the estimate, the available memory, and the settings that would fit.
    """
    estimate, available = estimate_memory(config, tree, vocab_size), available_to(config)
    if available is None or _fits(estimate, available):
        return
    raise UserError(
        f"training {config.name} needs {_gb(estimate.total)} of memory (weights"
        f" {_gb(estimate.weights)}, gradients {_gb(estimate.gradients)}, optimizer"
        f" {_gb(estimate.optimizer)}, a batch {_gb(estimate.batch)}, other"
        f" {_gb(estimate.other)}), {_gb(available)} are available:"
        f" {_what_fits(config, tree, vocab_size, available)}"
    )


def available_to(config: Config) -> int | None:
    """Memory that a run can have on its device; None where it is unknown."""
    return available_bytes(torch.device("cuda:0" if is_on_gpu(config) else "cpu"))


def _build(
    config: Config, word_table: WordTable, tree: ClassTree | None, vocab_size: int, num_layers: int
) -> LanguageModel:
    """The model with another number of layers, without weights."""
    model = replace(config.model, layers=num_layers)
    with without_weights():
        return build_model(
            model, config.output, word_table, tree, config.train.seq_len, vocab_size=vocab_size
        )


def _batch_bytes(
    config: Config, word_table: WordTable, tree: ClassTree | None, vocab_size: int
) -> int:
    """Hidden vectors of all layers and the output layer's saved state, with their gradients."""
    model, precision = config.model, config.train.precision
    num_positions = config.train.batch_size // num_devices(config) * config.train.seq_len
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
        device = torch.device("cuda" if is_on_gpu(config) else "cpu")
        backend = expected_backend(device, **batch, tree=tree, dtype=dtype)
    row_wise = word_table.row_wise
    return vectors + 2 * saved_bytes(backend, **batch, tree=tree, dtype=dtype, row_wise=row_wise)


def _fits(estimate: MemoryEstimate, available: int) -> bool:
    return estimate.total <= (1 + TOLERANCE) * available


def _what_fits(config: Config, tree: ClassTree | None, vocab_size: int, available: int) -> str:
    """The first of the lighter settings, each with those before it, that fits."""
    changes, even, need = "", "", estimate_memory(config, tree, vocab_size).total
    for settings in _LIGHTER:
        values = to_dict(config)
        for key, value in settings.items():
            section, name = key.split(".")
            values[section][name] = value
        try:
            lighter = validate(values, config.name)
        except UserError:  # the settings cannot be combined
            continue
        if lighter == config:
            continue
        config = lighter
        changes += "".join(f"--{key}={str(value).lower()} " for key, value in settings.items())
        estimate = estimate_memory(config, tree, vocab_size)
        if _fits(estimate, available):
            return f"{changes}would fit, with {_gb(estimate.total)}"
        if estimate.total < 0.99 * need:
            even = f"even {changes}would need {_gb(estimate.total)}; "
    return f"{even}use fewer words or a smaller model.hidden or model.layers"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
