"""Rules that span several keys of the configuration."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from data_prep.settings import SplitFiles
from lm.config.schema import Config
from lm.config.word_table import conflict_with_row_wise, skips_unvisited_rows


def first_problem(config: Config) -> str | None:
    """A line on the first conflict between keys whose values are valid one by one, or None."""
    rules = (_model, _word_table, _tree, _classes, _training, _sequences)
    return next(filter(None, (problem_of(config) for problem_of in rules)), None)


_REQUIRED = {
    "data.hub_config": "data.hub: NAME",
    "data.format": "data.hub: null",
    "data.text_field": "data.format: parquet, json, csv; data.hub: NAME",
    "data.text_field data.keep_empty_lines": "data.user_field: null",
    "data.item_field data.time_field data.ties": "data.user_field: NAME",
    "data.ties": "data.time_field: NAME",
    "data.valid_from data.test_from": "data.split: time",
    "tokenizer.min_count tokenizer.lowercase tokenizer.split_punctuation": "tokenizer.kind: words",
    "tokenizer.model_type tokenizer.byte_fallback tokenizer.character_coverage"
    " tokenizer.max_sentences": "tokenizer.kind: sentencepiece",
    "classes.method classes.num_word_classes classes.shortlist classes.seed"
    " classes.clustered_words classes.dimensions classes.max_words classes.vectors classes.file"
    " classes.file_format": "output.tree: two_level, multi_level; model.input_tree: two_level",
    "classes.seed": "classes.method: exchange, embedding, random",
    "classes.clustered_words classes.dimensions classes.max_words": "classes.method: exchange,"
    " embedding",
    "classes.dimensions": "classes.vectors: null",
    "classes.file classes.file_format": "classes.method: file",
    "model.input_tree": "model.input_embedding: path_sum",
    "model.dropout_weight model.dropout_variational model.residual": "model.backbone: lstm",
    "model.dropout_variational": "model.dropout: not 0.0",
    "model.heads model.feedforward": "model.backbone: transformer",
    "output.branching": "output.tree: balanced",
    "output.arity": "output.tree: huffman",
    "output.cutoffs output.tail_dropout": "output.tree: adaptive",
    "output.backend": "output.tree: not adaptive",
    "optim.momentum": "optim.optimizer: sgd",
    "optim.betas": "optim.optimizer: adamw; word_table.optimizer: adam",
    "optim.min_lr_factor": "optim.schedule: cosine",
    "optim.decay": "optim.schedule: step, plateau",
    "optim.decay_after_epochs": "optim.schedule: step",
    "train.shard_by": "train.strategy: shard_output",
    "train.skip_nonfinite_steps": "train.precision: not 16-mixed",
}
"""Keys, and the values of others without which they have no effect; NAME is any."""


def keys_without_effect(values: Mapping[str, Any], chosen: Collection[str] = ()) -> dict[str, str]:
    """The keys that have no effect with the others, and what each requires.

    `values` are those of all keys, `section.key` → value. A requirement that names one of the
    `chosen` keys is left out.
    """
    found: dict[str, str] = {}
    for keys, text in _REQUIRED.items():
        choices = [choice.split(": ") for choice in text.split("; ")]
        if not any(_holds(values[key], allowed) or key in chosen for key, allowed in choices):
            key = choices[0][0]
            required = text.replace(", ", " or ").replace("; ", ", or ")
            found |= dict.fromkeys(keys.split(), f"{required}, got {_shown(values[key])}")
    return found


def _holds(value: Any, allowed: str) -> bool:
    if allowed.startswith("not "):
        return _shown(value) != allowed.removeprefix("not ")
    return value is not None if allowed == "NAME" else _shown(value) in allowed.split(", ")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


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
    for key, needs_it in (("word_table.tied", table.tied), ("model.residual", model.residual)):
        if needs_it and model.embedding not in (None, model.hidden):
            required = f"{key} requires model.embedding = model.hidden = {model.hidden}"
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
    if config.has_input_tree and sharded:
        return (
            f"model.input_tree: two_level with output.tree: {output.tree} cannot be combined"
            " with train.strategy: shard_output"
        )
    if output.num_samples is not None and (output.tree != "full" or sharded):
        return "output.num_samples requires output.tree: full, and no train.strategy: shard_output"
    return None


def _classes(config: Config) -> str | None:
    classes, tree = config.classes, config.output.tree
    by_file, multi_level = classes.method == "file", tree == "multi_level"
    if by_file and classes.file is None:
        return "classes.method: file requires classes.file"
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
    if train.max_minutes is not None and schedule in ("plateau", "step"):
        return (
            "train.max_minutes requires a schedule that ends with the time: set optim.schedule:"
            f" cosine, got {schedule}"
        )
    if train.keep == "ndcg" and not config.ranks_items:
        return (
            "train.keep: ndcg requires data.sequences: independent, and neither output.tree:"
            " adaptive nor train.strategy: shard_output"
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
    if data.predict_eos and data.split != "files":
        return f"data.predict_eos requires data.split: files, got {data.split}"
    return None
