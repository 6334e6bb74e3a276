"""How the table of words is stored and updated: one value for model, optimizer and memory."""

from dataclasses import dataclass
from typing import Literal

from data_prep.errors import UserError
from lm.config.schema import Config

ROW_WISE_ELEMENTS, ROW_WISE_ELEMENTS_ON_GPU = 1 << 22, 1 << 28
"""Sizes from which gradients are row-wise by default, the latter with plain SGD on a GPU: a
smaller dense one is faster. Timed on a GPU at 7M elements alone: 9 times as fast as with row-wise
ones of a tied table, for which the host waits 16 ms a step. At 2^28 a dense update moves 6 GB.
"""


@dataclass(frozen=True, kw_only=True)
class WordTable:
    """How the table of words is stored and updated: `WordTableConfig` with defaults resolved."""

    tied: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"
    row_wise: bool = False  # gradients hold only the rows that a batch visits (`RowGradient`)
    optimizer: Literal["sgd", "adagrad", "adam"] | None = None  # None: that of other parameters
    lr: float = 1e-3


def resolve_word_table(
    config: Config, num_rows: int, num_devices: int, *, on_gpu: bool = False
) -> WordTable:
    """Resolve the defaults of the section `word_table` for an output layer of `num_rows` rows.

    Raises:
        UserError: if gradients are row-wise, and several devices have the whole table each.

    Example:
        >>> from lm.config import Config, WordTableConfig
        >>> config = Config(name="run", word_table=WordTableConfig(optimizer="adagrad", lr=0.05))
        >>> resolve_word_table(config, num_rows=10_000_000, num_devices=1)
        WordTable(tied=False, dtype='fp32', row_wise=True, optimizer='adagrad', lr=0.05)
    """
    table = config.word_table
    if table.gradients != "auto" or table.dtype == "bf16":
        row_wise = table.gradients != "dense"
    elif config.output.tree == "full" and config.output.num_samples is None:  # visits every row
        row_wise = False
    else:
        can = num_devices == 1 or config.train.strategy == "shard_output"
        plain = on_gpu and table.optimizer is None
        least = ROW_WISE_ELEMENTS_ON_GPU if plain else ROW_WISE_ELEMENTS
        large = can and num_rows * config.model.hidden >= least
        row_wise = large and skips_unvisited_rows(config) and conflict_with_row_wise(config) is None
    if row_wise and num_devices > 1 and config.train.strategy != "shard_output":
        raise UserError(
            "row-wise gradients of word_table cannot be combined with train.devices:"
            f" {config.train.devices}, which are {num_devices} here"
        )
    return WordTable(
        tied=table.tied,
        dtype=table.dtype,
        row_wise=row_wise,
        optimizer=table.optimizer or ("sgd" if row_wise else None),
        lr=table.lr or config.optim.lr,
    )


def skips_unvisited_rows(config: Config) -> bool:
    """Whether the table's optimizer leaves rows without a gradient unchanged."""
    optim = config.optim
    plain = optim.optimizer == "sgd" and optim.momentum == 0 and optim.weight_decay == 0
    return config.word_table.optimizer is not None or plain


def conflict_with_row_wise(config: Config) -> str | None:
    """The setting that rules out row-wise gradients."""
    train = config.train
    sharded = train.strategy == "shard_output"
    conflicts = {
        f"train.devices: {train.devices}": not sharded and train.devices not in (1, "auto", None),
        f"train.strategy: {train.strategy}": train.strategy == "ddp",
        "train.precision: 16-mixed": train.precision == "16-mixed",
        "output.tree: adaptive": config.output.tree == "adaptive",
    }
    return next((setting for setting, conflict in conflicts.items() if conflict), None)
