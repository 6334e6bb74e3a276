"""`lm recommend`: the most probable next items of sequences of items."""

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.errors import DataError, NotFiniteError, UserError
from lm.commands.arguments import COMPUTING, COUNT, EXCLUDE, FILE, RUN, SWITCH, Options, open_run
from lm.run import TrainedRun

if TYPE_CHECKING:
    from lm.generation.items import Catalogue

HELP = "most probable next items of sequences of items"
OPTIONS: Options = (
    RUN
    | {
        "--history": {
            "metavar": "FILE|-",
            "help": "the items of one user in each line, oldest first: separated by white space, or"
            " a JSON list",
        },
        "--events": FILE | {"help": "a table instead, with the columns of RUN's"},
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
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print a line for each user: items and probabilities, or a JSON object."""
    from lm.generation.items import Catalogue, recommend
    from lm.model.files import read_description
    from lm.scoring.ranking_figures import exclusion_rule

    source = options.history or options.events
    if source is None:
        raise UserError("lm recommend requires --history or --events")
    run = open_run(options)
    read_description(run.folder)  # CheckpointError if there is no model
    if not run.is_independent:
        raise UserError(f"{run.folder}: recommending requires data.sequences: independent")
    catalogue = Catalogue(run)
    excluded = [*catalogue.special, *_retired(options.retired, catalogue)]
    most = run.model.vocab_size - len({*excluded})
    if most < 1:
        raise UserError(f"--retired {options.retired}: it has all items of the catalogue")
    if options.k > most:
        retired = ", the number of items that are not retired" * bool(options.retired)
        raise UserError(f"--k {options.k}: k must be within 1 … {most}{retired}")
    exclude = options.exclude
    if exclude is None:
        exclude = run.prepared.proposed_exclusion
        _log.info("%s", exclusion_rule(exclude, run.prepared.repeated_share))
    users = _users(options, run)
    lost, num_without, first = set[str | int](), 0, ""
    while chunk := list(islice(users, AT_ONCE)):
        found = [catalogue.find(items) for *_, items in chunk]
        known = [ids for ids, _ in found]
        try:
            best = recommend(run.model, known, options.k, excluded=excluded, exclude=exclude)
        except ValueError as error:  # of the search: k is within its range
            raise NotFiniteError(f"{run.folder}: {error}") from error
        rows = zip(chunk, best.word.tolist(), best.log_prob.exp().tolist(), found, strict=True)
        for (place, named, _), ids, probs, (has, unknown) in rows:
            if unknown and not lost:
                first = f"the first is {unknown[0]!r} {place}"
            lost.update(unknown)
            num_without += bool(unknown and not has)
            items = [catalogue.item(id) for id in ids if id >= 0]  # fewer than k may be left
            probs = probs[: len(items)]
            if options.json:
                row = named | {"items": items, "probabilities": probs, "unknown": unknown}
                print(json.dumps(row, ensure_ascii=False))
            else:
                shown = (f"{item} ({prob:.4f})" for item, prob in zip(items, probs, strict=True))
                print("\t".join([*named.values(), *shown]))
    if lost:
        text = "%s: items that are not in the catalogue, left out: %d, %s"
        text += f"; users who have no other items: {num_without}" * bool(num_without)
        if options.history:
            text += ". Items with white space are given as JSON lists"
        _log.warning(text, source, len(lost), first)


def _retired(name: str | None, catalogue: "Catalogue") -> list[int]:
    """The items of a file that nobody is recommended."""
    from data_prep.corpus.lines import read_text

    if name is None:
        return []
    retired, unknown = catalogue.find([line for line in read_text(name) if line])
    if unknown and not retired:
        raise DataError(
            f"{name}: no line is an item of the catalogue, the first is {unknown[0]!r}: expected"
            " one in each line"
        )
    if unknown:
        text = "%s: items that are not in the catalogue: %d, the first is %r"
        _log.warning(text, name, len(unknown), unknown[0])
    return retired


def _users(
    options: argparse.Namespace, run: TrainedRun
) -> Iterator[tuple[str, dict[str, str], list[Any]]]:
    """Where each user is in the file, the name as a column if there is one, and the items."""
    from data_prep.corpus.lines import read_text
    from lm.generation.items import parse_items

    if options.events is None:
        for number, line in enumerate(read_text(options.history), 1):
            yield f"in line {number}", {}, parse_items(line, f"{options.history}, line {number}")
        return
    if run.config.data.user_field is None:
        raise UserError(f"--events: {run.folder} has no columns of a table, use --history")
    from data_prep.corpus.events import histories  # imports pyarrow
    from data_prep.corpus.hints import find_columns

    data, path = run.config.data, Path(options.events)
    if not path.exists() and not glob(options.events, recursive=True):
        raise DataError(f"--events: there is no file {path.absolute()}")
    if path.is_file() and (format := find_columns(path)[0]) != "text":
        data = replace(data, format=format)  # type: ignore[arg-type]
    for user, items in histories(data, options.events):
        yield f"of user {user!r}", {"user": user}, items
