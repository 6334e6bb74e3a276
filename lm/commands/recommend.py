"""`lm recommend`: the most probable next items of sequences of items."""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import COMPUTING, COUNT, EXCLUDE, FILE, RUN, SWITCH, Options
from lm.run import TrainedRun

HELP = "most probable next items of sequences of items"
OPTIONS: Options = (
    RUN
    | {
        "--history": {
            "metavar": "FILE|-",
            "help": "the items of one user in each line, oldest first: separated by white space, or"
            " a JSON list",
        },
        "--events": FILE | {"help": "a table instead, of the format and with the columns of RUN's"},
        "--k": COUNT | {"default": 10, "help": "number of items (default 10)"},
    }
    | EXCLUDE
    | {"--retired": FILE | {"help": "items that nobody is recommended, one in each line"}}
    | COMPUTING
    | {"--json": SWITCH | {"help": "print one JSON object for each user"}}
)
EXCLUSIVE = ("--history", "--events")
AT_ONCE = 1024
"""Users that are computed together."""
_User = tuple[str | None, list[Any]]
"""The name of a user, if there is one, and the items."""
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print a line for each user: items and probabilities, or a JSON object."""
    from data_prep.corpus.lines import read_text
    from lm.generation.items import Catalogue, parse_items, recommend

    source = options.history or options.events
    if source is None:
        raise UserError("lm recommend requires --history or --events")
    run = TrainedRun.open(options.run_dir, device=options.device, threads=options.threads)
    if not run.is_independent:
        raise UserError(f"{run.folder}: recommending requires data.sequences: independent")
    catalogue = Catalogue(run)
    retired = list[int]()
    if options.retired is not None:
        retired, unknown = catalogue.find([line for line in read_text(options.retired) if line])
        if unknown and not retired:
            raise UserError(
                f"{options.retired}: no line is an item of the catalogue, the first is"
                f" {unknown[0]!r}: expected one in each line"
            )
        if unknown:
            text = "%s: %d items are not in the catalogue, the first is %r"
            _log.warning(text, options.retired, len(unknown), unknown[0])
    excluded = [*catalogue.special, *retired]
    users: Iterator[_User]
    if options.events is None:
        lines = enumerate(read_text(source), 1)
        users = ((None, parse_items(line, f"{source}, line {number}")) for number, line in lines)
    elif run.config.data.user_field is None:
        raise UserError(f"--events: {run.folder} has no columns of a table, use --history")
    else:
        from data_prep.corpus.events import histories  # imports pyarrow

        users = iter(histories(run.config.data, source))
    lost = _Lost(source)
    for chunk in _chunks(users):
        found = [catalogue.find(items) for _, items in chunk]
        known = [ids for ids, _ in found]
        for ids, unknown in found:
            lost.add(ids, unknown)
        try:
            log_prob, word = recommend(
                run.model, known, options.k, excluded=excluded, exclude=options.exclude
            )
        except ValueError as error:
            raise UserError(f"--k {options.k}: {error}") from error
        rows = zip(chunk, word.tolist(), log_prob.exp().tolist(), found, strict=True)
        for (user, _), ids, probs, (_, unknown) in rows:
            items, named = list(map(catalogue.item, ids)), {} if user is None else {"user": user}
            if options.json:
                row = named | {"items": items, "probabilities": probs, "unknown": unknown}
                print(json.dumps(row, ensure_ascii=False))
            else:
                shown = (f"{item} ({prob:.4f})" for item, prob in zip(items, probs, strict=True))
                print("\t".join([*named.values(), *shown]))
    lost.report()


class _Lost:
    """Counts items that are not in the catalogue, over the lines of a file."""

    def __init__(self, name: str) -> None:
        self._name, self._line, self._items, self._users = name, 0, 0, 0
        self._first = ""

    def add(self, known: Sequence[int], unknown: Sequence[object]) -> None:
        """Count those of the next line."""
        self._line += 1
        if unknown and not self._items:
            self._first = f"the first is {unknown[0]!r} in line {self._line}"
        self._items += len(unknown)
        self._users += bool(unknown and not known)

    def report(self) -> None:
        """Warn if there are any."""
        if self._items:
            text = (
                "%s: %d items are not in the catalogue and are left out, %s; nothing is left of %d"
            )
            text += " users. Items with white space are given as JSON lists"
            _log.warning(text, self._name, self._items, self._first, self._users)


def _chunks(users: Iterator[_User]) -> Iterator[list[_User]]:
    while chunk := list(islice(users, AT_ONCE)):
        yield chunk
