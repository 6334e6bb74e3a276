"""The command `lm`: verbs → functions. Results on stdout, progress on stderr."""

import codecs
import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import UserError
from lm.config import load_config, load_run_config
from lm.config.reference import describe_keys
from lm.openmp import limit_spinning
from lm.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process.

    Returns:
        The exit code: 0; 2 after a user's mistake, which is one line on stderr; 130 after Ctrl-C;
        141 if the reader of stdout has closed it.
    """
    limit_spinning()  # before torch is imported
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for package, level in (("lm", "INFO"), ("data_prep", "INFO"), ("matplotlib", "ERROR")):
        logging.getLogger(package).setLevel(level)
    # Lightning 2.6 calls a function that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.")
    try:
        try:
            options, overrides = parse(arguments)
            _FUNCTIONS[options.verb](options, overrides)
        finally:
            _flush()
    except BrokenPipeError:
        return 141
    except (UserError, OSError) as error:
        if os.environ.get("LM_TRACEBACK"):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print("lm: " + " ".join(text.split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lm: interrupted", file=sys.stderr)
        return 130
    return 0


def command() -> None:
    r"""Run the command line of the process: the console script.

    Characters that stdout's encoding lacks are written as JSON writes them, for instance `\u00e9`.
    Closed standard streams are empty, or discard what is written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    codecs.register_error("json", _escape)
    sys.stdout.reconfigure(errors="json")  # type: ignore[union-attr]
    sys.exit(main())


def _flush() -> None:
    """Write what was printed; `UserError` if stdout does not take it, for instance a full disk."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"stdout cannot be written: {error.strerror}") from error


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _new(options: Namespace, _: list[str]) -> None:
    from lm.recipe import new_recipe

    valid, test = (Path(name) if name else None for name in (options.valid, options.test))
    unit = options.split_by
    print(new_recipe(Path(options.config), Path(options.text), valid=valid, test=test, unit=unit))


def _prepare(options: Namespace, overrides: list[str]) -> None:
    from data_prep.prepare import prepare

    config = load_config(options.config, overrides)
    prepare(*config.preparation, progress=not options.no_progress)


def _train(options: Namespace, overrides: list[str]) -> None:
    config = load_config(options.config, overrides)
    # Imported after the configuration is known to be valid: torch takes seconds.
    from data_prep.prepare import prepare
    from lm.training.loggers import check_wandb
    from lm.training.loop import train
    from lm.training.run_folder import check_folder

    check_wandb(config)
    checkpoint = check_folder(config, options.resume)
    progress = not options.no_progress
    prepare(*config.preparation, keep=checkpoint is not None, progress=progress)
    print(train(config, resume=options.resume, progress=progress))


def _evaluate(options: Namespace, _: list[str]) -> None:
    from data_prep.corpus.lines import read_text
    from lm.evaluation import evaluate_run, evaluate_text
    from lm.report import evaluation_table

    folder, progress = Path(options.run_dir), not options.no_progress
    _set_threads(folder, options.threads)
    if options.text is None:
        result = evaluate_run(folder, options.split, progress=progress)
    else:
        result = evaluate_text(folder, read_text(options.text), progress=progress)
    title = options.text or options.split
    print(json.dumps(result.to_dict()) if options.json else evaluation_table(result, title))


def _set_threads(folder: Path, num_threads: int | None) -> None:
    """Set torch's CPU threads: as given, or as the run in `folder` was trained with."""
    import torch

    if num_threads is None and (folder / "config.yaml").exists():
        num_threads = load_run_config(folder).train.threads
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _generate(options: Namespace, _: list[str]) -> None:
    from lm.generation.command import run

    _set_threads(Path(options.run_dir), options.threads)
    for piece in run(options):
        print(piece, end="", flush=True)


def _score(options: Namespace, _: list[str]) -> None:
    from lm.scoring.command import run

    _set_threads(Path(options.run_dir), options.threads)
    for row in run(options):
        print(row)


def _rescore(options: Namespace, _: list[str]) -> None:
    from lm.rescoring.command import run

    _set_threads(Path(options.run_dir), options.threads)
    for row in run(options):
        print(row)


def _classes(options: Namespace, overrides: list[str]) -> None:
    from lm.report import classes_json, classes_table, draw_classes, open_source, report_classes

    config, prepared = open_source(options.source, overrides)
    report = report_classes(config, prepared, num_top_words=options.words)
    if options.plot:
        draw_classes(report, prepared, Path(options.plot))
    if options.json:
        print(json.dumps(classes_json(report, prepared), ensure_ascii=False))
    else:
        print(classes_table(report, prepared))


def _info(options: Namespace, overrides: list[str]) -> None:
    from lm.report import describe, info_table, open_source

    values = describe(*open_source(options.source, overrides))
    print(json.dumps(values) if options.json else info_table(values))


def _config(options: Namespace, _: list[str]) -> None:
    print(describe_keys(options.key))


_FUNCTIONS = {
    "new": _new,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
    "score": _score,
    "rescore": _rescore,
    "classes": _classes,
    "info": _info,
    "config": _config,
}

if __name__ == "__main__":
    command()
