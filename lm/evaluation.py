"""Perplexity: one evaluation serves the validation of a training run and `lm evaluate`.

Every token of a text is predicted once, the first one from `<eos>`. All figures are sums over
tokens divided by counts and do not depend on a batch size. The context of a token depends on the
backbone:

- A backbone that carries a state (LSTM) reads the text as one stream: all tokens before.
- Any other (Transformer) reads overlapping windows of `context` tokens, half a window apart, and
  counts the second half of each (and the first half of the first one): between context / 2 and
  context tokens before, fewer only at the start of the text.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.prepared import open_prepared
from data_prep.storage import sha256_file, write_json_atomically
from data_prep.tokenizer.serialization import TOKENIZER, load_tokenizer
from data_prep.tokenizer.token_file import SplitInfo, log_literals
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.config import load_run_config
from lm.model.files import Description, load_model
from lm.model.language_model import LanguageModel

CHUNK_TOKENS = 512
"""Number of positions that are computed at once; no figure depends on it."""
EOS_RULE = "one <eos> after every line, empty lines too; the first token is predicted from <eos>"
WITHOUT_EMPTY_LINES = EOS_RULE.replace("empty lines too", "empty lines left out")


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """What is counted in the original text, before it is cut into tokens."""

    words: int  # separated by whitespace
    lines: int  # each with one `<eos>`
    utf8_bytes: int  # line ends included

    @classmethod
    def of(cls, split: SplitInfo) -> "TextCounts":
        """The counts of a prepared split."""
        return cls(words=split.words, lines=split.lines, utf8_bytes=split.utf8_bytes)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        tokens: predicted tokens, including an `<eos>` for each line.
        words: words of the original text, without `<eos>`.
        oov: tokens that are `<unk>`.
        nll_nats: negative log-likelihood of all tokens.
        perplexity: exp(nll / tokens).
        perplexity_excluding_oov: the same over the tokens that are not `<unk>` (which are still
            part of the context).
        word_perplexity: exp(nll / (words + lines)): comparable between tokenizers.
        bits_per_byte: nll / ln 2 / utf8_bytes: comparable between tokenizers.
        class_perplexity: perplexity of the choice at the root of the tree.
        within_class_perplexity: perplexity of the choices below; the product of the two is
            `perplexity`.
        context: from what each token is predicted.
        eos_rule: what is counted at line ends.
    """

    tokens: int
    words: int
    oov: int
    nll_nats: float
    perplexity: float
    perplexity_excluding_oov: float
    word_perplexity: float
    bits_per_byte: float
    class_perplexity: float
    within_class_perplexity: float
    context: str
    eos_rule: str = EOS_RULE

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON, which has no infinity and no NaN: these are None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: NDArray[Any],
    counts: TextCounts,
    *,
    eos_id: int,
    unk_id: int | None,
    context: int,
    progress: str | None = None,
) -> Evaluation:
    """Predict every token of a text.

    Args:
        model: evaluated in evaluation mode; its mode is restored.
        tokens: [n] word ids, n ≥ 1.
        counts: of the original text.
        eos_id: word id from which the first token is predicted.
        unk_id: word id of tokens out of vocabulary; None if there are none.
        context: T, length of the windows of a backbone that carries no state.
        progress: title of a progress bar on stderr, shown in a terminal; None for no bar.

    Returns:
        The figures. Nats are summed in fp64; those of one token have the precision of the model.

    Raises:
        ValueError: if there is no token.
    """
    if len(tokens) == 0:
        raise ValueError("no tokens to evaluate")
    was_training = model.training
    model.eval()
    nll = class_nll = oov_nll = 0.0
    oov = 0
    disable = True if progress is None else None
    with tqdm(
        total=len(tokens), desc=progress, unit="token", unit_scale=True, disable=disable
    ) as bar:
        for hidden, targets in hidden_chunks(model, tokens, eos_id, context):
            by_level = model.output.nll_by_level(hidden, targets).double()
            each = by_level.sum(0)
            nll += float(each.sum())
            class_nll += float(by_level[0].sum())
            if unk_id is not None:
                is_oov = targets == unk_id
                oov += int(is_oov.sum())
                oov_nll += float(each[is_oov].sum())
            bar.update(targets.numel())
    model.train(was_training)
    window = f"windows of {context} tokens, at least {context // 2} before each token where there"
    known = len(tokens) - oov
    return Evaluation(
        tokens=len(tokens),
        words=counts.words,
        oov=oov,
        nll_nats=nll,
        perplexity=_exp(nll / len(tokens)),
        perplexity_excluding_oov=_exp((nll - oov_nll) / known) if known else math.nan,
        word_perplexity=_exp(nll / (counts.words + counts.lines)),
        bits_per_byte=nll / math.log(2) / counts.utf8_bytes,
        class_perplexity=_exp(class_nll / len(tokens)),
        within_class_perplexity=_exp((nll - class_nll) / len(tokens)),
        context="one stream, all tokens before"
        if model.backbone.carries_state
        else f"{window} are as many",
    )


def _exp(nats: float) -> float:
    """Perplexity of an average; infinity if it exceeds a float, NaN for NaN."""
    return math.inf if nats >= 700 else math.exp(nats)


def hidden_chunks(
    model: LanguageModel, tokens: NDArray[Any], eos_id: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden vectors [..., H] and targets [...] of the tokens [n] of a text, each token once.

    Targets are in the order of the text: [t], or [t, B] with the columns one after another.
    """
    if model.backbone.carries_state:
        return _stream(model, tokens, eos_id)
    return _windows(model, tokens, eos_id, context)


def _stream(
    model: LanguageModel, tokens: NDArray[Any], eos_id: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden vectors [T, 1, H] and targets [T, 1] of one chunk after another."""
    state, last = model.init_state(1), eos_id
    for begin in range(0, len(tokens), CHUNK_TOKENS):
        targets = tokens[begin : begin + CHUNK_TOKENS].astype(np.int64)
        inputs = np.concatenate([[last], targets[:-1]])
        last = targets[-1]
        hidden, new_state = model(_column(inputs, model), state)
        assert new_state is not None
        state = new_state
        yield hidden, _column(targets, model)


def _windows(
    model: LanguageModel, tokens: NDArray[Any], eos_id: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden vectors and targets of the counted positions, several windows of one length at once.

    In full windows the first `context - stride` positions are context only, except in the first.
    """
    stride = max(1, context // 2)
    inputs = np.concatenate([[eos_id], tokens[:-1]]).astype(np.int64)
    num_full = max(0, (len(tokens) - context) // stride + 1)
    covered = context + (num_full - 1) * stride if num_full else 0
    at_once = max(1, CHUNK_TOKENS // context)
    offsets = np.arange(context)[:, None]
    for first in range(0, num_full, at_once):
        places = np.arange(first, min(first + at_once, num_full))[None, :] * stride + offsets
        hidden, _ = model(torch.from_numpy(inputs[places]).to(model.device))
        targets = torch.from_numpy(tokens[places].astype(np.int64)).to(model.device)
        if first == 0:
            yield hidden[: context - stride, 0], targets[: context - stride, 0]
        yield hidden[context - stride :], targets[context - stride :]
    if covered < len(tokens):
        begin = max(0, len(tokens) - context) if num_full else 0
        hidden, _ = model(_column(inputs[begin:], model))
        targets = _column(tokens[covered:].astype(np.int64), model)
        yield hidden[covered - begin :], targets


def _column(ids: NDArray[np.int64], model: LanguageModel) -> Tensor:
    return torch.from_numpy(ids).to(model.device)[:, None]


def evaluate_run(folder: Path, split: str, *, progress: bool = True) -> Evaluation:
    """Evaluate the best model of a run on a split of its corpus.

    Args:
        folder: folder of the run, in which `evaluate-<split>.json` is written.
        split: `train`, `valid` or `test`.
        progress: whether to show a progress bar in a terminal.

    Raises:
        UserError: if the run has no model, its prepared data are absent, or they were prepared
            again with another tokenizer.
    """
    model, description = load_model(folder)
    config = load_run_config(folder)
    prepared = open_prepared(config.prepared_path)
    if prepared.tokenizer_sha256 != description.tokenizer_sha256:
        raise UserError(
            f"{prepared.folder} was prepared again, with another tokenizer than that of {folder}"
        )
    result = evaluate(
        model,
        prepared.tokens(split),
        TextCounts.of(prepared.splits[split]),
        eos_id=description.eos_id,
        unk_id=description.unk_id,
        context=description.context,
        progress=f"evaluate {split}" if progress else None,
    )
    if not config.data.keep_empty_lines:
        result = replace(result, eos_rule=WITHOUT_EMPTY_LINES)
    write_json_atomically(folder / f"evaluate-{split}.json", result.to_dict())
    return result


def load_with_tokenizer(folder: Path) -> tuple[LanguageModel, Description, Tokenizer]:
    """Load the model of a run or an export, its description, and its tokenizer.

    Raises:
        UserError: if there is no model, or its tokenizer is not the one it was trained with.
    """
    model, description = load_model(folder)
    if sha256_file(folder / TOKENIZER) != description.tokenizer_sha256:
        raise UserError(f"{folder}: the tokenizer is not the one that the model was trained with")
    return model, description, load_tokenizer(folder)


def evaluate_text(folder: Path, lines: Iterable[str], *, progress: bool = True) -> Evaluation:
    """Evaluate the best model of a run, or an export, on lines of text.

    Args:
        folder: folder of the model and its tokenizer.
        lines: the text, without line ends.
        progress: whether to show a progress bar in a terminal.

    Raises:
        UserError: if there is no model, its tokenizer is not the one it was trained with, or the
            text is empty.
    """
    model, description, tokenizer = load_with_tokenizer(folder)
    return evaluate_lines(model, description, tokenizer, lines, progress=progress)


def evaluate_lines(
    model: LanguageModel,
    description: Description,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    *,
    progress: bool = True,
) -> Evaluation:
    """`evaluate_text` with a model that is loaded already.

    Raises:
        UserError: if the text is empty.
    """
    text = list(lines)
    if not text:
        raise UserError("the text to evaluate is empty")
    log_literals("text", {w: sum(line.count(w) for line in text) for w in tokenizer.literals})
    ids = [[*line, description.eos_id] for line in tokenizer.encode_lines(text)]
    counts = TextCounts(
        words=sum(tokenizer.num_words(line) for line in text),
        lines=len(text),
        utf8_bytes=sum(len(line.encode()) + 1 for line in text),
    )
    return evaluate(
        model,
        np.concatenate(ids),
        counts,
        eos_id=description.eos_id,
        unk_id=description.unk_id,
        context=description.context,
        progress="evaluate" if progress else None,
    )
