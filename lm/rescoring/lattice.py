"""Word lattices of a recogniser: HTK's standard lattice format (SLF) and Kaldi's text lattices.

- SLF: a file for each utterance. Its id is `UTTERANCE` (or `U`) of the header without folder and
  ending of a file of features or sound, else the file's name without ending. A folder of `*.slf`,
  `*.lat` or `*.htk` files, compressed or not, is a list of them. Words belong to nodes or to
  links. Scores are logarithms in the base of the header (by default natural).
- Kaldi: one file with, for each utterance, its id on a line, lines `from to word costs`, lines
  `final-state costs`, and an empty line; costs are `graph,acoustic,transitions`. Lattices that are
  not compact have `from to input-label word costs`. Costs are negative natural log-probabilities.

Sources: Young et al. 2006, The HTK Book, chapter 20; Povey et al. 2012, "Generating exact lattices
in the WFST framework".
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from lm.rescoring.nbest import finite_number

NO_WORD = re.compile(r"!NULL|!SENT_START|!SENT_END|</?s>|<eps>|<sil>|\+\+.*\+\+|\[.*\]")
"""Labels of arcs that are no words: silence, noise, ends."""
SLF_NAME = re.compile(r"(.+)\.(slf|lat|htk)(\.\w+)?")
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


def is_lattice(lines: Sequence[str]) -> bool:
    """Whether lines are lattices of either format, in contrast to an n-best list."""
    first, *rest = [line for line in lines if line.strip()][:2] or [""]
    if re.match(r"#|[A-Za-z]+=", first):
        return True
    return bool(rest) and len(first.split()) == 1 and rest[0].split()[0].isdecimal()


def read_lattices(name: str, lines: Iterable[str] = ()) -> list[Lattice]:
    """Read a folder of SLF files, or lines of one SLF file or of Kaldi's lattices.

    Args:
        name: the folder, or the name of the file that the lines are from.
        lines: lines; `is_lattice` is true.

    Raises:
        UserError: if there is none, or one is damaged: a line that has not the format, a cycle, an
            unknown node, no path from a start to an end.
    """
    if Path(name).is_dir():
        files = [path for path in sorted(Path(name).iterdir()) if SLF_NAME.fullmatch(path.name)]
        if not files:
            raise UserError(f"{name}: no lattice here (expected *.slf, *.lat or *.htk)")
        lattices = [_read_slf(str(path), list(read_text(str(path)))) for path in files]
    elif "=" in next((line for line in lines if not re.match(r"#|\s*$", line)), ""):
        lattices = [_read_slf(name, lines)]
    else:
        lattices = list(_read_kaldi(name, lines))
    ids = [lattice.id for lattice in lattices]
    if repeated := [id for id in ids if ids.count(id) > 1]:
        raise UserError(f"{name}: utterance {repeated[0]} has two lattices")
    if len({lattice.has_first_pass for lattice in lattices}) > 1:
        raise UserError(f"{name}: some lattices have scores of a language model, others have not")
    return lattices


def _read_slf(name: str, lines: Iterable[str]) -> Lattice:
    header: dict[str, str] = {}
    nodes: dict[str, str | None] = {}
    links: list[tuple[str, dict[str, str]]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or not line.strip():
            continue
        place = f"{name}, line {number}"
        pairs = [field.partition("=") for field in line.split()]
        if not all(equals for _, equals, _ in pairs):
            raise UserError(f"{place}: expected fields NAME=VALUE, got {line[:60]!r}")
        fields = {key: value.strip('"') for key, _, value in pairs}
        if "I" in fields or "J" in fields:
            if "L" in fields:
                raise UserError(f"{place}: a lattice in a lattice is not supported: expand it")
            if "I" in fields:
                nodes[fields["I"]] = fields.get("W") or fields.get("WORD")
            else:
                links.append((place, fields))
        else:
            header |= fields
    for key, long, found in (("N", "NODES", nodes), ("L", "LINKS", links)):
        declared = header.get(key) or header.get(long)
        if declared is not None and declared != str(len(found)):
            counts = f"{long}={declared} in the header, and {len(found)} of them"
            raise UserError(f"{name} is damaged or incomplete: {counts}")
    base = finite_number(header.get("base", str(math.e)), name)
    scale = math.log(base) if base > 0 else 0.0
    arcs = []
    for place, fields in links:
        ends = [
            fields.get(short) or fields.get(long) for short, long in (("S", "START"), ("E", "END"))
        ]
        for node in ends:
            if node not in nodes:
                raise UserError(f"{place}: the link has no node, or an unknown one: {node}")
        acoustic = _scaled(fields.get("a") or fields.get("acoustic"), scale, place)
        first_pass = _scaled(fields.get("l") or fields.get("language"), scale, place)
        word = fields.get("W") or fields.get("WORD") or nodes[str(ends[1])]
        arcs.append((str(ends[0]), str(ends[1]), word, acoustic, first_pass))
    sources, targets = {arc[0] for arc in arcs}, {arc[1] for arc in arcs}
    starts = [header["start"]] if "start" in header else sorted(sources - targets)
    finals = [header["end"]] if "end" in header else sorted(targets - sources)
    if len(starts) != 1 or starts[0] not in nodes:
        raise UserError(f"{name}: expected one start node, got {' '.join(starts) or 'none'}")
    match = SLF_NAME.fullmatch(Path(name).name)
    if utterance := header.get("UTTERANCE") or header.get("U"):
        match = _UTTERANCE.fullmatch(utterance)
    return _ordered(
        arcs,
        place=name,
        id=match[1] if match else Path(name).stem,
        start=starts[0],
        first_word=nodes[starts[0]],
        finals=[(node, 0.0, 0.0) for node in finals if node in nodes],
        has_first_pass=any("l" in fields or "language" in fields for _, fields in links),
        lm_scale=finite_number(header.get("lmscale", "1"), name),
        word_penalty=-finite_number(header.get("wdpenalty", "0"), name) * scale,
    )


def _read_kaldi(name: str, lines: Iterable[str]) -> Iterator[Lattice]:
    blocks: dict[int, list[tuple[str, list[str]]]] = {}
    block = 0
    for number, line in enumerate(lines, 1):
        if fields := line.split():
            blocks.setdefault(block, []).append((f"{name}, line {number}", fields))
        else:
            block = number
    labels = [fields[2] for (_, *rows) in blocks.values() for _, fields in rows if len(fields) > 2]
    if labels and all(map(str.isdecimal, labels)):
        raise UserError(
            f"{name}: the words are numbers: replace them (int2sym.pl -f 3 words.txt) first"
        )
    for (place, title), *rows in blocks.values():
        if len(title) != 1:
            raise UserError(f"{place}: expected the id of an utterance, got {' '.join(title)!r}")
        arcs, finals = [], []
        for row, fields in rows:
            *states, costs = fields if "," in fields[-1] else [*fields, "0,0"]
            first_pass, acoustic, *_ = [*costs.split(","), "0"]
            scores = -finite_number(acoustic, row), -finite_number(first_pass, row)
            if not all(map(str.isdecimal, states[:2])) or not 1 <= len(states) <= 4:
                raise UserError(f"{row}: expected two states, a word and costs")
            if len(states) == 1:
                finals.append((states[0], *scores))
            elif len(states) > 2:
                arcs.append((states[0], states[1], states[-1], *scores))
            else:
                raise UserError(f"{row}: expected two states, a word and costs")
        yield _ordered(
            arcs,
            place=f"{place}: utterance {title[0]}",
            id=title[0],
            start=rows[0][1][0] if rows else "0",
            finals=finals,
            has_first_pass=True,
            lm_scale=KALDI_LM_SCALE,
            word_penalty=0.0,
        )


def _ordered(
    arcs: Sequence[tuple[str, str, str | None, float, float]],
    *,
    place: str,
    id: str,
    start: str,
    finals: Sequence[tuple[str, float, float]],
    has_first_pass: bool,
    lm_scale: float,
    word_penalty: float,
    first_word: str | None = None,
) -> Lattice:
    """A lattice with its nodes in order, one end, and without nodes that are on no whole path."""
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
        raise UserError(f"{place}: a cycle through the node {error.args[1][0]}") from error
    if not finals:
        raise UserError(f"{place}: no end node")
    for node, *_ in finals:
        if node != start and node not in before:
            raise UserError(f"{place}: no arc leads to the end node {node}")
    kept = _reached(begin, after) & _reached(end, before)
    if end not in kept:
        raise UserError(f"{place}: no path leads from the start to an end node")
    number = {node: k for k, node in enumerate(node for node in order if node in kept)}
    numbered = [
        Arc(number[s], number[t], None if NO_WORD.fullmatch(word or "!NULL") else word, *scores)
        for s, t, word, *scores in every
        if s in number and t in number
    ]
    return Lattice(
        id=id,
        num_nodes=len(number),
        arcs=sorted(numbered, key=lambda arc: arc.source),
        has_first_pass=has_first_pass,
        lm_scale=lm_scale,
        word_penalty=word_penalty,
    )


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
        raise UserError(f"{place}: expected a probability, as base=0 says, got {text!r}")
    return math.log(value)
