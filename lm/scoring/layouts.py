r"""Layouts of scores: that of KenLM's `query`, tab-separated, and JSON lines.

In the tab-separated layout a word with a quotation mark is quoted as in CSV, so that `csv` (dialect
`excel-tab`) and `pandas.read_csv(sep="\t")` read every row; the latter reads words such as NA as
missing values unless it is given `keep_default_na=False`. The surprisal of a word out of vocabulary
is missing (null in JSON) unless unknown words are told apart, and its rank unless they share
P(`<unk>`).

In KenLM's layout a unit is `word=id length log-probability` and a tab. `id` is 0 for a word out of
vocabulary, otherwise 1 + the id of its first token. `length`, in KenLM that of the n-gram that was
found, is 1 + the number of tokens that the word is predicted from, the `<eos>` at the beginning
included. `</s>` is the end of the line.
"""

import csv
import io
import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenizer.punctuation import EOS
from lm.figures import as_json, perplexity
from lm.scoring.scorer import LineScore, Scorer
from lm.scoring.unknown import noted_words

_log = logging.getLogger(__name__)
UNITS = {"log10": math.log(10), "nats": 1.0, "bits": math.log(2)}
"""Nats per unit."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is printed of scores."""

    scorer: Scorer
    level: str  # `summary`, `sentence`, `word` or `token`; all but `tsv` print what is above it too
    name: str  # `kenlm`, `tsv` or `json`
    unit: str  # of log-probabilities and entropies: `log10`, `nats` or `bits`
    has_ids: bool  # whether lines begin with an id, see `--ids`; else it is their number
    text: str = "line"  # what one is: a `line`, `all` lines, or those of an `id`, one after another
    details: bool = False  # ranks and entropies
    at_once: int | None = None  # number of lines that are read before the first is scored
    keep_empty_lines: bool = True  # of a stream; independent sentences may be empty
    source: str = "text"  # of the lines, in a message

    def rows(self, lines: Iterable[str]) -> Iterator[str]:
        """Score lines; yields what is printed.

        Perplexities of `tsv` and `json` are those of `lm evaluate`, per token and per word; KenLM's
        are per word. UserError if there is no line, or a line has no id where it must have one.
        """
        ids: deque[str] = deque()
        num_lines, num_units, num_tokens, oov, log_prob, oov_log_prob = 0, 0, 0, 0, 0.0, 0.0
        num_unknown = 0
        by_word = self.name == "kenlm"
        for score in self._scores(lines, ids):
            id = ids.popleft()
            if self.level != "summary":
                yield self._line(id, score, is_first=not num_lines)
            num_lines += 1
            num_units += len(score.log_prob)
            num_tokens += len(score.is_unk)
            num_unknown += int(score.is_oov.sum())
            is_oov = score.is_oov if by_word else score.is_unk
            each = score.log_prob if by_word else score.tokens.log_prob
            oov += self._num_oov(score)
            log_prob += float(each.sum())
            oov_log_prob += float(each[is_oov].sum())
        if not num_lines:
            raise DataError(f"{self.source}: there is no line to score")
        oov = num_unknown if by_word else oov
        left_out = oov if self.scorer.unknown.leaves_out else 0
        count = num_units - left_out if by_word else num_tokens
        summary = {
            "sentences": num_lines,
            "words": num_units - num_lines,
            "tokens": count,
            "oov": oov,
            "log_prob": log_prob / UNITS[self.unit],
            "perplexity": perplexity(-log_prob, count),
            "perplexity_excluding_oov": perplexity(oov_log_prob - log_prob, count - oov + left_out),
            "word_perplexity": perplexity(-log_prob, 0 if left_out else num_units),
        }
        has_gaps = num_unknown and not self.scorer.unknown.tells_apart and not by_word
        if has_gaps and self.level in ("word", "token"):
            text = "%d of %d words are unknown, without a surprisal: lm/scoring/README.md"
            _log.info(text, num_unknown, summary["words"])
        if self.name == "json":
            yield _json({"summary": summary | {"unit": self.unit}})
        elif self.name == "kenlm":
            titles = {
                "perplexity": "Perplexity including OOVs",
                "perplexity_excluding_oov": "Perplexity excluding OOVs",
                "oov": "OOVs",
                "tokens": "Tokens",
            }
            yield from (f"{titles[key]}:\t{summary[key]}" for key in titles)
        elif self.level == "summary":
            yield self._tsv([summary], has_header=True)

    def _scores(self, lines: Iterable[str], ids: deque[str]) -> Iterator[LineScore]:
        """Scores of lines, whose ids are appended to `ids`."""
        sentences = noted_words(self.scorer.tokenizer, self._sentences(lines, ids), self.source)
        settings: dict[str, Any] = {"details": self.details, "at_once": self.at_once}
        if self.text == "line":
            yield from self.scorer.sentences(sentences, **settings)
        else:
            all_lines = ((self.text == "all" or ids[-1], sentence) for sentence in sentences)
            for _, text in groupby(all_lines, key=itemgetter(0)):
                yield from self.scorer.stream((line for _, line in text), **settings)

    def _sentences(self, lines: Iterable[str], ids: deque[str]) -> Iterator[str]:
        """The lines without their ids, which are appended to `ids`."""
        keep_empty = self.keep_empty_lines or self.text == "line"
        all_have_tabs = True
        for number, line in enumerate(lines, 1):
            id, rest = str(number), [line]
            if self.has_ids:
                id, *rest = line.split("\t" if "\t" in line else " ", maxsplit=1)
                if all_have_tabs and id and "\t" not in line:
                    all_have_tabs = False
                    _log.info(
                        "--ids: line %d has no tab, so that its id is its first word, %r:"
                        " leave out --ids if lines begin with no id",
                        number,
                        id,
                    )
            if not id:
                expected = "expected an id, a tab or space, and a sentence"
                raise DataError(f"{self.source}, line {number}: {expected}")
            sentence = "".join(rest)
            if keep_empty or sentence.strip():
                ids.append(id)
                yield sentence

    def _line(self, id: str, score: LineScore, *, is_first: bool) -> str:
        """What is printed of a line."""
        if self.name == "kenlm":
            return self._kenlm(id, score)
        units = self._units(score) if self.level in ("word", "token") else []
        sentence = {
            "id": id,
            "log_prob": self._number(score.log_prob.sum()),
            "words": len(score.words),
            "tokens": len(score.is_unk),
            "oov": self._num_oov(score),
        }
        if self.name == "json":
            return _json(sentence | ({f"{self.level}s": units} if units else {}))
        return self._tsv([{"id": id} | unit for unit in units] or [sentence], has_header=is_first)

    def _num_oov(self, score: LineScore) -> int:
        """Tokens that are `<unk>` or left out."""
        return int((score.is_oov if self.scorer.unknown.leaves_out else score.is_unk).sum())

    def _kenlm(self, id: str, score: LineScore) -> str:
        units = ""
        if self.level == "word":
            word_ids = np.where(score.is_oov, 0, score.word_id + 1)
            columns = [*score.words, "</s>"], word_ids, score.context + 1, score.log_prob
            for word, word_id, length, log_prob in zip(*columns, strict=True):
                units += f"{word}={word_id} {length} {self._number(log_prob)}\t"
        prefix = f"{id}\t" if self.has_ids else ""
        total = self._number(score.log_prob.sum())
        return f"{prefix}{units}Total: {total} OOV: {score.is_oov.sum()}"

    def _tsv(self, records: list[dict[str, Any]], *, has_header: bool) -> str:
        titles = {
            "log_prob": self.unit,
            "class_log_prob": f"class_{self.unit}",
            "entropy": f"entropy_{self.unit}",
        }
        rows = [[titles.get(name, name) for name in records[0]]] if has_header else []
        rows += [list(record.values()) for record in records]
        text = io.StringIO()
        csv.writer(text, "excel-tab", lineterminator="\n").writerows(rows)
        return text.getvalue().removesuffix("\n")

    def _units(self, score: LineScore) -> list[dict[str, Any]]:
        """The figures of each word, sums over its tokens, or of each token, by name."""
        units, position = [], np.arange(1, len(score.words) + 2)
        if self.level == "token":
            score, position = self._by_token(score), score.unit_of_token + 1
        num_tokens = np.bincount(score.unit_of_token, minlength=len(position))
        for place, word in enumerate([*score.words, EOS]):
            is_oov, tokens = score.is_oov[place], score.unit_of_token == place
            is_known = self.scorer.unknown.tells_apart or not is_oov
            values: dict[str, Any] = {
                "position": int(position[place]),
                "word": word,
                "log_prob": self._number(score.log_prob[place]),
                "surprisal": self._number(-score.log_prob[place], "bits") if is_known else None,
                "oov": int(is_oov),
                "tokens": int(num_tokens[place]),
                "context": int(score.context[place]),
            }
            rank, entropy = score.tokens.rank, score.tokens.entropy
            if rank is not None and entropy is not None:
                has_rank = self.scorer.unknown.is_shared or not is_oov
                values["rank"] = int(rank[tokens].sum()) if has_rank else None
                values["entropy"] = self._number(entropy[tokens].sum())
                values["class_log_prob"] = self._number(score.tokens.class_log_prob[tokens].sum())
            units.append(values)
        return units

    def _by_token(self, score: LineScore) -> LineScore:
        """A score whose units are the tokens, the last one `<eos>`."""
        tokens, name = score.tokens, self.scorer.tokenizer.token
        return replace(
            score,
            words=[name(id) for id in tokens.id[:-1].tolist()],
            log_prob=tokens.log_prob,
            is_oov=score.is_unk,
            context=tokens.context,
            unit_of_token=np.arange(len(tokens.id)),
        )

    def _number(self, nats: float, unit: str | None = None) -> float:
        """A figure in the unit, with the digits of the fp32 number nearest to it."""
        return float(str(np.float32(nats / UNITS[unit or self.unit])))


def _json(values: dict[str, Any]) -> str:
    return json.dumps(as_json(values), ensure_ascii=False)
