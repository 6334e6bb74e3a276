"""Rules that span several keys of the configuration."""

from data_prep.settings import SplitFiles
from lm.config.schema import Config
from lm.config.word_table import conflict_with_row_wise, skips_unvisited_rows


def first_problem(config: Config) -> str | None:
    """A line on the first conflict between keys whose values are valid one by one, or None."""
    model, train, classes, table = config.model, config.train, config.classes, config.word_table
    bf16, skips_rows = table.dtype == "bf16", skips_unvisited_rows(config)
    conflict = conflict_with_row_wise(config)
    head_sizes = f"model.hidden = {model.hidden} must be a multiple of 2 × model.heads"
    problems = {
        "train.max_epochs or train.max_steps is required": (
            train.max_epochs is None and train.max_steps is None
        ),
        f"{head_sizes} = {2 * model.heads}": (
            model.backbone == "transformer" and model.hidden % (2 * model.heads) != 0
        ),
        "model.input_embedding: path_sum cannot be combined with output.tree: adaptive": (
            model.input_embedding == "path_sum" and config.output.tree == "adaptive"
        ),
        "tokenizer.kind: sentencepiece requires tokenizer.vocab_size": (
            config.tokenizer.kind == "sentencepiece" and config.tokenizer.vocab_size is None
        ),
        "classes.method: file requires classes.file": (
            classes.method == "file" and classes.file is None
        ),
        f"classes.file requires classes.method: file, got {classes.method}": (
            classes.method != "file" and classes.file is not None
        ),
        "data.hub and data.files exclude each other: omit the files, or set data.hub to null": (
            config.data.hub is not None and config.data.files != SplitFiles()
        ),
        "output.backend: triton cannot be combined with train.precision: 64-true": (
            config.output.backend == "triton" and train.precision == "64-true"
        ),
        "train.seq_len must be at least 2 for a transformer": (
            train.seq_len < 2 and model.backbone == "transformer"
        ),
        f"name must be a plain file name, got {config.name!r}": (
            not config.name or "/" in config.name or config.name.startswith(".")
        ),
        "word_table.tied requires model.embedding = model.hidden ="
        f" {model.hidden}, got {model.embedding}": (
            table.tied and model.embedding not in (None, model.hidden)
        ),
        "word_table.tied: output.tree: adaptive has no row for each word": (
            table.tied and config.output.tree == "adaptive"
        ),
        "word_table.lr requires word_table.optimizer": (
            table.lr is not None and table.optimizer is None
        ),
        "word_table.dtype: bf16 requires row-wise gradients: word_table.optimizer, and"
        " word_table.gradients: auto or row_wise": (
            bf16 and (table.gradients == "dense" or not skips_rows)
        ),
        f"word_table.dtype: bf16 cannot be combined with train.precision: {train.precision}": (
            bf16 and train.precision in ("bf16-true", "64-true")
        ),
        "word_table.gradients: row_wise requires an optimizer that skips rows without a gradient:"
        " word_table.optimizer, or sgd without momentum and weight_decay": (
            table.gradients == "row_wise" and not skips_rows
        ),
        f"row-wise gradients of word_table cannot be combined with {conflict}": (
            conflict is not None and (bf16 or table.gradients == "row_wise")
        ),
    }
    return next((problem for problem, applies in problems.items() if applies), None)
