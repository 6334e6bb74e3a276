"""Perplexity: one evaluation serves the validation of a training run and `lm evaluate`.

Every token of a text is predicted once, the first one from `<eos>`. All figures are sums over
tokens divided by counts and do not depend on a batch size. `lm.model.reader.read_text` determines
the context of a token, `lm.figures` has the figures.

With an open vocabulary, each unknown word w has P(`<unk>`) P(w | `<unk>`) by the model's speller,
so that tokens and spellings determine every word: models of words then compare with models of
pieces. White space is not spelled. Bits per byte are known if all words of a line are separated by
single spaces, without others at its ends, and no line has the word `<eos>`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from data_prep.corpus.reader import read_lines
from data_prep.errors import DataError, NotFiniteError, UserError
from data_prep.prepared import Prepared
from data_prep.sequences import Sequences, find_sequences
from data_prep.settings import TokenizerConfig
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.token_file import SplitInfo, counted_known, counted_literals, log_literals
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer
from lm.figures import (
    EOS_RULE,
    ITEM,
    ITEM_RULE,
    WITHOUT_EMPTY_LINES,
    Evaluation,
    TextCounts,
    perplexity,
    token_unit,
    word_perplexity,
)
from lm.model.language_model import LanguageModel
from lm.model.reader import evaluation_mode, read_text
from lm.model.reader import read_lines as read_independent
from lm.run import TrainedRun


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: NDArray[Any],
    counts: TextCounts | SplitInfo,
    *,
    eos_id: int,
    unk_id: int,
    context: int,
    progress: str | None = None,
    sequences: Sequences | None = None,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Predict every token of a text.

    Args:
        model: evaluated in evaluation mode; its mode is restored.
        tokens: [n] word ids, n ≥ 1.
        counts: what the original text contains.
        eos_id: word id from which the first token is predicted.
        unk_id: word id of tokens out of vocabulary.
        context: T, the length of the windows of a backbone that carries no state.
        progress: title of a progress bar on stderr, shown in a terminal; None for no bar.
        sequences: if the text is independent sequences: what is predicted of each, instead.
        check: called after each batch, to raise an error that ends the evaluation.

    Returns:
        The figures. Nats are summed in fp64; those of one token have the precision of the model.

    Raises:
        ValueError: if there is no token.
        UserError: if none of the items to predict is in the catalogue.
    """
    num_tokens = len(tokens) if sequences is None else int(sequences.num_predicted.sum())
    if num_tokens == 0 and sequences is not None:
        num_left_out = int(sequences.num_left_out.sum())
        raise UserError(f"{num_left_out} items to predict, of which the training split has none")
    if num_tokens == 0:
        raise ValueError("no tokens to evaluate")
    nll = class_nll = oov_nll = 0.0
    oov = 0
    disable = True if progress is None else None
    bar = tqdm(total=num_tokens, desc=progress, unit="token", unit_scale=True, disable=disable)
    with evaluation_mode(model), bar:
        if sequences is None:
            chunks: Iterable[Any] = read_text(model, [tokens], eos_id, context)
        else:
            chunks = read_independent(model, sequences.lines(), eos_id, sequences.num_known)
        for hidden, targets, *_ in chunks:
            by_level = model.output.nll_by_level(hidden, targets).double()
            each = by_level.sum(0)
            nll += float(each.sum())
            class_nll += float(by_level[0].sum())
            is_oov = targets == unk_id
            oov += int(is_oov.sum())
            oov_nll += float(each[is_oov].sum())
            bar.update(targets.numel())
            check()
    if sequences is not None:
        oov = int(sequences.num_left_out.sum())
    is_whole = sequences is None or (not oov and num_tokens == len(tokens))
    return Evaluation(
        tokens=num_tokens,
        words=counts.words,
        lines=counts.lines,
        utf8_bytes=counts.utf8_bytes,
        oov=oov,
        nll_nats=nll,
        perplexity=perplexity(nll, num_tokens),
        perplexity_excluding_oov=perplexity(nll - oov_nll, num_tokens - oov * (sequences is None)),
        word_perplexity=word_perplexity(nll, counts) if is_whole else math.nan,
        bits_per_byte=nll / math.log(2) / counts.utf8_bytes if is_whole and not oov else None,
        class_perplexity=perplexity(class_nll, num_tokens),
        within_class_perplexity=perplexity(nll - class_nll, num_tokens),
        context=_context_in_words(model, context, sequences),
        eos_rule=EOS_RULE if sequences is None else ITEM_RULE,
        unit="token" if sequences is None else ITEM,
    )


def check_finite(log_prob: Tensor, name: str) -> None:
    """Raises NotFiniteError, which begins with `name`, unless all log-probabilities are finite."""
    if log_prob.sum().isfinite():  # faster than a look at each
        return
    if num_wrong := log_prob.numel() - int(log_prob.isfinite().sum()):
        problem = f"{num_wrong:,} of {log_prob.numel():,} log-probabilities are not finite"
        raise NotFiniteError(f"{name}: {problem}: weights of the model are not, or are too large")


def _context_in_words(model: LanguageModel, context: int, sequences: Sequences | None) -> str:
    """What each token is predicted from."""
    if sequences is not None:
        field = model.backbone.receptive_field
        limit = "" if field is None else f", at most {field}"
        return f"each item is predicted from the items before it in its sequence{limit}"
    if model.backbone.carries_state:
        return "each token is predicted from all tokens before it"
    fewest = context - max(1, context // 2) + 1
    return (
        f"each token is predicted from {fewest} to {context} tokens before it, and from fewer at"
        " the start of the text"
    )


def evaluate_prepared(
    model: LanguageModel, prepared: Prepared, split: str, context: int, **options: Any
) -> Evaluation:
    """`evaluate` a model on a split of prepared data; raises also as `Prepared.tokens`."""
    return evaluate(
        model,
        prepared.tokens(split),
        prepared.splits[split],
        eos_id=prepared.eos_id,
        unk_id=prepared.unk_id,
        context=context,
        sequences=prepared.sequences(split) if prepared.is_independent else None,
        **options,
    )


def evaluate_split(
    run: TrainedRun, split: str, *, progress: bool = True, open_vocabulary: bool = False
) -> Evaluation:
    """Evaluate the model of a run on a split of its corpus: `train`, `valid` or `test`.

    Raises:
        UserError: if there is no model, its prepared data are absent, or they were prepared again
            with another tokenizer; or as `evaluate_text` and `split_lines`.
    """
    model, prepared = run.model, run.prepared
    if open_vocabulary:
        return evaluate_text(run, split_lines(run, split), progress=progress, open_vocabulary=True)
    title = f"evaluate {split}" if progress else None
    result = evaluate_prepared(model, prepared, split, run.description.context, progress=title)
    return _described(result, run, run.config.tokenizer, prepared.tokens(split))


def split_lines(run: TrainedRun, split: str) -> list[str]:
    """The lines of a split, read again for its unknown words; UserError if they are others."""
    tokens, lines = run.prepared.tokens(split), list(read_lines(run.config.data, split))
    found, counts = encode_text(run, lines, split)
    is_same = vars(counts).items() <= vars(run.prepared.splits[split]).items()
    if not (is_same and np.array_equal(found, tokens)):
        where = run.config.data.hub or run.config.data.dir
        raise DataError(
            f"{split}: the text in {where}, which --open-vocabulary reads again, is not the one"
            " that was prepared: restore it, or give it as --text"
        )
    return lines


def evaluate_text(
    run: TrainedRun,
    lines: Iterable[str],
    *,
    name: str = "text",
    progress: bool = True,
    open_vocabulary: bool = False,
) -> Evaluation:
    """Evaluate the model of a run on the lines of a text, given without line ends.

    Empty lines count only if they did in the corpus of the model. `name` is that of the text in a
    message.

    Raises:
        UserError: if there is no model, its tokenizer is not the one that it was trained with, or
            the text has no line; with an open vocabulary also as `spelling_nats`.
    """
    literals = dict.fromkeys(run.tokenizer.literals, 0)
    counted = counted_literals(lines, literals)
    text = [line for line in counted if run.keeps_empty_lines or line.strip()]
    tokens, counts = encode_text(run, text, name)
    log_literals("text", literals)
    sequences = None
    if run.is_independent:
        if open_vocabulary:
            raise UserError("an open vocabulary requires a text: items have no spelling")
        num_known: list[int] = []
        for _ in counted_known(text, "text", num_known, lowercase=run.tokenizer.lowercase):
            pass
        sequences = find_sequences(
            tokens,
            eos_id=run.description.eos_id,
            unk_id=run.tokenizer.unk_id,
            num_known=np.array(num_known),
            predict_eos=run.config.data.predict_eos,
        )
    result = evaluate(
        run.model,
        tokens,
        counts,
        eos_id=run.description.eos_id,
        unk_id=run.tokenizer.unk_id,
        context=run.description.context,
        progress="evaluate" if progress else None,
        sequences=sequences,
    )
    if open_vocabulary:
        result = _spelled(result, run, text)
    return _described(result, run, run.tokenizer, tokens)


def _spelled(result: Evaluation, run: TrainedRun, lines: list[str]) -> Evaluation:
    """The figures of a text with its unknown words spelled."""
    spelling = float(spelling_nats(run, lines, result.oov).sum())
    nll = result.nll_nats + spelling
    bits = nll / math.log(2) / result.utf8_bytes
    return replace(
        result,
        nll_nats=nll,
        perplexity=perplexity(nll, result.tokens),
        word_perplexity=word_perplexity(nll, result),
        bits_per_byte=bits if determines_bytes(run, lines) else None,
        spelling_nats=spelling,
    )


def spelling_nats(run: TrainedRun, lines: Sequence[str], oov: int) -> NDArray[np.float64]:
    """-log P(word | `<unk>`) of each unknown word of lines, in order; none of a model of pieces.

    UserError if there is no speller, or if `oov`, the number of tokens `<unk>`, shows that a model
    of pieces does not know one.
    """
    if isinstance(run.tokenizer, WordTokenizer):
        return -run.speller.log_prob(run.tokenizer.unknown_occurrences(lines))
    if oov != sum(line.count(UNK) for line in lines):
        remedy = "a model with tokenizer.byte_fallback: true knows all"
        raise UserError(f"the text has pieces that {run.folder} does not know: {remedy}")
    return np.zeros(0)


def determines_bytes(run: TrainedRun, lines: Iterable[str]) -> bool:
    """Whether tokens and spelled words determine every byte of lines, so that bits per byte exist.

    Pieces do; words do if the tokenizer keeps case and punctuation, single spaces separate them,
    and none is `<eos>`.
    """
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, WordTokenizer):
        return True
    if tokenizer.lowercase or tokenizer.split_punctuation:
        return False
    words = ((line, line.split()) for line in lines)
    return all(line == " ".join(each) and EOS not in each for line, each in words)


def encode_text(
    run: TrainedRun, lines: Iterable[str], name: str = "text"
) -> tuple[NDArray[Any], TextCounts]:
    """The tokens of a text, by a run's rule for empty lines, and what the text contains."""
    tokenizer = run.tokenizer
    text = list(lines if run.keeps_empty_lines else filter(str.strip, lines))
    if not text:
        raise DataError(f"{name}: there is no line to evaluate")
    counts = TextCounts(
        words=sum(len(line.split()) for line in text),
        lines=len(text),
        utf8_bytes=sum(len(line.encode()) + 1 for line in text),
    )
    return tokenizer.encode_stream(text), counts


@torch.no_grad()
def token_nats(run: TrainedRun, tokens: NDArray[Any]) -> NDArray[np.float64]:
    """The nats [n] of a text of tokens [n], an unknown word being `<unk>`, as `evaluate`."""
    output, description, parts = run.model.output, run.description, []
    where = description.eos_id, description.context
    for hidden, targets, _ in read_text(run.model, [tokens], *where):
        parts.append(output.nll_by_level(hidden, targets).double().sum(0).cpu())
    nats = torch.cat(parts)
    check_finite(nats, str(run.folder))
    return nats.numpy()


@dataclass(frozen=True, kw_only=True)
class TextLosses:
    """The losses of a run on a text."""

    run: TrainedRun
    tokens: NDArray[Any]  # [n] ids
    nats: NDArray[np.float64]  # [n], an unknown word being `<unk>`
    spelling: NDArray[np.float64] | None = None  # nats of each unknown word if spelled
    lines: list[str] | None = None  # the text, if the vocabulary is open

    @classmethod
    def of(
        cls, run: TrainedRun, tokens: NDArray[Any], lines: list[str] | None = None
    ) -> "TextLosses":
        """The losses of a run on the tokens [n] of a text, whose unknown words `lines` spell.

        Empty lines that the run leaves out may be among `lines`.
        """
        nats, spelling = token_nats(run, tokens), None
        if lines is not None:
            lines = [line for line in lines if run.keeps_empty_lines or line.strip()]
            oov = int((tokens == run.description.unk_id).sum())
            spelling = spelling_nats(run, lines, oov)
        return cls(run=run, tokens=tokens, nats=nats, spelling=spelling, lines=lines)

    @property
    def has_bytes(self) -> bool:
        """Whether the losses are those of all bytes of the text."""
        return self.lines is not None and determines_bytes(self.run, self.lines)

    def perplexity(self, log_prob: NDArray[np.float64] | Tensor) -> float:
        """Perplexity by other log-probabilities [n] of the tokens, with the same spellings."""
        spelling = 0.0 if self.spelling is None else float(self.spelling.sum())
        return perplexity(spelling - float(log_prob.sum()), len(self.tokens))


def _described(
    result: Evaluation,
    run: TrainedRun,
    tokenizer: Tokenizer | TokenizerConfig,
    tokens: NDArray[Any],
) -> Evaluation:
    """The figures of a run's model, with what they count in words."""
    if not math.isfinite(result.nll_nats):
        problem = f"the log-probability of the text is {-result.nll_nats}"
        raise NotFiniteError(f"{run.folder}: {problem}: weights of the model are not finite")
    is_lossy = tokenizer.kind == "words" and (tokenizer.lowercase or tokenizer.split_punctuation)
    if result.bits_per_byte is not None and result.spelling_nats is None and not is_lossy:
        is_lossy = not _have_all_bytes(tokens, result, run.tokenizer)
    result = replace(result, bits_per_byte=None if is_lossy else result.bits_per_byte)
    if result.unit == ITEM:
        return result
    return replace(
        result,
        eos_rule=EOS_RULE if run.keeps_empty_lines else WITHOUT_EMPTY_LINES,
        unit=token_unit(tokenizer),
    )


def _have_all_bytes(tokens: NDArray[Any], result: Evaluation, tokenizer: Tokenizer) -> bool:
    """Whether a text is as long as its words, none of which is unknown, with single spaces."""
    if not isinstance(tokenizer, WordTokenizer):
        return True
    is_end, num_bytes = tokens == tokenizer.eos_id, np.diff(tokenizer.words.starts)
    num_bytes[tokenizer.eos_id] = 0  # so that a word <eos> is missing
    parts = np.array_split(tokens, 1 + len(tokens) // 2**20)  # for less memory
    num_empty = int((is_end & np.append(True, is_end[:-1])).sum())
    size = sum(int(num_bytes[part].sum()) for part in parts)
    return size + result.words + num_empty == result.utf8_bytes  # a space or line end after each
