"""Options that several verbs share: the same name means the same everywhere."""

import argparse

from lm.config.schema import MAX_THREADS

OVERRIDES = (
    "Every key of the configuration can be overridden by --section.key=value, for instance"
    " --model.hidden=650. `lm config` lists the keys."
)


def at_least_one(text: str) -> int:
    """A positive integer; argparse reports anything else."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:40]!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _num_threads(text: str) -> int:
    value = at_least_one(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_THREADS}, got {value}")
    return value


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG and overrides of its keys, which are `options.overrides`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    _add_overrides(parser)


def add_source(parser: argparse.ArgumentParser) -> None:
    """RUN or CONFIG, and overrides."""
    parser.add_argument("source", metavar="RUN|CONFIG", help="folder of a run, or YAML file")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.epilog = OVERRIDES
    parser.set_defaults(overrides=[])


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, the folder of a trained model."""
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")


def add_computing(parser: argparse.ArgumentParser) -> None:
    """Where a model computes: --device and --threads."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda[:N]",
        help="where the model computes; auto is the GPU if the model fits (default: auto)",
    )
    parser.add_argument(
        "--threads", type=_num_threads, help="number of CPU threads (default: as in training)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, for programs that read the result."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_no_progress(parser: argparse.ArgumentParser) -> None:
    """--no-progress."""
    parser.add_argument(
        "--no-progress",
        action="store_true",
        help="hide progress bars (which only a terminal shows)",
    )
