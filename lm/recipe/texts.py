"""`lm new`: a recipe for a text of the user's, with sizes that fit the text and the computer.

The settings are those of measured recipes in `configs/`, chosen by the number of tokens. A sample
of the text gives that number and the tokenizer. The memory estimate of a training run makes the
model smaller where it does not fit. Nothing is tuned on the text.
"""

import json
import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from string import Template
from typing import Literal

import torch
import yaml

from data_prep.corpus.hints import AS_TABLE, NUM_LINES, UNSPACED, find_text, warn_of
from data_prep.corpus.lines import TextFile
from data_prep.corpus.split import (
    MIN_UNITS,
    Sample,
    Sizes,
    Unit,
    check_file,
    count_units,
    read_sample,
    split_text,
)
from data_prep.errors import UserError
from data_prep.settings import TokenizerConfig
from data_prep.storage import folder_to_fill, new_folder, write_hashed
from data_prep.tokenizer.punctuation import STOPS, UNK, separate_words
from lm.config import Config, validate
from lm.output import ClassTree
from lm.run import Run
from lm.training.memory_estimate import estimate_memory

RECIPE = """\
# Every key can be changed here or on the command line; lm config explains them.
name: $name
$data
tokenizer: {$tokenizer}
# The words are divided into about √N classes, found in the text.
classes: {method: exchange, shortlist: $shortlist$clustered}
# P(word) = P(class) · P(word | class)
output: {tree: two_level}
# A word's output row is its input vector too.
word_table: {tied: true}
# A start for texts of this size. Larger hidden and layers: better with more text, and slower. A
# lower lr if the loss is not finite. The best model on the validation text is kept, else the last.
"""
TEXT = """\
# Empty lines are left out.
data: {files: {$files}, keep_empty_lines: false}
# Words that are rarer than min_count are <unk>; pieces are for text without spaces."""
EVENTS = """\
# Items of one user, in the order of time_field (null: of the rows), are a sequence.
data: {files: {$files}, $events}
# All items of training are in the catalogue."""
FIRST_TRY = """\
model: {backbone: lstm, layers: 1, input_embedding: path_sum, hidden: $hidden}
optim: {optimizer: adamw, lr: 0.005, schedule: cosine}
train: {max_steps: 300, batch_size: $batch, seq_len: 16, val_every_steps: 50, threads: $threads}
"""
"""For texts of fewer than `FEW_TOKENS`."""
LSTM = """\
model: {backbone: lstm, layers: 1, input_embedding: path_sum, hidden: $hidden, dropout: $dropout,
  count_word_dropout: 5, init_range: 0.1$pieces}
optim: {optimizer: sgd, lr: 20, clip: 0.25, schedule: cosine}
train: {max_epochs: $epochs, batch_size: $batch, seq_len: $length, threads: $threads$validation}
"""
"""With the optimizer of configs/wikitext2_lstm.yaml, eltec_hun_lstm.yaml and items.yaml."""
SPARSE_ITEMS = """\
# The last item's vector is added to the output: items near it are probable from the start.
model: {backbone: lstm, layers: 1, input_embedding: path_sum, residual: true, hidden: $hidden,
  dropout: $dropout}
optim: {optimizer: adamw, lr: 0.006, weight_decay: 0.01, schedule: cosine}
train: {max_epochs: $epochs, batch_size: 256, seq_len: $length, threads: $threads}
"""
"""For tables of fewer than `DENSE` events per item."""
TRANSFORMER = """\
model: {backbone: transformer, layers: $layers, input_embedding: path_sum, hidden: $hidden,
  dropout: 0.1, count_word_dropout: 5}
optim: {optimizer: adamw, lr: 0.001, weight_decay: 0.1, clip: 1.0, schedule: cosine,
  warmup_steps: $warmup}
train: {max_epochs: $epochs, batch_size: $batch, seq_len: $length, threads: $threads}
"""
"""For texts of all sizes, with the optimizer of configs/wikitext2_transformer.yaml."""
FEW_TOKENS, MANY_TOKENS = 20_000, 5_000_000
"""Sizes of texts from which there are other settings."""
DENSE = 100
"""Events per item from which `SPARSE_ITEMS` is no better: it is for 16, 58 and 60, not for 270."""
HIDDEN_SIZES: dict[str, dict[float, tuple[int, ...]]] = {
    "lstm": {FEW_TOKENS: (64,), 200_000: (200, 128, 64), math.inf: (300, 200, 128, 64)},
    "items": {FEW_TOKENS: (64,), math.inf: (200, 128, 64)},
    "sparse items": {math.inf: (128, 64)},
    "transformer": {FEW_TOKENS: (64,), MANY_TOKENS: (256, 128, 64), math.inf: (320, 256, 128, 64)},
}
"""Sizes of the model for texts of fewer tokens; the first one that fits is taken."""
MEMORY_SHARE = 0.7
"""Part of the available memory that a recipe's training may take."""
MAX_WORDS = 200_000
COUNTED_BYTES = 1 << 28
"""The words of texts up to this size are counted, and not estimated from a sample."""
ALL_CLUSTERED = 60_000
"""Vocabularies up to this size have no other classes than those found in the text."""
INPUT_PIECES = 4_000
"""Pieces of the words at most, and of a smaller vocabulary a fourth of its words: they lower the
perplexity of English and of Hungarian (scripts/reproduction/PROTOCOL.md)."""
PIECES, PIECES_BYTES = 8_000, 1_000_000
"""Texts without spaces have SentencePiece units from this size on, and else characters."""
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ITEMS = "kind: words, min_count: 1, split_punctuation: false"
"""The tokenizer of item ids, which have digits: all are words, and they have no stems."""
MANY_RARE, MOSTLY_RARE = 0.2, 0.4
"""Shares of words that occur once: above the first one warns, above the second words are spelled.

About the same share of new text is unknown (Good & Turing 1953)."""
FEW_WORDS = 1_000
"""Least number of words from which these shares mean something."""

logger = logging.getLogger(__name__)


def new_recipe(
    path: Path,
    text: Path,
    *,
    valid: Path | None,
    test: Path | None,
    unit: Unit | None,
    backbone: Literal["lstm", "transformer"] = "lstm",
    text_field: str | None = None,
) -> str:
    """Write a recipe and, unless both are given, the validation and test split of its text.

    The text of files with columns is copied. Returns a summary for the user.

    Args:
        path: the recipe to write; its name is that of the run.
        text: the training text, from which missing splits are taken.
        valid, test: text of these splits.
        unit: what the text is cut into; None: documents if there are enough, else lines. Of a
            table, both None and documents are rows.
        backbone: network of the model.
        text_field: column of the text, if the files have columns; None: it is found.

    Raises:
        UserError: if the recipe, the run or its text exists, or a text cannot be read.
    """
    files = {"train": text} | ({"valid": valid} if valid else {}) | ({"test": test} if test else {})
    run = Config(name=path.stem).run_path
    check_names(path, run, files.values())
    texts = {split: find_text(file, text_field) for split, file in files.items()}
    samples = {split: read_sample(each) for split, each in texts.items()}
    last_change = text.stat().st_mtime_ns
    sample = samples["train"]
    column = "" if texts["train"].format == "text" else f", column {texts['train'].field}"
    warn_of(sample.lines[:NUM_LINES], f"{text}{column}", "--text-field=NAME reads one column")
    if column and unit != "lines":
        unit = "rows"
    num_tokens, num_words, tokenizer = measure(sample)
    held_out = [split for split in ("valid", "test") if split not in files]
    cut = "the given files"
    sample = count_units(texts["train"], sample, unit or "lines") if held_out else sample
    if held_out and (sample.num_counted or sample.num_units(unit or "lines")) < MIN_UNITS:
        cut = f"none, the text has fewer than {MIN_UNITS} {unit or 'lines'}: no "
        cut, held_out = cut + " and no ".join(held_out), []
        if unit == "rows" and sample.num_units("lines") >= MIN_UNITS:
            cut += ", unless --split-by=lines divides rows"
    density = num_tokens / sample.num_bytes
    copied = [split for split in texts if texts[split].format != "text"]
    written = dict.fromkeys([*copied, *(["train", *held_out] if held_out else [])])
    files |= {split: run / f"text/{split}.txt" for split in written}
    with ExitStack() as stack:  # a recipe that cannot be written leaves no splits
        stack.enter_context(folder_to_fill(path.parent))
        about, training, unknown = "about ", text, ""
        if written:
            unfinished = stack.enter_context(new_folder(run / "text"))
            training = unfinished / "train.txt" if "train" in written else text
        for split in copied:
            lines = (line.encode() + b"\n" for line in texts[split].lines())
            write_hashed(unfinished / f"{split}.txt", lines)
        if held_out:
            unit, sizes = split_text(texts["train"], unfinished, sample, held_out, unit)
            tokens = {split: density * size for split, (_, size) in sizes.items()}
            cut = f"{_shares(unit, sizes, tokens, sample.period)}, in {run / 'text'}"
        if text.stat().st_mtime_ns != last_change:
            raise UserError(f"{text} changed while it was read: try again")
        if sample.num_bytes <= COUNTED_BYTES and "kind: words" in tokenizer:
            about, num_words, unknown = "", *count_vocabulary(training, tokenizer)
        content, model = fit(path, files, num_tokens, num_words, tokenizer, backbone)
        summary = (
            f"{path}: for {texts['train'].source}, {sample.num_bytes:,} bytes, about"
            f" {num_tokens:,} tokens and a vocabulary of {about}{num_words:,}{unknown}\n"
            f"split: {cut}\nmodel: {model}\n"
        )
        write_recipe(path, summary, content)
    recipe, run_dir = shlex.quote(str(path)), shlex.quote(str(run))
    return f"{summary}then: lm train {recipe}\n      lm generate {run_dir}"


def check_names(path: Path, run: Path, files: Iterable[Path]) -> None:
    """UserError if the recipe or the run exists, a name is unusable, or a file is none."""
    for each in (path, run / "config.yaml"):
        if each.exists():
            raise UserError(f"{each} already exists: choose another name")
    files = [*files]
    for each in (path, *files):
        if CONTROL_CHARACTERS.search(str(each)):
            raise UserError(f"{str(each)!a}: a name must not have control characters")
    for each in files:
        check_file(each)


def write_recipe(path: Path, summary: str, content: str) -> None:
    """Write a recipe that begins with a summary, as comments."""
    header = "".join(f"# {line}" for line in summary.splitlines(keepends=True))
    write_hashed(path, [header.encode(), content.encode()])


def _shares(unit: Unit, sizes: Sizes, tokens: dict[str, float], period: int) -> str:
    """What a text was cut into, and the size of each split."""
    parts = ", ".join(
        f"{split} {units:,} {unit} (about {tokens[split]:,.0f} tokens)"
        for split, (units, _) in sizes.items()
    )
    held_out = " and one for ".join(split for split in sizes if split != "train")
    return f"by {unit}, {parts}: one of {period} for {held_out}"


def count_vocabulary(training: Path, tokenizer: str) -> tuple[int, str]:
    """The number of words that the preparation finds in a training text, and those left out."""
    from data_prep.tokenizer.vocabulary import count_words  # imports pyarrow and numba

    if tokenizer == ITEMS:
        logger.warning("the words are items, which are read as one text; %s", AS_TABLE)
    settings = TokenizerConfig(**yaml.safe_load(f"{{{tokenizer}}}"))
    lines = (line for line in TextFile(training).lines() if line.strip())
    found = count_words(lines, settings)
    num_unknown, num_tokens = int(found.counts[found.words.id(UNK)]), int(found.counts.sum())
    rare = (num_unknown or int((found.counts == 1).sum())) / num_tokens
    if rare > MANY_RARE and num_tokens >= FEW_WORDS:
        logger.warning(
            "%.0f %% of the training tokens occur once, and about as many of other text are"
            " unknown: pieces of words spell them, --model.input_pieces=null"
            " --tokenizer='{kind: sentencepiece, vocab_size: 8000, byte_fallback: true}'",
            100 * rare,
        )
    if not num_unknown:
        return len(found.words), ""
    share = f"{num_unknown / num_tokens:.1%}".replace("%", " %")
    return len(found.words), f" ({share} of the training tokens are other words, `<unk>`)"


def measure(sample: Sample) -> tuple[int, int, str]:
    """Estimate the tokens of a text and its vocabulary, and choose the tokenizer, from a sample.

    Words of an n times larger text: V n^β (Heaps' law), with β from the first half and the whole of
    the sample.
    """
    words = [word for line in sample.lines for word in line.split()]
    characters, num_lines = "".join(words), sample.num_units("lines")
    unspaced = [word for word in words if UNSPACED.search(word)]
    num_letters = len(UNSPACED.findall("".join(unspaced)))
    is_list = 2 * num_letters > len(characters) and len(words) < 2 * num_lines
    has_no_spaces = is_list or (
        num_letters > 0.05 * len(characters) and len("".join(unspaced)) > 6 * len(unspaced)
    )
    num_once = sum(count == 1 for count in Counter(words).values())
    is_rare = len(words) >= FEW_WORDS and num_once > MOSTLY_RARE * len(words)
    if has_no_spaces or is_rare or len(characters) > 20 * len(words):
        num_spaces = max(0, len(words) - num_lines)
        num_tokens = math.ceil((len(characters) + num_spaces + len(sample.lines)) / sample.share)
        tokenizer = f"kind: sentencepiece, vocab_size: {PIECES}, byte_fallback: true"
        if sample.num_bytes >= PIECES_BYTES:
            return 2 * num_tokens // 3, PIECES, tokenizer
        num_pieces = 259 + len(set(characters))  # <unk>, <eos>, the space and 256 bytes
        return num_tokens, min(PIECES, num_pieces), f"{tokenizer}, model_type: char"
    are_items = sum(any(map(str.isdigit, word)) for word in words) > 0.8 * len(words)
    marks = (".", *STOPS)
    attached = sum(len(word) > 1 and word.endswith(marks) for word in words)
    split_punctuation = attached > sum(word in marks for word in words)
    if split_punctuation and not are_items:
        words = separate_words(sample.lines, lowercase=False, split_punctuation=True).split()
    num_tokens = math.ceil((len(words) + num_lines) / sample.share)
    min_count = 1 if are_items or num_tokens < FEW_TOKENS else 2
    num_half, num_words = (
        2 + sum(count >= min_count for count in Counter(words[:end]).values())
        for end in (len(words) // 2, len(words))
    )
    exponent = min(1.0, max(0.0, math.log2(num_words / num_half)))
    num_words = round(num_words * (1 / sample.share) ** exponent)
    if are_items:
        return num_tokens, num_words, ITEMS
    num_words = min(MAX_WORDS, num_words)
    tokenizer = f"kind: words, min_count: {min_count}, vocab_size: {MAX_WORDS}"
    return num_tokens, num_words, f"{tokenizer}, split_punctuation: {json.dumps(split_punctuation)}"


def repetition(num_tokens: int) -> tuple[int, float]:
    """The epochs and the dropout of an LSTM for a text of up to 5 million tokens.

    A smaller text is read more often, with more dropout: the recipes of `lm new` in
    scripts/results.

    Example:
        >>> [repetition(num_tokens) for num_tokens in (50_000, 300_000, 1_000_000, 5_000_000)]
        [(24, 0.5), (22, 0.4), (12, 0.25), (12, 0.1)]
    """
    share = math.log(max(num_tokens, 100_000) / 100_000) / math.log(50)
    epochs = round(min(24, max(12, 12_000 / num_tokens**0.5)))
    return epochs, round((0.5 - 0.4 * share) * 20) / 20


def is_sparse(num_events: int, num_items: int) -> bool:
    """Whether a table has the settings for few events per item, `SPARSE_ITEMS`.

    With more items than `ALL_CLUSTERED`, steps of AdamW, which update all rows, take too long.
    """
    return num_items <= ALL_CLUSTERED and FEW_TOKENS <= num_events < DENSE * num_items


def fit(
    path: Path,
    files: dict[str, Path],
    num_tokens: int,
    num_words: int,
    tokenizer: str,
    backbone: Literal["lstm", "transformer"] = "lstm",
    *,
    events: Mapping[str, object] | None = None,
) -> tuple[str, str]:
    """Choose the settings for a text, with the largest model that fits into the available memory.

    `events` are further keys of the section `data`, for a table of events.

    Returns:
        The YAML of the configuration, and a line about the model.

    Raises:
        UserError: if the path is no name for a run, or not even the smallest model fits.
    """
    is_tiny, is_small = num_tokens < FEW_TOKENS, num_tokens < MANY_TOKENS
    tree = ClassTree.balanced(num_words, math.isqrt(num_words) + 1)  # of about the same size
    names = {split: json.dumps(str(file), ensure_ascii=False) for split, file in files.items()}
    others = {key: json.dumps(value, ensure_ascii=False) for key, value in (events or {}).items()}
    sparse = backbone == "lstm" and events is not None and is_sparse(num_tokens, num_words)
    template, layers, threads = SPARSE_ITEMS if sparse else LSTM, 1, min(8, torch.get_num_threads())
    epochs = 12 if is_small else 2 if num_tokens < 20_000_000 else 1
    dropout, batch, length = 0.1, 64, 64
    if backbone == "lstm" and is_small:
        epochs, dropout = repetition(num_tokens)
        batch, length = (64, 64) if events else (20, 35)
    if backbone == "transformer":
        template, layers, batch = TRANSFORMER, 2 if is_small else 4, 32
        length = min(64, max(2, num_tokens // 2))
    if is_tiny:
        template = FIRST_TRY if backbone == "lstm" else TRANSFORMER
        batch = min(8, max(1, num_tokens // 200))
    every = max(500, num_tokens * epochs // (10 * batch * length))
    has_pieces = "kind: words" in tokenizer and tokenizer != ITEMS
    values = {
        "name": json.dumps(path.stem, ensure_ascii=False),
        "files": ", ".join(map(": ".join, names.items())),
        "events": ", ".join(map(": ".join, others.items())),
        "tokenizer": tokenizer,
        "shortlist": 0 if sparse else min(1000, num_words // 33),
        "clustered": f", clustered_words: {ALL_CLUSTERED}" if num_words > ALL_CLUSTERED else "",
        "pieces": f", input_pieces: {max(8, min(INPUT_PIECES, num_words // 4))}" * has_pieces,
        "batch": batch,
        "epochs": epochs,
        "dropout": dropout,
        "layers": layers,
        "length": length,
        "validation": "" if is_small or events else f", val_every_steps: {every}",
        "warmup": min(400, max(1, num_tokens // (batch * 64)) * epochs // 10),
        "threads": threads,
    }
    recipe = RECIPE.replace("$data", TEXT if events is None else EVENTS)
    size = "sparse items" if sparse else "items" if events and backbone == "lstm" else backbone
    by_tokens = HIDDEN_SIZES[size]
    for hidden in by_tokens[next(below for below in by_tokens if num_tokens < below)]:
        content = Template(recipe + template).substitute(values, hidden=hidden)
        config = validate(yaml.safe_load(content), str(path))
        run = Run.of(config, tree=tree)
        used, available = estimate_memory(run).total, run.available_bytes
        if available is None or used < MEMORY_SHARE * available:
            computing = f"{threads} thread{'s' * (threads > 1)}, {used / 1e9:.1f} GB of memory"
            kind = "LSTM" if backbone == "lstm" else "Transformer"
            return content, f"{kind} {layers} × {hidden}, {computing}"
    raise UserError(f"even the smallest model needs {used / 1e9:.1f} GB of memory: too much here")
