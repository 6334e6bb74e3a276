"""The command `lm`: verbs → functions. Results on stdout, progress on stderr, one line for a user's
mistake.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from data_prep.errors import UserError
from data_prep.settings import BYTE_ORDER_MARK
from lm import __version__
from lm.config import Config, load_config, load_run_config

_OVERRIDES = (
    "Any key of the configuration can be overridden: --section.key=value,"
    " for instance --model.hidden=650."
)
_NO_PROGRESS = "no progress bars (there are none anyway where stderr is no terminal)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Lightning 2.6 asks torch 2.13 in a way that the latter calls outdated; no user can mend that.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    try:
        options, overrides = _parser().parse_known_args(arguments)
    except UserError as error:
        return _complain(error)
    try:
        options.run(options, overrides)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        return _complain(error)
    except KeyboardInterrupt:
        print("lm: interrupted", file=sys.stderr)
        return 130
    return 0


def _complain(error: Exception) -> int:
    if os.environ.get("LM_TRACEBACK"):
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    print("lm: " + " ".join(text.split()), file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Complains as every other part of the command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lm",
        description="Language models with very large vocabularies: train, evaluate and generate.",
        epilog=_OVERRIDES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sqrtlm {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    verb = _verb(
        verbs, "prepare", _prepare, "corpus → tokenizer → token files → classes", _OVERRIDES
    )
    verb.add_argument("config", metavar="CONFIG", help="YAML file")
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    verb = _verb(
        verbs, "train", _train, "train a model (prepares the data first if needed)", _OVERRIDES
    )
    verb.add_argument("config", metavar="CONFIG", help="YAML file")
    verb.add_argument(
        "--resume", metavar="auto|PATH", help="continue the run's last checkpoint, or that one"
    )
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    verb = _verb(verbs, "evaluate", _evaluate, "perplexity of a trained model on a text")
    verb.add_argument("run_dir", metavar="RUN", help="folder of the run")
    which = verb.add_mutually_exclusive_group()
    which.add_argument(
        "--split", default="test", choices=("train", "valid", "test"), help="default: test"
    )
    which.add_argument(
        "--text",
        metavar="FILE|-",
        help="a text file instead of a split of the corpus; its empty lines count too",
    )
    verb.add_argument("--no-progress", action="store_true", help=_NO_PROGRESS)
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _add_generate(verbs)
    verb = _verb(verbs, "classes", _classes, "report on the word classes", _OVERRIDES)
    verb.add_argument("source", metavar="RUN|CONFIG")
    verb.add_argument(
        "--words", type=_positive, default=8, help="words shown of each class (default 8)"
    )
    verb.add_argument("--plot", metavar="FILE", help="draw the classes too, as .png, .svg or .pdf")
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    verb = _verb(verbs, "info", _info, "sizes, memory, what would be run", _OVERRIDES)
    verb.add_argument("source", metavar="RUN|CONFIG")
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _add_generate(verbs: Any) -> None:
    verb = _verb(
        verbs, "generate", _generate, "text from a trained model, each word drawn class first"
    )
    verb.add_argument("run_dir", metavar="RUN", help="folder of the run")
    verb.add_argument("--prompt", metavar="TEXT|-", help="text to continue (- reads stdin)")
    verb.add_argument(
        "--tokens", type=_positive, default=100, help="tokens to generate (default 100)"
    )
    verb.add_argument("--samples", type=_positive, default=1, help="continuations (default 1)")
    verb.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    verb.add_argument("--top-k", type=_positive, help="draw from the K most probable words")
    verb.add_argument("--top-p", type=float, help="draw from the most probable words with mass P")
    verb.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same text (default 1)"
    )
    verb.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace, list[str]], None],
    text: str,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=epilog, allow_abbrev=False
    )
    verb.set_defaults(run=run)
    return verb


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _prepare(options: argparse.Namespace, overrides: list[str]) -> None:
    _prepared(load_config(options.config, overrides), progress=not options.no_progress)


def _prepared(config: Config, *, keep: bool = False, progress: bool = True) -> Any:
    from data_prep.prepare import prepare

    return prepare(
        config.data,
        config.tokenizer,
        config.classes,
        config.prepared_path,
        keep=keep,
        progress=progress,
    )


def _train(options: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(options.config, overrides)
    from lm.training.loop import (  # takes seconds, which a mistake need not wait for
        check_folder,
        train,
    )

    checkpoint = check_folder(config, options.resume)
    _prepared(config, keep=checkpoint is not None, progress=not options.no_progress)
    folder = train(config, resume=options.resume, progress=not options.no_progress)
    print(folder)


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> None:
    _no_overrides(overrides)
    from lm.evaluation import evaluate_run, evaluate_text
    from lm.report import evaluation_table

    folder, progress = Path(options.run_dir), not options.no_progress
    if options.text is None:
        result, name = evaluate_run(folder, options.split, progress=progress), options.split
    else:
        lines = _text_lines(options.text)
        result, name = evaluate_text(folder, lines, progress=progress), options.text
    print(json.dumps(result.to_dict()) if options.json else evaluation_table(result, name))


def _text_lines(name: str) -> Iterator[str]:
    """Lines of a text file or of stdin, without byte order marks.

    Raises:
        UserError: if the text is not UTF-8.
    """
    try:
        with open(0 if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
            for line in file:
                yield line.removesuffix("\n").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: invalid UTF-8: {error.reason}") from error


def _prompt(given: str | None) -> str:
    """The text to continue, read from stdin if that is asked for.

    Raises:
        UserError: if the text is not UTF-8.
    """
    if given != "-":
        return given or ""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: invalid UTF-8: {error.reason}") from error


def _generate(options: argparse.Namespace, overrides: list[str]) -> None:
    _no_overrides(overrides)
    from lm.generation import generate_text

    prompt = _prompt(options.prompt)
    try:
        texts = generate_text(
            Path(options.run_dir),
            prompt,
            num_tokens=options.tokens,
            num_samples=options.samples,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
        if options.json:
            samples = ["".join(text) for text in texts]
            print(json.dumps({"prompt": prompt, "samples": samples}, ensure_ascii=False))
            return
        for text in texts:
            for piece in chain([prompt], text, ["\n"]):
                print(piece, end="", flush=True)
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"generate: {error}") from error


def _classes(options: argparse.Namespace, overrides: list[str]) -> None:
    from lm.report import classes_json, classes_table, draw_classes, report_classes

    _, prepared = _opened(options.source, overrides)
    report = report_classes(prepared, options.words)
    if options.plot:
        draw_classes(report, prepared, Path(options.plot))
    print(
        json.dumps(classes_json(report, prepared), ensure_ascii=False)
        if options.json
        else classes_table(report, prepared)
    )


def _info(options: argparse.Namespace, overrides: list[str]) -> None:
    from lm.report import describe

    description = describe(*_opened(options.source, overrides))
    print(json.dumps(description) if options.json else _as_lines(description))


def _as_lines(values: dict[str, Any]) -> str:
    width = max(map(len, values))
    return "\n".join(
        f"{key:<{width}}  {value:,}" if type(value) is int else f"{key:<{width}}  {value}"
        for key, value in values.items()
    )


def _opened(source: str, overrides: list[str]) -> tuple[Config, Any]:
    """The configuration of a run or a file, and its prepared data, which must be made by it."""
    from data_prep.prepare import open_made_by
    from lm.report import check_own_classes

    path = Path(source)
    config = load_run_config(path, overrides) if path.is_dir() else load_config(path, overrides)
    prepared = open_made_by(config.data, config.tokenizer, config.classes, config.prepared_path)
    if path.is_dir():
        check_own_classes(path, prepared)
    return config, prepared


def _no_overrides(overrides: list[str]) -> None:
    if overrides:
        raise UserError(f"unknown option {overrides[0]}")


def command() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    command()
