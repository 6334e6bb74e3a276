"""Perplexity. One evaluator serves validation while training and `lm evaluate`.

Every token of a text is predicted once, the first from `<eos>`; the figures are sums over tokens
divided by counts, and do not depend on a batch size. What a token is predicted from is fixed by the
backbone:

- a backbone that carries a state (LSTM) reads the text as one stream: all tokens before, back to
  the beginning;
- any other (Transformer) reads overlapping windows of `context` tokens, half a window apart, and
  counts the second half of each (and the first half of the first): at least context / 2 tokens
  before, if there are as many, and at most context.
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
from data_prep.prepared import SplitInfo, load_tokenizer, open_prepared
from data_prep.storage import sha256_file, write_json_atomically
from lm.config import load_run_config
from lm.model.files import load_model
from lm.model.language_model import LanguageModel

_CHUNK_TOKENS = 512
"""Positions that are computed at once; no figure depends on it."""


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """What a text holds besides its tokens.

    Attributes:
        words: whitespace-separated words of the original text.
        lines: of the original text, one `<eos>` each.
        utf8_bytes: of the original text, line ends included.
    """

    words: int
    lines: int
    utf8_bytes: int

    @classmethod
    def of(cls, split: SplitInfo) -> "TextCounts":
        """What was counted when a split was prepared."""
        return cls(words=split.words, lines=split.lines, utf8_bytes=split.utf8_bytes)


EOS_RULE = "one <eos> after every line, empty lines too; the first token is predicted from <eos>"
WITHOUT_EMPTY_LINES = EOS_RULE.replace("empty lines too", "empty lines left out")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        tokens: predicted tokens, an `<eos>` for each line included.
        words: words of the original text, without `<eos>`.
        oov: tokens that are `<unk>`.
        nll_nats: negative log-likelihood of all tokens.
        perplexity: exp(nll / tokens).
        perplexity_excluding_oov: the same over the tokens that are not `<unk>` (they still serve as
            context).
        word_perplexity: exp(nll / (words + lines)): comparable between tokenizers.
        bits_per_byte: nll / ln 2 / bytes of the original UTF-8 text: comparable between tokenizers.
        class_perplexity: of the choice at the root of the tree.
        within_class_perplexity: of the choices below; their product is `perplexity`.
        context: what a token is predicted from.
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
        """The figures for JSON, which has no infinity: null stands for what is not finite."""
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
        model: put into evaluation mode meanwhile.
        tokens: [n] word ids, n ≥ 1.
        counts: of the original text.
        eos_id: what the first token is predicted from.
        unk_id: which tokens are out of vocabulary; None if nothing is.
        context: T, window of a backbone that carries no state.
        progress: title of a progress bar on stderr, where that is a terminal; None for none.

    Raises:
        ValueError: if there is no token.
    """
    if len(tokens) == 0:
        raise ValueError("no tokens to evaluate")
    was_training = model.training
    model.eval()
    portions = (
        _stream(model, tokens, eos_id)
        if model.backbone.carries_state
        else _windows(model, tokens, eos_id, context)
    )
    nll = class_nll = oov_nll = 0.0
    oov = 0
    with tqdm(
        total=len(tokens),
        desc=progress,
        unit="token",
        unit_scale=True,
        disable=True if progress is None else None,
    ) as bar:
        for hidden, targets in portions:
            each = model.output.loss(hidden, targets, "none").double()
            nll += float(each.sum())
            class_nll += float(model.output.class_loss(hidden, targets, "none").double().sum())
            if unk_id is not None:
                unknown = targets == unk_id
                oov += int(unknown.sum())
                oov_nll += float(each[unknown].sum())
            bar.update(targets.numel())
    model.train(was_training)
    return _evaluation(model, len(tokens), counts, nll, class_nll, oov, oov_nll, context)


def _evaluation(
    model: LanguageModel,
    num_tokens: int,
    counts: TextCounts,
    nll: float,
    class_nll: float,
    oov: int,
    oov_nll: float,
    context: int,
) -> Evaluation:
    window = (
        f"windows of {context} tokens, at least {context // 2} before each token where there are as"
        " many"
    )
    return Evaluation(
        tokens=num_tokens,
        words=counts.words,
        oov=oov,
        nll_nats=nll,
        perplexity=_exp(nll / num_tokens),
        perplexity_excluding_oov=_exp((nll - oov_nll) / (num_tokens - oov))
        if num_tokens > oov
        else math.nan,
        word_perplexity=_exp(nll / (counts.words + counts.lines)),
        bits_per_byte=nll / math.log(2) / counts.utf8_bytes,
        class_perplexity=_exp(class_nll / num_tokens),
        within_class_perplexity=_exp((nll - class_nll) / num_tokens),
        context="one stream, all tokens before" if model.backbone.carries_state else window,
    )


def _exp(nats: float) -> float:
    """Perplexity of an average; infinity where it is beyond a float, NaN of NaN."""
    return math.inf if nats >= 700 else math.exp(nats)


def _stream(
    model: LanguageModel, tokens: NDArray[Any], eos_id: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden vectors and targets, [T, 1, H] and [T, 1], one portion after another."""
    state, last = model.init_state(1), eos_id
    for begin in range(0, len(tokens), _CHUNK_TOKENS):
        targets = tokens[begin : begin + _CHUNK_TOKENS].astype(np.int64)
        inputs = np.concatenate([[last], targets[:-1]])
        last = targets[-1]
        hidden, new_state = model(_column(inputs, model), state)
        assert new_state is not None
        state = new_state
        yield hidden, _column(targets, model)


def _windows(
    model: LanguageModel, tokens: NDArray[Any], eos_id: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden vectors and targets of the counted positions of each window, several windows of one
    length at a time.
    """
    stride = max(1, context // 2)
    inputs = np.concatenate([[eos_id], tokens[:-1]]).astype(np.int64)
    num_full = max(0, (len(tokens) - context) // stride + 1)
    covered = context + (num_full - 1) * stride if num_full else 0
    at_once = max(1, _CHUNK_TOKENS // context)
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
    """Evaluate a run's best model on a split of its corpus, and keep the figures as
    `evaluate-<split>.json` in the run.

    Raises:
        UserError: if the run has no model, its prepared data are gone, or these were made again
            with another tokenizer.
    """
    model, description = load_model(folder)
    config = load_run_config(folder)
    prepared = open_prepared(config.prepared_path)
    if prepared.tokenizer_sha256 != description.tokenizer_sha256:
        raise UserError(
            f"{prepared.folder} was prepared again, with another tokenizer than that of {folder}"
        )
    tokens = prepared.tokens(split)
    result = evaluate(
        model,
        tokens,
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


def evaluate_text(folder: Path, lines: Iterable[str], *, progress: bool = True) -> Evaluation:
    """Evaluate the best model of a run, or an export, on lines of text.

    Raises:
        UserError: if there is no model, its tokenizer is not the one it was trained with, or the
            text is empty.
    """
    model, description = load_model(folder)
    if sha256_file(folder / "tokenizer.json") != description.tokenizer_sha256:
        raise UserError(f"{folder}: the tokenizer is not the one that the model was trained with")
    tokenizer = load_tokenizer(folder)
    text = list(lines)
    if not text:
        raise UserError("the text to evaluate is empty")
    ids = [[*line, description.eos_id] for line in tokenizer.encode_lines(text)]
    counts = TextCounts(
        words=sum(tokenizer.num_words(line) for line in text),
        lines=len(text),
        utf8_bytes=sum(len(line.encode()) + 1 for line in text),
    )
    return evaluate(
        model,
        np.concatenate([np.array(line, np.int64) for line in ids]),
        counts,
        eos_id=description.eos_id,
        unk_id=description.unk_id,
        context=description.context,
        progress="evaluate" if progress else None,
    )
