"""The command `lm`: verbs → functions. Results on stdout, progress on stderr."""

import argparse
import codecs
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from data_prep.errors import OutOfMemoryError, StorageError, UserError
from lm import __version__
from lm.commands import (
    classes,
    config,
    evaluate,
    export,
    extend,
    generate,
    info,
    new,
    ngram,
    prepare,
    recommend,
    report,
    rescore,
    score,
    train,
)
from lm.commands.arguments import OVERRIDES, SOURCE
from lm.config.load import nearest
from lm.config.reference import describe_usual_keys

_VERBS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(new, prepare, train, evaluate, generate, recommend, extend),
        *(score, rescore, ngram, classes, info, report, export, config),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb, by default that of the process's command line.

    Returns:
        The exit code: 0; that of a `UserError`, which is one line on stderr; 6 and 7 where the
        system refuses a file or memory; 141 if the reader of stdout has closed it.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    ours = "WARNING" if _is_further_process() else "INFO"
    for package, level in (("lm", ours), ("data_prep", ours), ("matplotlib", "ERROR")):
        logging.getLogger(package).setLevel(level)
    # Lightning 2.6 calls a function that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    try:
        try:
            options = _parse(arguments)
            _VERBS[options.verb].run(options)
        finally:
            _flush()
    except BrokenPipeError:
        return 141
    except (UserError, OSError, MemoryError, RuntimeError, ModuleNotFoundError) as error:
        text, code = _described(error)
        if code is None or os.environ.get("LM_TRACEBACK"):
            raise
        print("lm: " + " ".join(text.splitlines()), file=sys.stderr)
        return code
    return 0


def _described(error: Exception) -> tuple[str, int | None]:
    """The message of an error and its exit code; None for a mistake of the program."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        is_ours = (error.name or "lm").partition(".")[0] in ("lm", "data_prep")
        return f"this requires the package {error.name}", None if is_ours else UserError.exit_code
    if isinstance(error, OSError):
        reason = error.strerror or text
        return f"{error.filename}: {reason}" if error.filename else reason, StorageError.exit_code
    is_short = isinstance(error, MemoryError) or re.search("allocate memory|out of memory", text)
    return f"out of memory: {text}", OutOfMemoryError.exit_code if is_short else None


def run_process() -> int:
    r"""Run the command line of the process; returns the exit code.

    Characters that stdout's encoding lacks are written as JSON writes them, for instance `\u00e9`.
    Closed standard streams are empty, or discard what is written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    codecs.register_error("json", _escape)
    stdout: Any = sys.stdout
    if isinstance(stdout.buffer, io.FileIO):  # under `python -u`
        # What a full disk refuses stays in the buffer, so that `_flush` reports it.
        buffer = io.BufferedWriter(stdout.detach())
        sys.stdout = stdout = io.TextIOWrapper(buffer, stdout.encoding, line_buffering=True)
    stdout.reconfigure(errors="json")
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    if code and "torch" in sys.modules:
        from torch import distributed

        # Threads of gloo may still wait for lost processes. One that asks for the interpreter
        # while it is finalized ends the process with SIGABRT.
        if distributed.is_available() and distributed.is_initialized():
            os._exit(code)  # `main` has written what was printed
    return code


def _is_further_process() -> bool:
    """Whether this process has another rank than 0, which reports, of torchrun, SLURM or Fabric."""
    ranks = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return any(rank not in ("", "0") for rank in ranks)


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` for wrong arguments; help on training ends with the usual keys."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own ignores a full disk.
        print(message, end="", file=file or sys.stderr)

    def format_help(self) -> str:
        lists_keys = self.prog in ("lm prepare", "lm train")
        return super().format_help() + (f"\n{describe_usual_keys()}\n" if lists_keys else "")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a verb; `verb` is its name, `overrides` those of the configuration, if any."""
    parser = _Parser(
        prog="lm",
        description="Language models with very large vocabularies: train, evaluate and generate.",
        epilog=OVERRIDES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sqrtlm {__version__}")
    verbs = parser.add_subparsers(required=True, dest="verb", metavar="COMMAND")
    for name, module in _VERBS.items():
        description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
        epilog = OVERRIDES if module.OPTIONS.get("source") is SOURCE["source"] else None
        verb = verbs.add_parser(
            name, help=module.HELP, description=description, epilog=epilog, allow_abbrev=False
        )
        exclusive = getattr(module, "EXCLUSIVE", ())
        group = verb.add_mutually_exclusive_group() if exclusive else verb
        for option, settings in module.OPTIONS.items():
            (group if option in exclusive else verb).add_argument(option, **settings)
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and not given[0].startswith("-") and given[0] not in _VERBS:
        hint = _similar(given[0], _VERBS) or f": the commands are {', '.join(_VERBS)}"
        raise UserError(f"unknown command {given[0]}{hint}")
    options, rest = parser.parse_known_args(given)
    # Options before an optional FILE make argparse take it for absent, and then for unknown
    # (CPython issue 59317).
    if getattr(options, "file", "") is None and rest and not re.match("-.", rest[0]):
        options.file = rest.pop(0)
    known = _VERBS[options.verb].OPTIONS
    if "source" in options:
        options.overrides = _overrides(rest, known, options.verb)
    elif rest:
        what = "option" if rest[0].startswith("-") else "argument"
        is_key = re.match(r"--\w+\.\w", rest[0])
        hint = ": keys are set in the recipe, or by lm prepare and lm train" if is_key else ""
        raise UserError(f"unknown {what} {rest[0]}{_similar(rest[0], known, options.verb) or hint}")
    return options


def _similar(option: str, known: Collection[str], verb: str = "") -> str:
    """A hint at a known option that is much like an unknown one; empty if none is."""
    return nearest(option.partition("=")[0], known, cutoff=0.75, command=verb)


def _overrides(rest: list[str], known: Collection[str], verb: str) -> list[str]:
    """The overrides of the configuration; `UserError` for `--key value` and for other options."""
    for option, after in pairwise([*rest, "VALUE"]):
        name, _, value = option.partition("=")
        if hint := _similar(name, known, verb):
            raise UserError(f"unknown option {name}{hint}")
        key = {"--device": "--train.accelerator", "--threads": "--train.threads"}.get(name, name)
        if key != name or (name == option and name[2:] and name.startswith("--")):
            raise UserError(f"{option}: write {key}={value or after}")
    return rest


def _flush() -> None:
    """Write what was printed; `UserError` if stdout does not take it, for instance a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageError(f"stdout cannot be written: {error.strerror}") from error


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
