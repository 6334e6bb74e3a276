"""The table of words: the output layer's rows together with the input vectors.

It is the largest part of a model. The section `word_table` says how it is stored and updated;
`resolve_word_table` turns the section into the one value that the model, the optimizer and the
memory estimate receive.
"""

from dataclasses import dataclass
from typing import Literal

from lm.config.schema import Config

ROW_WISE_ELEMENTS = 1 << 24
"""Number of elements from which the gradients of a table are row-wise by default. Below it, writing
a dense gradient (64 MB in fp32) is as fast.
"""


@dataclass(frozen=True, kw_only=True)
class WordTable:
    """How the table of words is stored and updated, with every default resolved.

    Attributes:
        tied: whether a word's output row is also its input vector.
        dtype: type of the table's elements.
        row_wise: whether its gradients hold only the rows that a batch visits (`RowGradient`).
        optimizer: its row-wise optimizer; None: the optimizer of the other parameters.
        lr: its peak learning rate.
    """

    tied: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"
    row_wise: bool = False
    optimizer: Literal["sgd", "adagrad", "adam"] | None = None
    lr: float = 1e-3


def resolve_word_table(config: Config, num_rows: int) -> WordTable:
    """Resolve the defaults of the section `word_table`.

    Args:
        config: a valid configuration.
        num_rows: R, number of rows of the output layer.

    Returns:
        The resolved value.

    Example:
        >>> from lm.config import Config, WordTableConfig
        >>> config = Config(name="run", word_table=WordTableConfig(optimizer="adagrad", lr=0.05))
        >>> resolve_word_table(config, num_rows=10_000_000)
        WordTable(tied=False, dtype='fp32', row_wise=True, optimizer='adagrad', lr=0.05)
    """
    table = config.word_table
    row_wise = _row_wise(config, num_rows)
    return WordTable(
        tied=table.tied,
        dtype=table.dtype,
        row_wise=row_wise,
        optimizer=table.optimizer or ("sgd" if row_wise else None),
        lr=table.lr or config.optim.lr,
    )


def word_table_problem(config: Config) -> str | None:
    """The first conflict between the section `word_table` and the rest of a configuration.

    Returns:
        A message that starts with the key, or None if there is no conflict.
    """
    table, model, output, train = config.word_table, config.model, config.output, config.train
    if table.tied and model.embedding not in (None, model.hidden):
        return (
            f"word_table.tied requires model.embedding = model.hidden = {model.hidden},"
            f" got {model.embedding}"
        )
    if table.tied and output.tree == "adaptive":
        return "word_table.tied: output.tree: adaptive has no row for each word"
    if table.lr is not None and table.optimizer is None:
        return "word_table.lr requires word_table.optimizer"
    if table.dtype == "bf16":
        if table.gradients == "dense" or not _skips_unvisited_rows(config):
            return (
                "word_table.dtype: bf16 requires row-wise gradients:"
                " word_table.optimizer, and word_table.gradients: auto or row_wise"
            )
        if train.precision in ("bf16-true", "64-true"):
            return (
                f"word_table.dtype: bf16 cannot be combined with train.precision: {train.precision}"
            )
    elif table.gradients != "row_wise":
        return None
    if not _skips_unvisited_rows(config):
        return (
            "word_table.gradients: row_wise requires an optimizer that skips rows without a"
            " gradient: word_table.optimizer, or sgd without momentum and weight_decay"
        )
    if conflict := _conflict_with_row_wise(config):
        return f"row-wise gradients of word_table cannot be combined with {conflict}"
    return None


def _row_wise(config: Config, num_rows: int) -> bool:
    """Whether the gradients of the table hold visited rows only."""
    table = config.word_table
    if table.gradients != "auto" or table.dtype == "bf16":
        return table.gradients != "dense"
    if config.output.tree == "full":  # every row is visited
        return False
    large = num_rows * config.model.hidden >= ROW_WISE_ELEMENTS
    return large and _skips_unvisited_rows(config) and _conflict_with_row_wise(config) is None


def _skips_unvisited_rows(config: Config) -> bool:
    """Whether the table's optimizer leaves rows without a gradient unchanged."""
    optim = config.optim
    plain = optim.optimizer == "sgd" and optim.momentum == 0 and optim.weight_decay == 0
    return config.word_table.optimizer is not None or plain


def _conflict_with_row_wise(config: Config) -> str | None:
    """The setting that rules out row-wise gradients."""
    train = config.train
    conflicts = {
        f"train.devices: {train.devices}": train.devices != 1,
        f"train.strategy: {train.strategy}": train.strategy != "auto",
        "train.precision: 16-mixed": train.precision == "16-mixed",
        "output.tree: adaptive": config.output.tree == "adaptive",
    }
    return next((setting for setting, conflict in conflicts.items() if conflict), None)
