"""Rules that span several keys of the configuration."""

import re

from data_prep.settings import SplitFiles
from lm.config.schema import Config
from lm.config.word_table import conflict_with_row_wise, skips_unvisited_rows


def first_problem(config: Config) -> str | None:
    """A line on the first conflict between keys whose values are valid one by one, or None."""
    model, train, table = config.model, config.train, config.word_table
    transformer = model.backbone == "transformer"
    double = train.precision == "64-true"
    adaptive = config.output.tree == "adaptive"
    bf16, row_wise = table.dtype == "bf16", table.gradients == "row_wise"
    skips_rows, conflict = skips_unvisited_rows(config), conflict_with_row_wise(config)
    has_files, by_time = config.data.files != SplitFiles(), train.max_minutes
    has_limit = train.max_epochs or train.max_steps or by_time
    head_sizes = f"model.hidden = {model.hidden} must be a multiple of 2 × model.heads"
    problems = {
        "train.max_epochs, train.max_steps or train.max_minutes is required": not has_limit,
        f"{head_sizes} = {2 * (model.heads or 1)}": transformer
        and model.hidden % (2 * (model.heads or 1)),
        "tokenizer.kind: sentencepiece requires tokenizer.vocab_size": (
            config.tokenizer.kind == "sentencepiece" and config.tokenizer.vocab_size is None
        ),
        f"model.input_pieces requires tokenizer.kind: words, got {config.tokenizer.kind}": (
            model.input_pieces is not None and config.tokenizer.kind != "words"
        ),
        "data.hub and data.files exclude each other: omit the files, or set data.hub to null": (
            has_files and config.data.hub is not None
        ),
        "output.backend: triton cannot be combined with train.precision: 64-true": (
            double and config.output.backend == "triton"
        ),
        "train.seq_len must be at least 2 for a transformer": transformer and train.seq_len < 2,
        f"word_table.tied requires model.embedding = model.hidden = {model.hidden}, got"
        f" {model.embedding}": table.tied and model.embedding not in (None, model.hidden),
        "train.strategy: shard_output cannot be combined with output.tree: adaptive": (
            adaptive and train.strategy == "shard_output"
        ),
        "word_table.lr requires word_table.optimizer": table.lr and table.optimizer is None,
        "word_table.dtype: bf16 requires row-wise gradients: word_table.optimizer, and"
        " word_table.gradients: auto or row_wise": (
            bf16 and (table.gradients == "dense" or not skips_rows)
        ),
        f"word_table.dtype: bf16 cannot be combined with train.precision: {train.precision}": (
            bf16 and (double or train.precision == "bf16-true")
        ),
        "word_table.gradients: row_wise requires an optimizer that skips rows without a gradient:"
        " word_table.optimizer, or sgd without momentum and weight_decay": (
            row_wise and not skips_rows
        ),
        f"row-wise gradients of word_table cannot be combined with {conflict}": (
            conflict and (bf16 or row_wise)
        ),
    }
    problems |= _tree_problems(config) | _class_problems(config)
    problems |= _run_problems(config) | _sequence_problems(config)
    return next((problem for problem, applies in problems.items() if applies), None)


def _sequence_problems(config: Config) -> dict[str, bool]:
    data, tokenizer = config.data, config.tokenizer
    independent, by_user = data.sequences == "independent", data.user_field is not None
    others = data.files.valid is not None or data.files.test is not None
    has_limits = data.valid_from is not None or data.test_from is not None
    is_plain = tokenizer.kind == "words" and not tokenizer.split_punctuation
    return {
        "data.sequences: independent requires tokenizer.kind: words and"
        " tokenizer.split_punctuation: false": independent and not is_plain,
        "data.user_field and data.predict_eos require data.sequences: independent": (
            (by_user or data.predict_eos) and not independent
        ),
        f"data.user_field requires data.format: parquet, json or csv, and no data.hub, got"
        f" {data.format}": by_user and (data.format == "text" or data.hub is not None),
        f"data.split: {data.split} requires data.user_field, and no data.files.valid or"
        " data.files.test": data.split != "files" and (others or not by_user),
        f"data.split: time requires data.time_field, got {data.time_field}": (
            data.split == "time" and data.time_field is None
        ),
        f"data.valid_from and data.test_from require data.split: time, got {data.split}": (
            has_limits and data.split != "time"
        ),
        f"data.predict_eos requires data.split: files, got {data.split}": (
            data.predict_eos and data.split != "files"
        ),
    }


def _tree_problems(config: Config) -> dict[str, bool]:
    model, output, tied = config.model, config.output, config.word_table.tied
    adaptive, sharded = output.tree == "adaptive", config.train.strategy == "shard_output"
    path_sum = model.input_embedding == "path_sum"
    sums_output_paths = path_sum and model.input_tree == "output"
    unset = {
        "model.input_embedding: word, or model.input_tree: two_level": sums_output_paths,
        "word_table.tied: false": tied,
    }
    return {
        f"output.tree: adaptive requires {', '.join(key for key in unset if unset[key])}": (
            adaptive and any(unset.values())
        ),
        "model.input_embedding: path_sum cannot be combined with output.tree: full, which has no"
        " classes: set model.input_embedding: word, or model.input_tree: two_level": (
            sums_output_paths and output.tree == "full"
        ),
        "model.input_tree: two_level requires model.input_embedding: path_sum": (
            model.input_tree == "two_level" and not path_sum
        ),
        f"model.input_tree: two_level with output.tree: {output.tree} cannot be combined"
        " with train.strategy: shard_output": config.has_input_tree and sharded,
        f"output.tail_dropout requires output.tree: adaptive, got {output.tree}": (
            output.tail_dropout > 0 and not adaptive
        ),
        "output.num_samples requires output.tree: full, and no train.strategy: shard_output": (
            output.num_samples is not None and (output.tree != "full" or sharded)
        ),
    }


def _class_problems(config: Config) -> dict[str, bool]:
    classes, by_file = config.classes, config.classes.method == "file"
    multi_level = config.output.tree == "multi_level"
    return {
        "classes.method: file requires classes.file": by_file and classes.file is None,
        f"classes.file requires classes.method: file, got {classes.method}": (
            not by_file and classes.file is not None
        ),
        "classes.vectors requires classes.method: embedding and output.tree: two_level, and no"
        " classes.clustered_words": classes.vectors is not None
        and (classes.method != "embedding" or multi_level or classes.clustered_words is not None),
        "output.tree: multi_level requires classes.file_format: brown or taxonomy, got"
        f" {classes.file_format}": (
            multi_level and by_file and classes.file_format not in ("brown", "taxonomy")
        ),
        f"classes.depth requires output.tree: multi_level, got {config.output.tree}": (
            classes.depth is not None and not multi_level
        ),
    }


def _run_problems(config: Config) -> dict[str, bool]:
    schedule, train = config.optim.schedule, config.train
    by_time = train.max_minutes is not None
    return {
        f"train.shard_by: {train.shard_by} requires train.strategy: shard_output": (
            train.shard_by != "auto" and train.strategy != "shard_output"
        ),
        "train.max_minutes requires a schedule that ends with the time: set optim.schedule: cosine,"
        f" got {schedule}": by_time and schedule in ("plateau", "step"),
        f"name must be a plain file name, got {config.name!r}": (
            config.name[:1] in ("", ".") or bool(re.search("[/\x00-\x1f\x7f-\x9f]", config.name))
        ),
    }
