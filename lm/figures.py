"""The figures of an evaluation, what they are called, and how they are shown.

*The* perplexity is that per token, `<eos>` included, where an unknown word is the token `<unk>`;
the name of any other one says what it is. Bits per byte are known only if the tokens determine
every byte of the text.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from data_prep.settings import TokenizerConfig
from data_prep.tokenizer.token_file import SplitInfo
from data_prep.tokenizer.tokenizer import Tokenizer

EOS_RULE = "one <eos> after every line, empty lines too; the first token is predicted from <eos>"
MAX_NATS = 700.0
"""Loss per token from which a perplexity, of 300 digits, is infinite, and a run has diverged."""
MAX_WORD_BYTES = 35
"""Above this mean size, what spaces separate are not words: Chinese, Japanese, Thai and others."""
ITEM = "item"
"""What a token of independent sequences is."""
ITEM_RULE = "each line is a sequence of its own, whose first item is predicted from <eos>"
WITHOUT_EMPTY_LINES = EOS_RULE.replace("empty lines too", "empty lines left out")


def as_json(figures: Any) -> dict[str, Any]:
    """Figures as JSON has them: dataclasses are dictionaries, infinities and NaN are None."""
    text = json.dumps(figures, default=asdict)
    found: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return found


def table_of(title: str, rows: Mapping[str, str]) -> str:
    """Figures with their names as lines of text below a title."""
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {rows[name]}" for name in rows)])


@dataclass(frozen=True, kw_only=True)
class TextCounts:
    """What is counted in the original text, before it is cut into tokens."""

    words: int  # separated by whitespace
    lines: int  # each with one `<eos>`
    utf8_bytes: int  # line ends included


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        tokens: predicted, including an `<eos>` for each line.
        words: of the original text, without `<eos>`.
        lines: of the original text, each with one `<eos>`.
        utf8_bytes: of the original text, line ends included.
        oov: tokens that are `<unk>`.
        nll_nats: negative log-likelihood of all tokens.
        perplexity: exp(nll / tokens).
        perplexity_excluding_oov: over the tokens that are not `<unk>`, which remain context.
        word_perplexity: exp(nll / (words + lines)): comparable between tokenizers. NaN if some of
            these are not predicted, as the ends of sequences and the items that are known, and of
            a text without spaces, see `MAX_WORD_BYTES`.
        bits_per_byte: nll / ln 2 / utf8_bytes; None if tokens do not spell the text, which has as
            many bytes as its words with single spaces between them.
        class_perplexity: of the choice at the root of the tree.
        within_class_perplexity: of the choices below: `perplexity` / `class_perplexity`.
        context: how many tokens each token is predicted from, as a sentence.
        eos_rule: what is counted at line ends.
        unit: what a token is: `word`, `piece`, …
        spelling_nats: of unknown words given `<unk>`, a part of `nll_nats` and of what is derived
            from it, but not of the two class figures; None: they are one word `<unk>`.
    """

    tokens: int
    words: int
    lines: int
    utf8_bytes: int
    oov: int
    nll_nats: float
    perplexity: float
    perplexity_excluding_oov: float
    word_perplexity: float
    bits_per_byte: float | None
    class_perplexity: float
    within_class_perplexity: float
    context: str
    eos_rule: str = EOS_RULE
    unit: str = "token"
    spelling_nats: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON, see `as_json`."""
        return as_json(self)

    def table(self, title: str) -> str:
        """The figures as lines of text below a title."""
        classes = f"{self.class_perplexity:.2f} × {self.within_class_perplexity:.2f}"
        classes += ", unknown words as <unk>" * (self.spelling_nats is not None)
        nats = self.nll_nats / max(1, self.words + self.lines)
        shown = f"{self.word_perplexity:.2f}"
        if nats >= MAX_NATS:
            shown = f"10^{nats / math.log(10):.1f}"
        per_word = f"{shown}, of {self.words:,} words + {self.lines:,} line ends"
        if self.words and self.utf8_bytes > MAX_WORD_BYTES * self.words:
            size = round(self.utf8_bytes / self.words)
            per_word = f"not printed: the text has a space every {size:,} bytes, so no words"
        spelled, oov = self.spelling_nats is not None, f"{self.oov:,}"
        if self.spelling_nats is not None:
            oov += f", spelled in {self.spelling_nats:.1f} nats"
        bits = "not known: unknown words are not spelled, as by --open-vocabulary"
        if self.bits_per_byte is not None:
            bits = f"{self.bits_per_byte:.4f}"
        elif self.unit == token_unit(TokenizerConfig(split_punctuation=True)):
            bits = "not known: marks are separated (tokenizer.split_punctuation: true)"
        elif spelled:
            bits = "not known: a line has other spaces (U+3000, tabs) than single ones"
            bits += ", or case is lost (tokenizer.lowercase)"
        elif not self.oov:
            bits = "not known: case or spaces are lost, a SentencePiece model keeps them"
        rows = {
            "tokens predicted": f"{self.tokens:,}",
            "words, without <eos>": f"{self.words:,}",
            "out of vocabulary": oov,
            "negative log-likelihood": f"{self.nll_nats:.1f} nats",
            "perplexity": f"{self.perplexity:.2f}, {perplexity_rule(self.unit, spelled)}",
            "  without <unk> tokens": f"{self.perplexity_excluding_oov:.2f}",
            "  of classes × within classes": classes,
            "  per word": per_word,
            "bits per byte": bits,
            "context": self.context,
            "line ends": self.eos_rule,
        }
        if self.unit == ITEM:
            rows = {
                name.replace("tokens", "items"): rows[name]
                for name in rows
                if name.split()[0] not in ("words,", "without", "per", "bits")
            }
            rows["out of vocabulary"] = f"{self.oov:,}, which are left out"
            rows["sequences"] = rows.pop("line ends")
        if self.within_class_perplexity == 1:
            del rows["  of classes × within classes"]  # there are none
        return table_of(title, rows)


def token_unit(tokenizer: Tokenizer | TokenizerConfig) -> str:
    """What a token is: `word`, `word or punctuation mark`, or `piece`."""
    if tokenizer.kind == "sentencepiece":
        return "piece"
    return "word or punctuation mark" if tokenizer.split_punctuation else "word"


def perplexity_rule(unit: str, spelled: bool = False) -> str:
    """What *the* perplexity counts, in words; `unit` is what a token is."""
    if unit == "piece":
        return "per piece and line end"
    if unit == ITEM:
        return "per item"
    return f"per {unit} and line end, unknown words {'spelled' if spelled else 'counted as <unk>'}"


def word_perplexity(nll: float, text: "TextCounts | SplitInfo | Evaluation") -> float:
    """The perplexity per word and line end; NaN of a text whose spaces separate no words."""
    separated = not text.words or text.utf8_bytes <= MAX_WORD_BYTES * text.words
    return perplexity(nll, (text.words + text.lines) * separated)


def perplexity(nll: float, count: int) -> float:
    """exp(nll / count); infinity from `MAX_NATS` each, NaN if nothing is counted."""
    if count == 0:
        return math.nan
    return math.exp(nll / count) if nll / count < MAX_NATS else math.inf
