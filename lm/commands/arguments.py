"""Options that several verbs share: the same name means the same everywhere."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.errors import CheckpointError
from lm.config.schema import MAX_THREADS
from lm.run import TrainedRun

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
TEXT_FIELD = {
    "metavar": "NAME",
    "help": "column of JSON, CSV or parquet (default: text, or the only one of sentences)",
}

SOURCE: Options = {"source": {"metavar": "CONFIG|RUN", "help": "YAML file, or folder of a run"}}
"""Its verbs also take overrides of the configuration, which are `options.overrides`."""
RUN: Options = {
    "run_dir": {"metavar": "RUN", "help": "folder of the run"},
    "--checkpoint": {
        "metavar": "last|best|FILE",
        "help": "weights of a checkpoint of RUN (default: those of model.safetensors)",
    },
}
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
ADAPTATION: Options = {
    "--cache": SWITCH | {"help": "add a cache of the text's words, tuned on the validation split"},
    "--dynamic": SWITCH
    | {"help": "learn from the text while it is read (dynamic evaluation), tuned likewise"},
}
NGRAM: Options = {"--ngram": SWITCH | {"help": "mix with the n-gram model of RUN, by lm ngram"}}
BY_LINE: Options = {
    "--line-buffered": SWITCH
    | {"help": "answer each line before the next is read, for a program that waits for it"}
}
EXCLUDE: Options = {
    "--exclude": {
        "choices": ("nothing", "seen"),
        "help": "seen: leave out the items that a user has had (default: seen where less than 1 %%"
        " of the events of training repeat one)",
    }
}
JSON: Options = {"--json": SWITCH | {"help": "print one JSON object"}}
NO_PROGRESS: Options = {
    "--no-progress": SWITCH | {"help": "hide progress bars (which only a terminal shows)"}
}


def open_run(options: argparse.Namespace) -> TrainedRun:
    """Open the run of `RUN` and `COMPUTING`; CheckpointError if its checkpoint does not fit."""
    run = TrainedRun.open(options.run_dir, device=options.device, threads=options.threads)
    if options.checkpoint is None:
        return run
    from lm.training.batches import make_batches
    from lm.training.checkpoint import load_checkpoint

    path = Path(options.checkpoint)
    if options.checkpoint in ("last", "best"):
        path = run.folder / "checkpoints" / f"{path}.ckpt"
    saved = load_checkpoint(path)
    if saved["text_sha256"] != run.prepared.splits["train"].sha256:
        raise CheckpointError(
            f"{path}: the checkpoint is not of {run.folder}: it read another text"
        )
    step = make_batches(run.config, run.prepared).steps(saved["progress"]["batches_done"])
    return run.with_weights(saved["model"], step, path)
