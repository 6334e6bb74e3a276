"""Options that several verbs share: the same name means the same everywhere."""

import argparse
from functools import partial
from typing import Any

from lm.config.schema import MAX_THREADS

Options = dict[str, dict[str, Any]]
"""Name of an option → arguments of `ArgumentParser.add_argument`."""
OVERRIDES = (
    "Every key of the configuration can be overridden by --section.key=value, for instance"
    " --model.hidden=650. `lm config` lists the keys."
)


def at_least_one(text: str, limit: int | None = None) -> int:
    """A positive integer, at most `limit`; argparse reports anything else."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:40]!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    if limit is not None and value > limit:
        raise argparse.ArgumentTypeError(f"must be at most {limit}, got {value}")
    return value


COUNT, NUMBER, FILE = {"type": at_least_one}, {"type": float}, {"metavar": "FILE"}
SWITCH = {"action": "store_true"}

SOURCE: Options = {"source": {"metavar": "CONFIG|RUN", "help": "YAML file, or folder of a run"}}
"""Its verbs also take overrides of the configuration, which are `options.overrides`."""
RUN: Options = {"run_dir": {"metavar": "RUN", "help": "folder of the run"}}
COMPUTING: Options = {
    "--device": {
        "default": "auto",
        "metavar": "auto|cpu|cuda[:N]",
        "help": "where the model computes; auto is the GPU if the model fits (default: auto)",
    },
    "--threads": {
        "type": partial(at_least_one, limit=MAX_THREADS),
        "help": "number of CPU threads (default: as in training)",
    },
}
VOCABULARY_SIZE: Options = {
    "--vocabulary-size": COUNT
    | {"metavar": "V", "help": "spread P(<unk>) over the words missing to V, <eos> counted"}
}
OPEN_VOCABULARY: Options = {
    "--open-vocabulary": SWITCH | {"help": "spell unknown words, so that each has a probability"}
}
BY_LINE: Options = {
    "--line-buffered": SWITCH
    | {"help": "answer each line before the next is read, for a program that waits for it"}
}
EXCLUDE: Options = {
    "--exclude": {
        "choices": ("nothing", "seen"),
        "default": "nothing",
        "help": "seen: leave out the items that a user has had (default: nothing)",
    }
}
JSON: Options = {"--json": SWITCH | {"help": "print one JSON object"}}
NO_PROGRESS: Options = {
    "--no-progress": SWITCH | {"help": "hide progress bars (which only a terminal shows)"}
}
