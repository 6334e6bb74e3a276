"""The options of every command."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from data_prep.errors import UserError
from lm import __version__
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
    # Options before TEXT make argparse take it for absent, and then for unknown (CPython #59317).
    lacks_text = options.verb == "score" and options.text is None and overrides
    if lacks_text and (overrides[0] == "-" or not overrides[0].startswith("-")):
        options.text = overrides.pop(0)
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
    "--prompt": {"metavar": "TEXT|-", "help": "text to continue (- reads stdin)"},
    "--prompts": {"metavar": "FILE|-", "help": "texts to continue, one per line"},
    "--tokens": _COUNT | {"default": 100, "help": "number of tokens to generate (default 100)"},
    "--samples": _COUNT | {"default": 1, "help": "number of continuations (default 1)"},
    "--temperature": {"type": float, "help": "0 is greedy (default 1)"},
    "--top-k": _COUNT | {"help": "draw from the TOP_K most probable words"},
    "--top-p": {"type": float, "help": "draw from the most probable words with mass TOP_P"},
    "--min-p": {
        "type": float,
        "help": "draw from words with P of at least MIN_P times the largest",
    },
    "--repetition-penalty": {
        "type": float,
        "metavar": "R",
        "help": "words that occurred before have P^R instead of P, R ≥ 1 (default 1)",
    },
    "--stop": {
        "action": "append",
        "metavar": "TEXT",
        "help": r"end before this text; \n is a line end; may be repeated",
    },
    "--beams": _COUNT
    | {"help": "search for the best text, to the end of the line, with BEAMS beams"},
    "--length-penalty": {
        "type": float,
        "metavar": "A",
        "help": "the best text has the largest log P / length^A (default 1)",
    },
    "--show-classes": _FLAG | {"help": "table of words with P(class) and P(word | class)"},
    "--seed": {"type": int, "help": "seed of the random numbers, 64 bits (default 1)"},
    "text": {"metavar": "FILE|-", "nargs": "?", "help": "one sentence per line (default: stdin)"},
    "--level": {
        "default": "sentence",
        "choices": ("summary", "sentence", "word"),
        "help": "what to print (default: sentence)",
    },
    "--stream": _FLAG | {"help": "all lines are one text (default: independent sentences)"},
    "--format": {
        "default": "kenlm",
        "choices": ("kenlm", "tsv", "json"),
        "help": "layout of KenLM's query, tab-separated, or JSON lines (default: kenlm)",
    },
    "--unit": {
        "default": "log10",
        "choices": ("log10", "nats", "bits"),
        "help": "of log-probabilities (default: log10)",
    },
    "--details": _FLAG | {"help": "rank of each word, entropy of its distribution"},
    "--ids": _FLAG | {"help": "each line begins with an id and a tab or space"},
    "--vocabulary-size": _COUNT
    | {"metavar": "V", "help": "spread P(<unk>) over the words missing to V, <eos> counted"},
    "nbest": {"metavar": "NBEST", "help": "id TAB scores TAB hypothesis, or Kaldi's layout"},
    "--references": {
        "metavar": "FILE",
        "help": "id and words of each utterance, for word error rates",
    },
    "--tune": {
        "nargs": 2,
        "metavar": ("LIST", "REFERENCES"),
        "help": "find the weights on another n-best list",
    },
    "--lm-weight": {"type": float, "help": "of the language model's log-probability"},
    "--insertion-penalty": {"type": float, "help": "subtracted for each word (default 0)"},
    "--first-pass-share": {"type": float, "help": "of the first pass's model (default 0)"},
    "--mixture": {"type": float, "help": "share of RUN in each word's probability (default 0.5)"},
    "--with": {"dest": "second_run", "metavar": "RUN", "help": "second run to interpolate with"},
    "--arpa": {"metavar": "FILE", "help": "ARPA or KenLM model to interpolate with"},
    "--acoustic-costs": {"metavar": "FILE", "help": "of all Kaldi hypotheses: utterance-N cost"},
    "--lm-costs": {"metavar": "FILE", "help": "likewise, of the first pass's language model"},
    "--all": _FLAG | {"help": "print all hypotheses with their scores, best first"},
    "--words": _COUNT | {"default": 8, "help": "number of words to show per class (default 8)"},
    "--plot": {"metavar": "FILE", "help": "also draw the classes, as .png, .svg or .pdf"},
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
    "generate": (
        "draw text from a trained model",
        "run_dir --prompt|--prompts --tokens --samples --temperature --top-k --top-p --min-p"
        " --repetition-penalty --stop --seed --beams --length-penalty --show-classes --threads"
        " --json",
    ),
    "score": (
        "log-probabilities of sentences and words",
        "run_dir text --level --stream --format --unit --details --ids --vocabulary-size --threads",
    ),
    "rescore": (
        "choose from n-best lists of a speech recogniser",
        "run_dir nbest --references --tune --lm-weight --insertion-penalty --first-pass-share"
        " --with|--arpa --mixture --acoustic-costs --lm-costs --vocabulary-size --all --threads"
        " --json",
    ),
    "classes": ("report on the word classes", "source --words --plot --json"),
    "info": ("sizes, cost and memory of a run", "source --json"),
    "config": ("type, default and meaning of the configuration's keys", "key"),
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
        for group in options.split():
            target = verb.add_mutually_exclusive_group() if "|" in group else verb
            for option in group.split("|"):
                target.add_argument(option, **_OPTIONS.get(f"{name} {option}") or _OPTIONS[option])
    return parser
