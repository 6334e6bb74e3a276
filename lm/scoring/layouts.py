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
from typing import Any

import numpy as np

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import EOS
from lm.evaluation import perplexity
from lm.scoring.scorer import LineScore, Scorer

UNITS = {"log10": math.log(10), "nats": 1.0, "bits": math.log(2)}
"""Nats per unit."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is printed of scores.

    Attributes:
        scorer: computes the scores.
        level: `summary`, `sentence` or `word`; in KenLM's layout and in JSON lines, what is above
            the level is printed as well.
        name: `kenlm`, `tsv` or `json`.
        unit: the unit of log-probabilities and entropies: `log10`, `nats` or `bits`.
        has_ids: whether each line begins with an id and a tab or space; if not, the number of the
            line is its id, which KenLM's layout leaves out.
    """

    scorer: Scorer
    level: str
    name: str
    unit: str
    has_ids: bool

    def rows(self, lines: Iterable[str], *, stream: bool) -> Iterator[str]:
        """Score lines; yields what is printed, without line ends.

        Args:
            lines: the text.
            stream: whether the lines are one text instead of independent sentences.

        Raises:
            UserError: if there is no line, or a line has no id where it must have one.
        """
        ids: deque[str] = deque()
        sentences = self._sentences(lines, ids)
        scores = self.scorer.stream(sentences) if stream else self.scorer.sentences(sentences)
        rows = {"kenlm": self._kenlm, "tsv": self._tsv, "json": self._json}[self.name]
        num_lines, num_units, oov, log_prob, oov_log_prob = 0, 0, 0, 0.0, 0.0
        for score in scores:
            if self.name == "tsv" and self.level != "summary" and not num_lines:
                yield "\t".join(self._header())
            num_lines += 1
            num_units += len(score.log_prob)
            oov += int(score.is_oov.sum())
            log_prob += float(score.log_prob.sum())
            oov_log_prob += float(score.log_prob[score.is_oov].sum())
            id = ids.popleft()
            if self.level != "summary":
                yield from rows(id, score)
        if not num_lines:
            raise UserError("the text to score is empty")
        including = perplexity(-log_prob, num_units)
        excluding = perplexity(oov_log_prob - log_prob, num_units - oov)
        if self.name == "json":
            summary = {
                "sentences": num_lines,
                "tokens": num_units,
                "oov": oov,
                "log_prob": _finite(log_prob / UNITS[self.unit]),
                "perplexity": _finite(including),
                "perplexity_excluding_oov": _finite(excluding),
                "unit": self.unit,
            }
            yield json.dumps({"summary": summary}, ensure_ascii=False)
        elif self.name == "kenlm" or self.level == "summary":
            yield f"Perplexity including OOVs:\t{including}"
            yield f"Perplexity excluding OOVs:\t{excluding}"
            yield f"OOVs:\t{oov}"
            yield f"Tokens:\t{num_units}"

    def _sentences(self, lines: Iterable[str], ids: deque[str]) -> Iterator[str]:
        """The lines without their ids, which are appended to `ids`."""
        for number, line in enumerate(lines, 1):
            id, rest = str(number), [line]
            if self.has_ids:
                id, *rest = re.split("[\t ]", line, maxsplit=1)
            if not id:
                expected = "expected an id, a tab or space, and a sentence"
                raise UserError(f"line {number}: {expected}")
            ids.append(id)
            yield "".join(rest)

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

    def _header(self) -> list[str]:
        if self.level == "sentence":
            return ["id", self.unit, "tokens", "oov"]
        columns = ["id", "word", self.unit, "oov", "context"]
        return columns + ["rank", f"entropy_{self.unit}"] * self.scorer.details

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
                if self.scorer.has_one_token_per_word:
                    values |= {"rank": values["rank"][0], "entropy": values["entropy"][0]}
            yield values

    def _number(self, nats: float) -> str:
        """A figure in the unit, as the shortest text that reads as the same fp32 number."""
        return str(np.float32(nats / UNITS[self.unit]))


def _finite(value: float) -> float | None:
    """A value for JSON, which has no infinity and no NaN."""
    return value if math.isfinite(value) else None
