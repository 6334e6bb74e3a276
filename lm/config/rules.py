"""Rules that span several keys of the configuration."""

from data_prep.settings import SplitFiles
from lm.config.schema import Config
from lm.config.word_table import word_table_problem


def first_problem(config: Config) -> str | None:
    """The first conflict between keys of a configuration whose values are valid one by one.

    Returns:
        A single-line message, or None if there is no conflict.
    """
    model, train, classes = config.model, config.train, config.classes
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
    }
    broken = (problem for problem, applies in problems.items() if applies)
    return next(broken, None) or word_table_problem(config)
