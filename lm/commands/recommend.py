"""`lm recommend`: the most probable next items of sequences of items."""

import argparse
import json
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import COMPUTING, COUNT, EXCLUDE, FILE, JSON, RUN, Options
from lm.run import TrainedRun

HELP = "most probable next items of sequences of items"
OPTIONS: Options = (
    RUN
    | {
        "--history": {
            "required": True,
            "metavar": "FILE|-",
            "help": "the items of one user in each line, oldest first: separated by white space, or"
            " a JSON list",
        },
        "--k": COUNT | {"default": 10, "help": "number of items (default 10)"},
    }
    | EXCLUDE
    | {"--retired": FILE | {"help": "items that nobody is recommended, one in each line"}}
    | COMPUTING
    | JSON
)
AT_ONCE = 1024
"""Users that are computed together."""
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print a line for each user: items and probabilities, or a JSON object."""
    from data_prep.corpus.lines import read_text
    from lm.generation.items import Catalogue, recommend

    run = TrainedRun.open(options.run_dir, device=options.device, threads=options.threads)
    if not run.is_independent:
        raise UserError(f"{run.folder}: recommending requires data.sequences: independent")
    catalogue = Catalogue(run)
    retired = [] if options.retired is None else catalogue.ids(read_text(options.retired))
    excluded = [*catalogue.special, *retired]
    users = (
        _items(line, f"{options.history}, line {number}")
        for number, line in enumerate(read_text(options.history), 1)
    )
    for chunk in _chunks(users):
        histories = [catalogue.ids(items) for items in chunk]
        if num_unknown := sum(map(len, chunk)) - sum(map(len, histories)):
            _log.warning("%d items are not in the catalogue and are left out", num_unknown)
        try:
            log_prob, word = recommend(
                run.model, histories, options.k, excluded=excluded, exclude=options.exclude
            )
        except ValueError as error:
            raise UserError(f"--k {options.k}: {error}") from error
        for ids, probs in zip(word.tolist(), log_prob.exp().tolist(), strict=True):
            items = list(map(catalogue.item, ids))
            if options.json:
                print(json.dumps({"items": items, "probabilities": probs}, ensure_ascii=False))
            else:
                pairs = zip(items, probs, strict=True)
                print("\t".join(f"{item} ({prob:.4f})" for item, prob in pairs))


def _items(line: str, name: str) -> list[Any]:
    """The items of a line."""
    if not line.lstrip().startswith("["):
        return line.split()
    try:
        items = json.loads(line)
    except ValueError as error:
        raise UserError(f"{name} is not JSON: {error}") from error
    if not all(isinstance(item, str | int) for item in items):
        raise UserError(f"{name}: expected items that are text or integers")
    return list(items)


def _chunks(users: Iterator[list[Any]]) -> Iterator[list[list[Any]]]:
    while chunk := list(islice(users, AT_ONCE)):
        yield chunk
