"""The options of every command."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from data_prep.errors import UserError
from lm import __version__
from lm.commands import generate, rescore, score
from lm.config.reference import describe_keys
from lm.config.schema import MAX_THREADS

_OVERRIDES = (
    "Every key of the configuration can be overridden by --section.key=value, for instance"
    " --model.hidden=650. `lm config` lists the keys."
)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command, whose name is `verb`, and the overrides of the configuration.

    Raises:
        UserError: if an argument is missing, unknown or out of range.
    """
    options, overrides = _build_parser().parse_known_args(arguments)
    if overrides and options.verb not in _TAKES_OVERRIDES:
        raise UserError(f"unknown option {overrides[0]}")
    return options, overrides


def _at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:40]!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _num_threads(text: str) -> int:
    value = _at_least_one(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_THREADS}, got {value}")
    return value


_COUNT = {"type": _at_least_one}
_FLAG = {"action": "store_true"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "config": {"metavar": "CONFIG", "help": "YAML file"},
    "run_dir": {"metavar": "RUN", "help": "folder of the run"},
    "source": {"metavar": "RUN|CONFIG", "help": "folder of a run, or YAML file"},
    "key": {"metavar": "KEY|SECTION", "nargs": "?", "help": "default: all keys"},
    "--resume": {"metavar": "auto|PATH", "help": "continue the last checkpoint or that at PATH"},
    "--split": {"default": "test", "choices": ("train", "valid", "test"), "help": "default: test"},
    "--text": {"metavar": "FILE|-", "help": "text instead of a split; its empty lines count too"},
    "new --text": {"metavar": "FILE", "required": True, "help": "training text, one file"},
    "--valid": {"metavar": "FILE", "help": "validation text (default: taken from the text)"},
    "--test": {"metavar": "FILE", "help": "test text (default: taken from the text)"},
    "--split-by": {"choices": ("lines", "documents"), "help": "documents: between empty lines"},
    "--words": _COUNT | {"default": 8, "help": "number of words to show per class (default 8)"},
    "--plot": {"metavar": "FILE", "help": "also draw the classes, as .png, .svg or .pdf"},
    "--markdown": {"metavar": "PAGE", "help": "rewrite the tables of configs/README.md"},
    "--threads": {"type": _num_threads, "help": "number of CPU threads (default: as in training)"},
    "--no-progress": _FLAG | {"help": "hide progress bars (which only a terminal shows)"},
    "--json": _FLAG | {"help": "print one JSON object"},
}
_VERBS = {
    "new": ("write a recipe for your own text", "config --text --valid --test --split-by"),
    "prepare": ("corpus → tokenizer → token files → classes", "config --no-progress"),
    "train": ("train a model (prepares the data if needed)", "config --resume --no-progress"),
    "evaluate": (
        "perplexity of a trained model on a text",
        "run_dir --split|--text --threads --no-progress --json",
    ),
    "generate": (generate.HELP, ""),
    "score": (score.HELP, ""),
    "rescore": (rescore.HELP, ""),
    "classes": ("report on the word classes", "source --words --plot --json"),
    "info": ("sizes, cost and memory of a run", "source --json"),
    "config": ("type, default and meaning of the configuration's keys", "key --markdown"),
}
"""Verb → what it does, and its options; those joined by a bar exclude each other."""
_TAKES_OVERRIDES = ("prepare", "train", "classes", "info")


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` for wrong arguments; help on training ends with all keys."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def format_help(self) -> str:
        lists_keys = self.prog in ("lm prepare", "lm train")
        return super().format_help() + (f"\n{describe_keys()}\n" if lists_keys else "")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lm",
        description="Language models with very large vocabularies: train, evaluate and generate.",
        epilog=_OVERRIDES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sqrtlm {__version__}")
    verbs = parser.add_subparsers(required=True, dest="verb", metavar="COMMAND")
    for name, (text, options) in _VERBS.items():
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{text.capitalize()}.",
            epilog=_OVERRIDES if name in _TAKES_OVERRIDES else None,
            allow_abbrev=False,
        )
        if name in ("generate", "score", "rescore"):
            {"generate": generate, "score": score, "rescore": rescore}[name].add_options(verb)
        for group in options.split():
            target = verb.add_mutually_exclusive_group() if "|" in group else verb
            for option in group.split("|"):
                target.add_argument(option, **_OPTIONS.get(f"{name} {option}") or _OPTIONS[option])
    return parser
