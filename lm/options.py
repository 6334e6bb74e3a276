"""The options of every command."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from data_prep.errors import UserError
from lm import __version__
from lm.config.reference import describe_keys

_OVERRIDES = (
    "Every key of the configuration can be overridden by --section.key=value, for instance"
    " --model.hidden=650. `lm config` lists the keys."
)
_NO_PROGRESS = "hide progress bars (which only a terminal shows)"
_JSON = "print one JSON object"


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line.

    Args:
        arguments: its words; None takes those of the process.

    Returns:
        The options of the command, whose name is `verb`, and the overrides of the configuration as
        they were given.

    Raises:
        UserError: if an argument is missing, unknown or out of range.
    """
    options, overrides = _build_parser().parse_known_args(arguments)
    if overrides and not options.takes_overrides:
        raise UserError(f"unknown option {overrides[0]}")
    return options, overrides


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` for wrong arguments; its help can end with all configuration keys."""

    lists_keys = False

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def format_help(self) -> str:
        return super().format_help() + (f"\n{describe_keys()}\n" if self.lists_keys else "")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lm",
        description="Language models with very large vocabularies: train, evaluate and generate.",
        epilog=_OVERRIDES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sqrtlm {__version__}")
    verbs = parser.add_subparsers(required=True, dest="verb", metavar="COMMAND")
    verb = _add_verb(verbs, "prepare", "corpus → tokenizer → token files → classes", overrides=True)
    verb.lists_keys = True
    verb.add_argument("config", metavar="CONFIG", help="YAML file")
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    text = "train a model (prepares the data first if needed)"
    verb = _add_verb(verbs, "train", text, overrides=True)
    verb.lists_keys = True
    verb.add_argument("config", metavar="CONFIG", help="YAML file")
    verb.add_argument(
        "--resume", metavar="auto|PATH", help="continue the run's last checkpoint, or that one"
    )
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    _add_evaluate(verbs)
    _add_generate(verbs)
    verb = _add_verb(verbs, "classes", "report on the word classes", overrides=True)
    verb.add_argument("source", metavar="RUN|CONFIG")
    verb.add_argument(
        "--words",
        type=_at_least_one,
        default=8,
        help="number of words to show per class (default 8)",
    )
    verb.add_argument("--plot", metavar="FILE", help="also draw the classes, as .png, .svg or .pdf")
    verb.add_argument("--json", action="store_true", help=_JSON)
    verb = _add_verb(verbs, "info", "sizes, cost and memory of a run", overrides=True)
    verb.add_argument("source", metavar="RUN|CONFIG")
    verb.add_argument("--json", action="store_true", help=_JSON)
    verb = _add_verb(verbs, "config", "type, default and meaning of the configuration's keys")
    verb.add_argument("key", metavar="KEY|SECTION", nargs="?", help="default: all keys")
    verb.add_argument(
        "--markdown", metavar="PAGE", help="rewrite the tables of a page, configs/README.md"
    )
    return parser


def _add_evaluate(verbs: Any) -> None:
    verb = _add_verb(verbs, "evaluate", "perplexity of a trained model on a text")
    verb.add_argument("run_dir", metavar="RUN", help="folder of the run")
    text = verb.add_mutually_exclusive_group()
    text.add_argument(
        "--split", default="test", choices=("train", "valid", "test"), help="default: test"
    )
    text.add_argument(
        "--text",
        metavar="FILE|-",
        help="a text file instead of a split of the corpus; its empty lines count too",
    )
    verb.add_argument("--threads", type=_at_least_one, help="CPU threads (default: as in training)")
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    verb.add_argument("--json", action="store_true", help=_JSON)


def _add_generate(verbs: Any) -> None:
    verb = _add_verb(verbs, "generate", "draw text from a trained model")
    verb.add_argument("run_dir", metavar="RUN", help="folder of the run")
    verb.add_argument("--prompt", metavar="TEXT|-", help="text to continue (- reads stdin)")
    verb.add_argument(
        "--tokens",
        type=_at_least_one,
        default=100,
        help="number of tokens to generate (default 100)",
    )
    verb.add_argument(
        "--samples", type=_at_least_one, default=1, help="number of continuations (default 1)"
    )
    verb.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    verb.add_argument("--top-k", type=_at_least_one, help="draw from the K most probable words")
    verb.add_argument("--top-p", type=float, help="draw from the most probable words with mass P")
    verb.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same text (default 1)"
    )
    verb.add_argument("--threads", type=_at_least_one, help="CPU threads (default: as in training)")
    verb.add_argument("--json", action="store_true", help=_JSON)


def _add_verb(verbs: Any, name: str, text: str, *, overrides: bool = False) -> _Parser:
    verb: _Parser = verbs.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        epilog=_OVERRIDES if overrides else None,
        allow_abbrev=False,
    )
    verb.set_defaults(takes_overrides=overrides)
    return verb


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
