"""Layouts of scores: that of KenLM's `query`, tab-separated, and JSON lines.

In KenLM's layout a unit is `word=id length log-probability` and a tab. `id` is 0 for a word out of
vocabulary, otherwise 1 + the id of its first token. `length`, in KenLM that of the n-gram that was
found, is 1 + the number of tokens that the word is predicted from, the `<eos>` at the beginning
included. `</s>` is the end of the line.
"""

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import EOS
from lm.scoring.scorer import LineScore, Scorer

Level = Literal["summary", "sentence", "word"]
UNITS = {"log10": math.log(10), "nats": 1.0, "bits": math.log(2)}
"""Nats per unit."""


@dataclass(kw_only=True)
class Summary:
    """Sums over lines. A unit is a word or the `<eos>` of a line."""

    lines: int = 0
    units: int = 0
    tokens: int = 0
    oov: int = 0
    log_prob: float = 0.0
    oov_log_prob: float = 0.0

    def add(self, score: LineScore) -> None:
        """Count a line."""
        self.lines += 1
        self.units += len(score.log_prob)
        self.tokens += len(score.unit_of_token)
        self.oov += int(score.is_oov.sum())
        self.log_prob += float(score.log_prob.sum())
        self.oov_log_prob += float(score.log_prob[score.is_oov].sum())

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / units)."""
        return _perplexity(self.log_prob, self.units)

    @property
    def perplexity_excluding_oov(self) -> float:
        """The same over units in the vocabulary; NaN if there are none."""
        return _perplexity(self.log_prob - self.oov_log_prob, self.units - self.oov)


def _perplexity(log_prob: float, count: int) -> float:
    if count == 0:
        return math.nan
    return math.inf if -log_prob / count >= 700 else math.exp(-log_prob / count)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is printed of scores.

    Attributes:
        level: what is printed; in KenLM's layout and in JSON lines, also all that is above it.
        name: `kenlm`, `tsv` or `json`.
        unit: of log-probabilities and entropies: `log10`, `nats` or `bits`.
        has_ids: whether ids are printed in KenLM's layout; the other layouts have the number of
            the line where there is no id.
        one_rank_per_word: whether ranks and entropies of words are single values in JSON, as each
            word has one token; otherwise lists.
    """

    level: Level
    name: str
    unit: str
    has_ids: bool
    one_rank_per_word: bool

    def rows(self, scores: Iterable[tuple[str, LineScore]]) -> Iterator[str]:
        """The printed lines of scores with their ids, without newlines.

        Raises:
            UserError: if there are no scores.
        """
        summary = Summary()
        rows = {"kenlm": self._kenlm, "tsv": self._tsv, "json": self._json}[self.name]
        for id, score in scores:
            if self.name == "tsv" and self.level != "summary" and not summary.lines:
                yield "\t".join(self._header(score.tokens.rank is not None))
            summary.add(score)
            if self.level != "summary":
                yield from rows(id, score)
        if not summary.lines:
            raise UserError("the text to score is empty")
        if self.name == "json":
            yield json.dumps({"summary": self._summary(summary)}, ensure_ascii=False)
        elif self.name == "kenlm" or self.level == "summary":
            yield f"Perplexity including OOVs:\t{summary.perplexity}"
            yield f"Perplexity excluding OOVs:\t{summary.perplexity_excluding_oov}"
            yield f"OOVs:\t{summary.oov}"
            yield f"Tokens:\t{summary.units}"

    def _kenlm(self, id: str, score: LineScore) -> Iterator[str]:
        words = ""
        if self.level == "word":
            word_ids = np.where(score.is_oov, 0, score.word_id + 1)
            units = zip(
                [*score.words, "</s>"], word_ids, score.context + 1, score.log_prob, strict=True
            )
            words = "".join(
                f"{word}={word_id} {length} {self._number(log_prob)}\t"
                for word, word_id, length, log_prob in units
            )
        prefix = f"{id}\t" if self.has_ids else ""
        total = self._number(score.log_prob.sum())
        yield f"{prefix}{words}Total: {total} OOV: {score.is_oov.sum()}"

    def _header(self, details: bool) -> list[str]:
        if self.level == "sentence":
            return ["id", self.unit, "tokens", "oov"]
        columns = ["id", "word", self.unit, "oov", "context"]
        return columns + ["rank", f"entropy_{self.unit}"] * details

    def _tsv(self, id: str, score: LineScore) -> Iterator[str]:
        if self.level == "sentence":
            oov, total = score.is_oov.sum(), self._number(score.log_prob.sum())
            yield f"{id}\t{total}\t{len(score.log_prob)}\t{oov}"
            return
        for unit in self._units(score):
            cells = [
                "+".join(map(str, value)) if isinstance(value, list) else str(value)
                for value in unit.values()
            ]
            yield "\t".join([id, *cells])

    def _json(self, id: str, score: LineScore) -> Iterator[str]:
        values: dict[str, Any] = {
            "id": id,
            "log_prob": _finite(float(self._number(score.log_prob.sum()))),
            "tokens": len(score.log_prob),
            "oov": int(score.is_oov.sum()),
        }
        if self.level == "word":
            values["words"] = list(self._units(score))
        yield json.dumps(values, ensure_ascii=False)

    def _units(self, score: LineScore) -> Iterator[dict[str, Any]]:
        """The figures of each unit, by name."""
        words = [*score.words, EOS]
        for place, word in enumerate(words):
            values: dict[str, Any] = {
                "word": word,
                "log_prob": _finite(float(self._number(score.log_prob[place]))),
                "oov": int(score.is_oov[place]),
                "context": int(score.context[place]),
            }
            rank, entropy = score.tokens.rank, score.tokens.entropy
            if rank is not None and entropy is not None:
                tokens = score.unit_of_token == place
                values["rank"] = rank[tokens].tolist()
                values["entropy"] = [float(self._number(value)) for value in entropy[tokens]]
                if self.one_rank_per_word:
                    values |= {"rank": values["rank"][0], "entropy": values["entropy"][0]}
            yield values

    def _summary(self, summary: Summary) -> dict[str, Any]:
        return {
            "sentences": summary.lines,
            "tokens": summary.units,
            "oov": summary.oov,
            "log_prob": _finite(summary.log_prob / UNITS[self.unit]),
            "perplexity": _finite(summary.perplexity),
            "perplexity_excluding_oov": _finite(summary.perplexity_excluding_oov),
            "unit": self.unit,
        }

    def _number(self, nats: float) -> str:
        """A figure in the unit, as the shortest text that reads as the same fp32 number."""
        return str(np.float32(nats / UNITS[self.unit]))


def score_text(
    scorer: Scorer, lines: Iterable[str], layout: Layout, *, stream: bool
) -> Iterator[str]:
    """Score lines and lay the scores out.

    Args:
        scorer: with `details` if the layout shows ranks and entropies.
        lines: sentences, after an id and a tab or space if `layout.has_ids`.
        layout: of the printed lines.
        stream: whether the lines are one text instead of independent sentences.

    Raises:
        UserError: if there is no line, or a line has no id where it must have one.
    """
    ids: deque[str] = deque()

    def sentences() -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            id, rest = str(number), line
            if layout.has_ids:
                id, rest = split_id(line, f"line {number}")
            ids.append(id)
            yield rest

    scores = scorer.stream(sentences()) if stream else scorer.sentences(sentences())
    yield from layout.rows((ids.popleft(), score) for score in scores)


def split_id(line: str, place: str) -> tuple[str, str]:
    """Split a line at its first tab or space; UserError, which names the place, without an id."""
    id, *rest = re.split("[\t ]", line, maxsplit=1)
    if not id:
        raise UserError(f"{place}: expected an id, a tab or space, and a sentence")
    return id, "".join(rest)


def _finite(value: float) -> float | None:
    """A value for JSON, which has no infinity and no NaN."""
    return value if math.isfinite(value) else None
