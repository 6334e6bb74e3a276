"""Word lattices of a recogniser: HTK's standard lattice format (SLF) and Kaldi's text lattices.

- SLF: a file for each utterance. Its id is `UTTERANCE` (or `U`) of the header without folder and
  ending of a file of features or sound, else the file's name without ending. A folder of `*.slf`,
  `*.lat` or `*.htk` files, compressed or not, is a list of them. Words belong to nodes or to
  links. Scores are logarithms in the base of the header (by default natural). A pronunciation's
  score is added to the acoustic one, by `prscale` relative to `acscale`.
- Kaldi: one file with, for each utterance, its id on a line, lines `from to word costs`, lines
  `final-state costs`, and an empty line; costs are `graph,acoustic,transitions`. Lattices that are
  not compact have `from to input-label word costs`, without transitions. Costs are negative natural
  log-probabilities; those that are missing are 0. Words are symbols, not numbers.

Sources: Young et al. 2006, The HTK Book, chapter 20; Povey et al. 2012, "Generating exact lattices
in the WFST framework".
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError
from lm.rescoring.formats import NUMBER, Known, NonWords, format_of
from lm.rescoring.nbest import finite_number

_log = logging.getLogger(__name__)

SLF_NAME = re.compile(r"(.+)\.(slf|lat|htk)(\.\w+)?")
_SLF_FIELD = re.compile(
    r"""(\w+)\s*=\s*("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\s\\])*)(?=\s|$)"""
)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_SHORT = {"WORD": "W", "START": "S", "END": "E", "acoustic": "a", "language": "l"}
_SHORT |= {"UTTERANCE": "U", "NODES": "N", "LINKS": "L"}
"""Long names of fields."""
_NUMBERS = dict.fromkeys(("acscale", "lmscale", "prscale"), "1")
_NUMBERS |= {"base": str(math.e), "wdpenalty": "0"}
"""Numbers of a header and their defaults."""
_COSTS = re.compile(rf"{NUMBER},{NUMBER}(?:,[\d_]*)?$")
_IS_NUMBER = re.compile(NUMBER).fullmatch
_UTTERANCE = re.compile(r"(?:.*/)?(.+?)(?:\.(?:mfc|plp|fbank|fea|wav|sph|slf|lat|htk))?")
KALDI_LM_SCALE = 10.0
"""Kaldi writes acoustic scores without the scale of the decoder, which is usually 0.1."""


class Arc(NamedTuple):
    """A way from one node to a later one; scores are natural log-probabilities."""

    source: int
    target: int
    word: str | None
    acoustic: float = 0.0
    first_pass: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """The arcs of an utterance; paths lead from node 0 to the last node, to nodes of larger number.

    Nodes that no such path reaches are left out.
    """

    id: str
    num_nodes: int
    arcs: list[Arc]  # in the order of their sources
    has_first_pass: bool
    lm_scale: float  # of the first pass: acoustic + lm_scale · first pass - word_penalty · words
    word_penalty: float

    @property
    def words(self) -> list[str]:
        """The distinct words."""
        return list(dict.fromkeys(arc.word for arc in self.arcs if arc.word is not None))

    @cached_property
    def leaving(self) -> list[list[Arc]]:
        """The arcs that leave each node."""
        leaving: list[list[Arc]] = [[] for _ in range(self.num_nodes)]
        for arc in self.arcs:
            leaving[arc.source].append(arc)
        return leaving


def read_lattices(
    name: str, lines: Sequence[str] = (), non_words: NonWords | None = None
) -> list[Lattice]:
    """Read a folder of SLF files, or the lines of one SLF file or of Kaldi's lattices.

    Raises:
        UserError: if there is none, or one is damaged: a line that has not the format, a cycle, an
            unknown node, no path from a start to an end.
    """
    non_words = NonWords() if non_words is None else non_words
    files = {name: lines}
    if Path(name).is_dir():
        paths = [path for path in sorted(Path(name).iterdir()) if SLF_NAME.fullmatch(path.name)]
        files = {str(path): list(read_text(str(path))) for path in paths}
        if not files:
            raise DataError(f"{name}: no lattice here (expected *.slf, *.lat or *.htk)")
    lattices: list[Lattice] = []
    for path, content in files.items():
        if (format := format_of(content)) == "list":
            raise DataError(f"{path} is no lattice in HTK's or Kaldi's format")
        if format == "slf":
            lattices.append(_read_slf(path, content, non_words))
        else:
            lattices += _read_kaldi(path, content, non_words)
    non_words.log(name)
    ids = [lattice.id for lattice in lattices]
    if (repeated := Counter(ids).most_common(1)[0])[1] > 1:
        raise DataError(f"{name}: utterance {repeated[0]} has two lattices")
    if len({lattice.has_first_pass for lattice in lattices}) > 1:
        raise DataError(f"{name}: some lattices have scores of a language model, others have not")
    return lattices


def _slf_fields(line: str, place: str) -> dict[str, str]:
    """Fields of a line by their short names; quotes and escapes as in The HTK Book, 4.6."""
    fields, rest = dict[str, str](), line.strip()
    while rest:
        if not (match := _SLF_FIELD.match(rest)):
            problem = f"expected fields NAME=VALUE, got {line[:60]!r}"
            if any(value[:1] in ("'", '"') for value in fields.values()):
                problem += ": a quotation mark is not closed"
            raise DataError(f"{place}: {problem}")
        key, value = match[1], match[2]
        if value[:1] in ("'", '"') and value[-1] == value[0] and len(value) > 1:
            value = value[1:-1]
        if "\\" in value:
            try:
                value = _ESCAPE.sub(_unescaped, value.encode()).decode()
            except (UnicodeDecodeError, ValueError) as error:
                raise DataError(f"{place}: the bytes of {value} are not UTF-8") from error
        fields[_SHORT.get(key, key)], rest = value, rest[match.end() :].lstrip()
    return fields


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)]) if len(escape[1]) > 1 else escape[1]


def _read_slf(name: str, lines: Iterable[str], non_words: NonWords) -> Lattice:
    header: dict[str, str] = {}
    nodes: dict[str, str | None] = {}
    links: list[tuple[str, dict[str, str]]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or not line.strip():
            continue
        place = f"{name}, line {number}"
        fields = _slf_fields(line, place)
        if "I" in fields or "J" in fields:
            if "L" in fields:
                raise DataError(f"{place}: a lattice in a lattice is not supported: expand it")
            if "I" in fields:
                nodes[fields["I"]] = fields.get("W")
            else:
                links.append((place, fields))
        else:
            header |= fields
    for key, long, found in (("N", "NODES", nodes), ("L", "LINKS", links)):
        if header.get(key) not in (None, str(len(found))):
            counts = f"{long}={header[key]} in the header, and {len(found)} of them"
            raise DataError(f"{name} is damaged or incomplete: {counts}")
    given = {key: finite_number(header.get(key, value), name) for key, value in _NUMBERS.items()}
    base, acoustic_scale = given["base"], given["acscale"]
    if base != 0 and base <= 1:
        raise DataError(f"{name}: expected base=0 or one above 1, got {header['base']}")
    scale = math.log(base) if base else 0.0
    penalty = _scaled(header["wdpenalty"], scale, name) if given["wdpenalty"] else 0.0
    if acoustic_scale <= 0:
        raise DataError(f"{name}: expected acscale above 0, got {header['acscale']}")
    arcs = []
    for place, fields in links:
        for node in map(fields.get, "SE"):
            if node not in nodes:
                raise DataError(f"{place}: the link has no node, or an unknown one: {node}")
        acoustic, first_pass, spoken = (_scaled(fields.get(key), scale, place) for key in "alr")
        acoustic += given["prscale"] / acoustic_scale * spoken
        word = fields.get("W") or nodes[fields["E"]]
        arcs.append((fields["S"], fields["E"], word, acoustic, first_pass))
    sources, targets = {arc[0] for arc in arcs}, {arc[1] for arc in arcs}
    starts = [header["start"]] if "start" in header else sorted(sources - targets)
    finals = [header["end"]] if "end" in header else sorted(targets - sources)
    if len(starts) != 1 or starts[0] not in nodes:
        raise DataError(f"{name}: expected one start node, got {' '.join(starts) or 'none'}")
    match = SLF_NAME.fullmatch(Path(name).name)
    if utterance := header.get("U"):
        match = _UTTERANCE.fullmatch(utterance)
    return _ordered(
        arcs,
        place=name,
        id=match[1] if match else Path(name).stem,
        start=starts[0],
        first_word=nodes[starts[0]],
        finals=[(node, 0.0, 0.0) for node in finals if node in nodes],
        has_first_pass=any("l" in fields for _, fields in links),
        lm_scale=given["lmscale"] / acoustic_scale,
        word_penalty=-penalty / acoustic_scale,
        non_words=non_words,
    )


_Row = tuple[str, list[str]]
"""Place and columns of a line."""


def _is_compact(rows: Sequence[_Row]) -> bool:
    """Whether arcs of Kaldi's format have no input labels, which are numbers, before words."""
    arcs = [fields for _, fields in rows if len(fields) > 2]
    lengths = {len(fields) for fields in arcs}
    if lengths != {4}:
        return 5 not in lengths
    are_labels = all(fields[2].isdecimal() for fields in arcs)
    ends = [fields[3] for fields in arcs]
    return not are_labels or any(map(_COSTS.match, ends)) or all(map(_IS_NUMBER, ends))


def _kaldi_costs(text: str, row: str) -> tuple[float, float]:
    """Acoustic and first-pass score of costs."""
    first_pass, *others = text.split(",")
    if not others:
        raise DataError(
            f"{row}: expected two states, a word and costs graph,acoustic, or a final state and its"
            f" costs, got {text!r} for costs (OpenFst's single weights are of no use: which cost?)"
        )
    return -finite_number(others[0], row), -finite_number(first_pass, row)


def _check_symbols(
    name: str, blocks: Sequence[Sequence[_Row]], word_columns: Sequence[int], are_known: Known
) -> None:
    """Refuse numbers for words unless they are known, and warn of utterances with numbers alone."""
    suspects: list[str] = []
    for column in sorted(set(word_columns)):
        labels = [
            (title[0], fields[column])
            for ((_, title), *rows), word in zip(blocks, word_columns, strict=True)
            if word == column
            for _, fields in rows
            if len(fields) > column
        ]
        with_symbols = {id for id, label in labels if not label.isdecimal()}
        if labels and not with_symbols and not are_known([label for _, label in labels]):
            script = f"int2sym.pl -f {column + 1} words.txt"
            raise DataError(f"{name}: the words are numbers: replace them ({script}) first")
        suspects += sorted({id for id, _ in labels} - with_symbols)
    if suspects:
        others = f" and {len(suspects) - 1:,} others" if len(suspects) > 1 else ""
        which = f"the words of utterance {suspects[0]}{others} are numbers alone"
        _log.warning("%s: %s: replace them if they are those of words.txt", name, which)


def _read_kaldi(name: str, lines: Iterable[str], non_words: NonWords) -> Iterator[Lattice]:
    numbered = ((f"{name}, line {number}", line.split()) for number, line in enumerate(lines, 1))
    groups = groupby(numbered, key=lambda row: bool(row[1]))
    blocks = [list(rows) for is_filled, rows in groups if is_filled]
    word_columns = [2 if _is_compact(rows) else 3 for _, *rows in blocks]
    _check_symbols(name, blocks, word_columns, non_words.are_known)
    for ((place, title), *rows), word in zip(blocks, word_columns, strict=True):
        if len(title) != 1:
            raise DataError(f"{place}: expected the id of an utterance, got {' '.join(title)!r}")
        arcs: list[tuple[str, str, str | None, float, float]] = []
        finals = []
        for row, fields in rows:
            num_labels = word + 1 if len(fields) > 2 else 1
            labels, costs = fields[:num_labels], [*fields[num_labels:], "0,0"]
            is_whole = len(labels) == num_labels and len(costs) <= 2
            if not all(map(str.isdecimal, labels[:2])) or not is_whole:
                raise DataError(f"{row}: expected two states, a word and costs")
            acoustic, first_pass = _kaldi_costs(costs[0], row)
            if num_labels > 1:
                arcs.append((labels[0], labels[1], labels[word], acoustic, first_pass))
            else:
                finals.append((labels[0], acoustic, first_pass))
        yield _ordered(
            arcs,
            place=f"{place}: utterance {title[0]}",
            id=title[0],
            start=rows[0][1][0] if rows else "0",
            finals=finals,
            has_first_pass=True,
            lm_scale=KALDI_LM_SCALE,
            word_penalty=0.0,
            non_words=non_words,
        )


def _ordered(
    arcs: Sequence[tuple[str, str, str | None, float, float]],
    *,
    place: str,
    start: str,
    finals: Sequence[tuple[str, float, float]],
    non_words: NonWords,
    first_word: str | None = None,
    **others: Any,
) -> Lattice:
    """A lattice with its nodes in order, one end, and without nodes that are on no whole path.

    `others` are its fields that are neither nodes nor arcs.
    """
    begin, end = "start of the path", "end of the path"
    every = [(begin, start, first_word, 0.0, 0.0), *arcs]
    every += [(node, end, None, *scores) for node, *scores in finals]  # type: ignore[misc]
    before: dict[str, set[str]] = {}
    after: dict[str, set[str]] = {}
    for source, target, *_ in every:
        before.setdefault(target, set()).add(source)
        after.setdefault(source, set()).add(target)
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise DataError(f"{place}: a cycle through the node {error.args[1][0]}") from error
    if not finals:
        raise DataError(f"{place}: no end node")
    for node, *_ in finals:
        if node != start and node not in before:
            raise DataError(f"{place}: no arc leads to the end node {node}")
    kept = _reached(begin, after) & _reached(end, before)
    if end not in kept:
        raise DataError(f"{place}: no path leads from the start to an end node")
    number = {node: k for k, node in enumerate(node for node in order if node in kept)}
    numbered = [
        Arc(number[s], number[t], non_words.word(label), *scores)
        for s, t, label, *scores in every
        if s in number and t in number
    ]
    numbered.sort(key=lambda arc: arc.source)
    return Lattice(num_nodes=len(number), arcs=numbered, **others)


def _reached(node: str, neighbours: dict[str, set[str]]) -> set[str]:
    """The nodes that are reached from a node, itself included."""
    reached, waiting = {node}, [node]
    while waiting:
        new = neighbours.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def _scaled(text: str | None, scale: float, place: str) -> float:
    """A natural logarithm: of a logarithm in another base, or of a probability (scale 0)."""
    if text is None:
        return 0.0
    value = finite_number(text, place)
    if scale:
        return value * scale
    if value <= 0:
        raise DataError(f"{place}: expected a probability, as base=0 says, got {text!r}")
    return math.log(value)
