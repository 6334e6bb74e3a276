"""`lm new`: a recipe for a text of the user's, with sizes that fit the text and the computer.

A sample of the text gives the numbers of tokens and words; these choose one of three classes of
settings, each taken from a recipe in `configs/` that was measured, and the memory estimate of a
training run makes the model smaller where it does not fit. Nothing is tuned on the text.
"""

import json
import math
import os
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from data_prep.corpus.split import MIN_UNITS, Sample, Unit, read_sample, write_splits
from data_prep.errors import UserError
from data_prep.storage import folder_to_fill, new_folder, write_atomically
from data_prep.tokenizer.tokenizer import word_separator
from lm.config import Config, validate
from lm.output import ClassTree
from lm.run import Run
from lm.training.memory_estimate import estimate_memory

MAX_WORDS = 200_000
"""Vocabulary of the largest texts."""
CLUSTERED_WORDS = 20_000
"""Most frequent words that get optimized classes: 90 s for 40 million tokens."""
MEMORY_SHARE = 0.7
"""Part of the available memory that a recipe's training may take."""
CHARACTERS_PER_WORD = 20
"""Texts with longer words on average do not separate words by spaces."""
TINY_TOKENS, LARGE_TOKENS = 20_000, 5_000_000
PIECES, PIECES_BYTES = 8_000, 1_000_000
"""SentencePiece units of a text without spaces, if it has so many bytes."""


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """What the settings depend on; `tokens` and `words` are estimated from the sample."""

    tokens: int  # `<eos>` included
    words: int  # that a vocabulary of them would have
    split_punctuation: bool  # punctuation marks are attached to words
    has_spaces: bool  # words are separated by spaces
    min_count: int


def new_recipe(
    path: Path, text: Path, *, valid: Path | None, test: Path | None, unit: Unit | None
) -> str:
    """Write a recipe and, unless both are given, the validation and test split of its text.

    Args:
        path: the recipe to write; its name is that of the run.
        text: the training text, from which missing splits are taken.
        valid, test: text of these splits.
        unit: what the text is cut into; None: documents if there are enough, else lines.

    Returns:
        What was written, for the user.

    Raises:
        UserError: if the recipe or the folder of the splits exists, or a text cannot be read.
    """
    if path.exists():
        raise UserError(f"{path} already exists: choose another name")
    for given in filter(None, (text, valid, test)):
        if not given.is_file():  # a pipe cannot be read twice
            raise UserError(f"{given}: {'not a file' if given.exists() else 'no such file'}")
    sample = read_sample(text)
    files = {"train": text, "valid": valid, "test": test}
    size = measure(sample)
    # Before anything is written, so that a mistake leaves no files.
    config = fit(path, size, {split: str(file) for split, file in files.items() if file})
    held_out = [split for split, file in files.items() if file is None]
    unit = unit or sample.unit
    with ExitStack() as stack:  # a recipe that cannot be written leaves no splits
        stack.enter_context(folder_to_fill(path.parent))
        if not held_out:
            cut = "the given files"
        elif sample.num_units(unit) < MIN_UNITS:
            missing = " and no ".join(held_out)
            cut = f"none, the text has fewer than {MIN_UNITS} {unit}: no {missing}"
        else:
            folder, period = config.run_path / "text", sample.period
            unfinished = stack.enter_context(new_folder(folder))
            counts = write_splits(text, unfinished, unit, period, held_out)
            files |= {split: folder / f"{split}.txt" for split in counts}
            each = ", ".join(f"{split} {count:,}" for split, count in counts.items())
            share = f"one of {period} for {' and one for '.join(held_out)}"
            cut = f"by {unit} ({each}): {share}, in {folder}"
        if files["valid"] is None:
            config = replace(config, train=replace(config.train, val_every_steps=None))
        named = {split: str(file) for split, file in files.items() if file is not None}
        content = render(config, named, text, sample, size, cut)
        validate(yaml.safe_load(content), str(path))
        write_atomically(path, lambda file: file.write(content.encode()))
    then = f"then: lm train {path}\n      lm generate {config.run_path}"
    return f"{path}: {_about(sample, size)}\nsplit: {cut}\n{_model(config, size)}\n{then}"


def measure(sample: Sample) -> TextSize:
    """Estimate the size of a text from a sample, the vocabulary by Heaps' law.

    Words of an n times larger text: V n^β, with β from the first half and the whole of the sample.
    """
    words = [word for line in sample.lines for word in line.split()]
    if sum(map(len, words)) > CHARACTERS_PER_WORD * len(words) and sample.num_bytes >= PIECES_BYTES:
        num_characters = sum(map(len, sample.lines))
        tokens = math.ceil(num_characters / 1.5 / sample.share)
        return TextSize(
            tokens=tokens, words=PIECES, split_punctuation=False, has_spaces=False, min_count=1
        )
    marks = tuple(".,;:!?")
    attached = sum(len(word) > 1 and word.endswith(marks) for word in words)
    split_punctuation = attached > sum(word in marks for word in words)
    if split_punctuation:
        words = word_separator(False, True)(sample.lines).split()
    tokens = math.ceil((len(words) + sample.num_units("lines")) / sample.share)
    min_count = 1 if tokens < TINY_TOKENS else 2
    num_words, num_half = (
        2 + sum(count >= min_count for count in Counter(islice(words, end)).values())
        for end in (len(words), len(words) // 2)
    )
    exponent = min(1.0, max(0.0, math.log2(num_words / num_half)))
    return TextSize(
        tokens=tokens,
        words=min(MAX_WORDS, round(num_words * (1 / sample.share) ** exponent)),
        split_punctuation=split_punctuation,
        has_spaces=True,
        min_count=min_count,
    )


def fit(path: Path, size: TextSize, files: dict[str, str]) -> Config:
    """The settings for a text, with a model that fits into the available memory.

    Raises:
        UserError: if the path is no name for a run, there is such a run, or not even the smallest
            model fits.
    """
    values = settings(size)
    values |= {"name": path.stem, "data": {"files": files, "keep_empty_lines": False}}
    while True:
        config = validate(values, str(path))
        if (config.run_path / "config.yaml").exists():
            raise UserError(f"{config.run_path} already contains a run: choose another name")
        available = Run(config.run_path, config).available_bytes
        num_words = min(size.words, config.tokenizer.vocab_size or size.words)
        if available is None or _estimated_bytes(config, num_words) < MEMORY_SHARE * available:
            return config
        if values["model"]["hidden"] > 64:
            values["model"]["hidden"] //= 2
        elif size.has_spaces and num_words > 1000:
            values["tokenizer"]["vocab_size"] = num_words // 2
        else:
            raise UserError(f"{available / 1e9:.1f} GB of memory are too few for any model")


def settings(size: TextSize) -> dict[str, Any]:
    """The sections that depend on the text, as plain values."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = {"backbone": "lstm", "layers": 1, "input_embedding": "path_sum"}
    train: dict[str, Any]
    if size.tokens < TINY_TOKENS:
        model |= {"hidden": 64}
        optim = {"optimizer": "adamw", "lr": 5e-3, "schedule": "cosine"}
        batch_size = min(8, max(1, size.tokens // 200))
        train = {"max_steps": 300, "batch_size": batch_size, "seq_len": 16, "val_every_steps": 50}
    elif size.tokens < LARGE_TOKENS:  # as configs/wikitext2_lstm.yaml
        model |= {"hidden": 200, "count_word_dropout": 5, "dropout": 0.4, "init_range": 0.1}
        optim = {"optimizer": "sgd", "lr": 20, "clip": 0.25, "schedule": "plateau", "decay": 0.25}
        train = {"max_epochs": 12, "batch_size": 20, "seq_len": 35}
    else:  # as configs/eltec_hun_lstm.yaml
        model |= {"hidden": 300, "count_word_dropout": 5, "dropout": 0.1, "init_range": 0.1}
        optim = {"optimizer": "sgd", "lr": 20, "clip": 0.25, "schedule": "cosine"}
        train = {"max_epochs": 2 if size.tokens < 4 * LARGE_TOKENS else 1, "batch_size": 64}
        train |= {"seq_len": 64, "val_every_steps": 500}
    tokenizer: dict[str, Any] = {"kind": "sentencepiece", "vocab_size": PIECES}
    tokenizer |= {"byte_fallback": True}
    if size.has_spaces:
        tokenizer = {"kind": "words", "min_count": size.min_count}
        tokenizer |= {"split_punctuation": size.split_punctuation}
        if size.words >= MAX_WORDS:
            tokenizer["vocab_size"] = MAX_WORDS
    classes: dict[str, Any] = {"method": "exchange", "shortlist": min(1000, size.words // 33)}
    if size.words > CLUSTERED_WORDS:
        classes["clustered_words"] = CLUSTERED_WORDS
    return {
        "tokenizer": tokenizer,
        "classes": classes,
        "model": model,
        "output": {"tree": "two_level"},
        "word_table": {"tied": True},
        "optim": optim,
        "train": train | {"threads": min(8, threads or 1)},
    }


_COMMENTS = {
    "data": "empty lines are left out",
    "tokenizer": "words are separated by spaces; rarer ones than min_count are <unk>",
    "classes": "the words are divided into about √N classes, found in the text",
    "model": "larger hidden and layers: better with more text, and slower",
    "output": "P(word) = P(class) · P(word | class)",
    "word_table": "a word's output row is its input vector too",
    "optim": "found on other texts of this size; a lower lr if the loss is not finite",
    "train": "the best model on the validation text is kept",
}


def render(
    config: Config,
    files: dict[str, str],
    text: Path,
    sample: Sample,
    size: TextSize,
    cut: str,
) -> str:
    """The text of the YAML file: every setting that is not a default, with its reason."""
    values = settings(size)
    values["model"]["hidden"] = config.model.hidden
    if config.tokenizer.vocab_size is not None:
        values["tokenizer"]["vocab_size"] = config.tokenizer.vocab_size
    if config.train.val_every_steps is None:
        values["train"].pop("val_every_steps", None)
    values = {"data": {"files": files, "keep_empty_lines": False}, **values}
    comments = dict(_COMMENTS)
    if "valid" not in files:
        comments["train"] = "without a validation text the last model is kept"
    if not size.has_spaces:
        comments["tokenizer"] = (
            "few spaces in this text: units of a few characters instead of words"
        )
    lines = [
        f"# Purpose: a language model of {text}, written by lm new.",
        f"# Text: {_about(sample, size)}.",
        f"# Split: {cut}.",
        f"# Hardware: {_model(config, size)}.",
        "# Every key can be changed here or on the command line; lm config explains them.",
        f"name: {_flow(config.name)}",
    ]
    for section, keys in values.items():
        lines += [f"# {section}: {comments[section]}", f"{section}: {_flow(keys)}"]
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """A value on one line of YAML; JSON, which is YAML, where quotes are required."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value):
        return value if yaml.safe_load(value) == value else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def _about(sample: Sample, size: TextSize) -> str:
    exact = sample.share == 1
    source = "" if exact else f", estimated from {100 * sample.share:.2g} % of the text"
    kind = "words" if size.has_spaces else "units of SentencePiece"
    large = sample.num_bytes >= 100_000
    num_bytes = f"{sample.num_bytes / 1e6:,.1f} MB" if large else f"{sample.num_bytes:,} bytes"
    return (
        f"{num_bytes}, about {size.tokens:,} tokens and a vocabulary of about"
        f" {size.words:,} {kind}{source}"
    )


def _model(config: Config, size: TextSize) -> str:
    available = Run(config.run_path, config).available_bytes
    used = _estimated_bytes(config, min(size.words, config.tokenizer.vocab_size or size.words))
    of = "" if available is None else f" of {available / 1e9:.1f}"
    return (
        f"LSTM {config.model.layers} × {config.model.hidden}, {config.train.threads} CPU threads,"
        f" {used / 1e9:.1f}{of} GB of memory"
    )


def _estimated_bytes(config: Config, num_words: int) -> int:
    """Memory of the training run, with classes of equal size."""
    num_words = max(1, num_words)
    word_class = torch.arange(num_words) * math.isqrt(num_words) // num_words
    tree = ClassTree.two_level(word_class, min(config.classes.shortlist, num_words))
    run = Run(config.run_path, config)
    run.tree = tree
    return estimate_memory(run).total
