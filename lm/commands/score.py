"""`lm score`: log-probabilities of sentences and words."""

import argparse
import logging
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import add_computing, add_run, at_least_one
from lm.run import Run

HELP = "log-probabilities of sentences and words"
_log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    parser.add_argument(
        "text", metavar="FILE|-", nargs="?", help="one sentence per line (default: stdin)"
    )
    for name, default, choices, text in (
        ("level", "sentence", ("summary", "sentence", "word"), "what to print"),
        ("format", "kenlm", ("kenlm", "tsv", "json"), "layout of KenLM's query, TSV or JSON lines"),
        ("unit", "log10", ("log10", "nats", "bits"), "unit of log-probabilities"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", default=default, choices=choices, help=text)
    for name, text in (
        ("stream", "all lines are one text (default: independent sentences)"),
        ("details", "rank of each word, entropy of its distribution"),
        ("ids", "each line begins with an id and a tab or space"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    add_vocabulary_size(parser)
    add_computing(parser)

    def parse(*arguments: Any) -> tuple[argparse.Namespace, list[str]]:
        # Options before FILE make argparse take it for absent, and then for unknown (CPython
        # issue 59317).
        options, rest = type(parser).parse_known_args(parser, *arguments)
        if options.text is None and rest and (rest[0] == "-" or not rest[0].startswith("-")):
            options.text = rest.pop(0)
        return options, rest

    parser.parse_known_args = parse  # type: ignore[method-assign, assignment]


def add_vocabulary_size(parser: argparse.ArgumentParser) -> None:
    """Add the option that spreads the probability of unknown words."""
    parser.add_argument(
        "--vocabulary-size",
        type=at_least_one,
        metavar="V",
        help="spread P(<unk>) over the words missing to V, <eos> counted",
    )


def run(options: argparse.Namespace) -> None:
    """Print the scores, line by line.

    Raises:
        UserError: if options exclude each other, there is no trained model, or a line of the text
            cannot be scored.
    """
    if options.details and (options.format == "kenlm" or options.level != "word"):
        raise UserError("--details requires --level word and --format tsv or json")
    from data_prep.corpus.lines import read_text
    from lm.scoring import Scorer
    from lm.scoring.layouts import Layout

    run = Run.open(options.run_dir, device=options.device, threads=options.threads)
    scorer = Scorer(
        run.model,
        run.tokenizer,
        context=run.description.context,
        vocabulary_size=options.vocabulary_size,
        details=options.details,
    )
    layout = Layout(
        scorer=scorer,
        level=options.level,
        name=options.format,
        unit=options.unit,
        has_ids=options.ids,
    )
    rule = "one stream: all lines are one text" if options.stream else "independent sentences"
    lines = read_text(options.text or "-")
    for number, row in enumerate(layout.rows(lines, stream=options.stream)):
        if number == 0:  # the text can be read
            _log.info(
                "%s, <eos> before the first word; log-probabilities in %s", rule, options.unit
            )
        print(row)
