"""Rules that span several keys of the configuration."""

import re

from data_prep.settings import SplitFiles
from lm.config.schema import Config
from lm.config.word_table import conflict_with_row_wise, skips_unvisited_rows


def first_problem(config: Config) -> str | None:
    """A line on the first conflict between keys whose values are valid one by one, or None."""
    rules = (_model, _word_table, _tree, _classes, _training, _sequences)
    return next(filter(None, (problem_of(config) for problem_of in rules)), None)


def _model(config: Config) -> str | None:
    model, train, tokenizer = config.model, config.train, config.tokenizer
    if not (train.max_epochs or train.max_steps or train.max_minutes):
        return "train.max_epochs, train.max_steps or train.max_minutes is required"
    transformer, smallest = model.backbone == "transformer", 2 * (model.heads or 1)
    if transformer and model.hidden % smallest:
        return f"model.hidden = {model.hidden} must be a multiple of 2 × model.heads = {smallest}"
    if tokenizer.kind == "sentencepiece" and tokenizer.vocab_size is None:
        return "tokenizer.kind: sentencepiece requires tokenizer.vocab_size"
    if model.input_pieces is not None and tokenizer.kind != "words":
        return f"model.input_pieces requires tokenizer.kind: words, got {tokenizer.kind}"
    if config.data.files != SplitFiles() and config.data.hub is not None:
        return "data.hub and data.files exclude each other: omit the files, or set data.hub to null"
    if train.precision == "64-true" and config.output.backend == "triton":
        return "output.backend: triton cannot be combined with train.precision: 64-true"
    if transformer and train.seq_len < 2:
        return "train.seq_len must be at least 2 for a transformer"
    return None


def _word_table(config: Config) -> str | None:
    model, train, table = config.model, config.train, config.word_table
    bf16, row_wise = table.dtype == "bf16", table.gradients == "row_wise"
    skips_rows, conflict = skips_unvisited_rows(config), conflict_with_row_wise(config)
    if table.tied and model.embedding not in (None, model.hidden):
        required = f"word_table.tied requires model.embedding = model.hidden = {model.hidden}"
        return f"{required}, got {model.embedding}"
    if config.output.tree == "adaptive" and train.strategy == "shard_output":
        return "train.strategy: shard_output cannot be combined with output.tree: adaptive"
    if table.lr and table.optimizer is None:
        return "word_table.lr requires word_table.optimizer"
    if bf16 and (table.gradients == "dense" or not skips_rows):
        return (
            "word_table.dtype: bf16 requires row-wise gradients: word_table.optimizer, and"
            " word_table.gradients: auto or row_wise"
        )
    if bf16 and train.precision in ("64-true", "bf16-true"):
        return f"word_table.dtype: bf16 cannot be combined with train.precision: {train.precision}"
    if row_wise and not skips_rows:
        return (
            "word_table.gradients: row_wise requires an optimizer that skips rows without a"
            " gradient: word_table.optimizer, or sgd without momentum and weight_decay"
        )
    if conflict and (bf16 or row_wise):
        return f"row-wise gradients of word_table cannot be combined with {conflict}"
    return None


def _tree(config: Config) -> str | None:
    model, output, tied = config.model, config.output, config.word_table.tied
    adaptive, sharded = output.tree == "adaptive", config.train.strategy == "shard_output"
    path_sum = model.input_embedding == "path_sum"
    sums_output_paths = path_sum and model.input_tree == "output"
    way_out = "model.input_embedding: word, or model.input_tree: two_level"
    unset = [way_out] * sums_output_paths + ["word_table.tied: false"] * tied
    if adaptive and unset:
        return f"output.tree: adaptive requires {', '.join(unset)}"
    if sums_output_paths and output.tree == "full":
        return (
            "model.input_embedding: path_sum cannot be combined with output.tree: full, which has"
            f" no classes: set {way_out}"
        )
    if model.input_tree == "two_level" and not path_sum:
        return "model.input_tree: two_level requires model.input_embedding: path_sum"
    if config.has_input_tree and sharded:
        return (
            f"model.input_tree: two_level with output.tree: {output.tree} cannot be combined"
            " with train.strategy: shard_output"
        )
    if output.tail_dropout and not adaptive:
        return f"output.tail_dropout requires output.tree: adaptive, got {output.tree}"
    if output.num_samples is not None and (output.tree != "full" or sharded):
        return "output.num_samples requires output.tree: full, and no train.strategy: shard_output"
    return None


def _classes(config: Config) -> str | None:
    classes, tree = config.classes, config.output.tree
    by_file, multi_level = classes.method == "file", tree == "multi_level"
    if by_file and classes.file is None:
        return "classes.method: file requires classes.file"
    if not by_file and classes.file is not None:
        return f"classes.file requires classes.method: file, got {classes.method}"
    has_other_classes = multi_level or classes.clustered_words is not None
    if classes.vectors is not None and (classes.method != "embedding" or has_other_classes):
        return (
            "classes.vectors requires classes.method: embedding and output.tree: two_level, and no"
            " classes.clustered_words"
        )
    if multi_level and by_file and classes.file_format not in ("brown", "taxonomy"):
        required = "output.tree: multi_level requires classes.file_format: brown or taxonomy"
        return f"{required}, got {classes.file_format}"
    if classes.depth is not None and not multi_level:
        return f"classes.depth requires output.tree: multi_level, got {tree}"
    return None


def _training(config: Config) -> str | None:
    train, schedule = config.train, config.optim.schedule
    if train.shard_by != "auto" and train.strategy != "shard_output":
        return f"train.shard_by: {train.shard_by} requires train.strategy: shard_output"
    if train.max_minutes is not None and schedule in ("plateau", "step"):
        return (
            "train.max_minutes requires a schedule that ends with the time: set optim.schedule:"
            f" cosine, got {schedule}"
        )
    if config.name[:1] in ("", ".") or re.search("[/\x00-\x1f\x7f-\x9f]", config.name):
        return f"name must be a plain file name, got {config.name!r}"
    return None


def _sequences(config: Config) -> str | None:
    data, tokenizer = config.data, config.tokenizer
    independent, by_user = data.sequences == "independent", data.user_field is not None
    has_others = data.files.valid is not None or data.files.test is not None
    if independent and (tokenizer.kind != "words" or tokenizer.split_punctuation):
        return (
            "data.sequences: independent requires tokenizer.kind: words and"
            " tokenizer.split_punctuation: false"
        )
    if (by_user or data.predict_eos) and not independent:
        return "data.user_field and data.predict_eos require data.sequences: independent"
    if by_user and (data.format == "text" or data.hub is not None):
        required = "data.user_field requires data.format: parquet, json or csv, and no data.hub"
        return f"{required}, got {data.format}"
    if data.split != "files" and (has_others or not by_user):
        required = "requires data.user_field, and no data.files.valid or data.files.test"
        return f"data.split: {data.split} {required}"
    if data.split == "time" and data.time_field is None:
        return "data.split: time requires data.time_field, got None"
    if data.split != "time" and (data.valid_from is not None or data.test_from is not None):
        keys = "data.valid_from and data.test_from"
        return f"{keys} require data.split: time, and else null, got {data.split}"
    if data.predict_eos and data.split != "files":
        return f"data.predict_eos requires data.split: files, got {data.split}"
    return None
