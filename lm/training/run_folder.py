"""The folder of a run: who may write to it, and what it contains before the first step."""

import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import lm
from data_prep.errors import CheckpointError, UserError
from data_prep.meta import check_not_given
from data_prep.storage import write_hashed, write_json_atomically
from lm.config import Config, describe_differences, differences, load_run_config, to_yaml
from lm.config.load import Differences
from lm.device import processor_name
from lm.model.build import check_tree
from lm.model.files import DESCRIPTION
from lm.run import TREE, Run
from lm.training.checkpoint import BEST, LAST
from lm.training.metrics import read_metrics
from lm.training.state import TrainingState

_log = logging.getLogger(__name__)
LOCK = ".lock"
"""File that the one process which trains a run holds a lock on."""
_FREE_ON_RESUME = (
    "log.",
    "name",
    "run_dir",
    "data.dir",
    "data.prepared_dir",
    "train.cuda_graph",
    "train.devices",
    "train.threads",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.skip_nonfinite_steps",
    "train.max_",
    "train.patience",
    "train.val_every_steps",
)
"""Keys, or prefixes of keys, that may differ between a run and its continuation."""


def checkpoint_to_resume(config: Config, resume: str | None) -> Path | None:
    """The checkpoint that a run continues from; None for a new run. `resume` is as in `train`.

    Where `last.ckpt` is missing, `best.ckpt` is the last checkpoint. A UserError says why a run
    cannot start, or continue.
    """
    folder = config.run_path
    written, last = folder / "config.yaml", folder / "checkpoints" / LAST
    if not last.exists() and last.with_name(BEST).exists():
        last = last.with_name(BEST)
    if resume is None and (written.exists() or last.exists()):
        raise UserError(
            f"{folder} already contains a run: continue it with --resume auto, or choose another"
            " --name or --run_dir"
        )
    checkpoint = last if resume in (None, "auto") else Path(resume)
    if checkpoint.exists():
        for each in (written, checkpoint.absolute().parent.parent / "config.yaml"):
            if refused := _differences(each, config, _FREE_ON_RESUME):
                is_other_text = any(key.startswith("data.") for key in refused)
                begin = f", with --init-from {each.parent} from its weights" * is_other_text
                raise UserError(
                    f"{each.parent} was started with another configuration"
                    f" ({describe_differences(refused)}): set these back to continue it, or start a"
                    f" new run in another folder{begin}"
                )
        return checkpoint
    if resume not in (None, "auto"):
        raise CheckpointError(f"--resume {resume}: no such checkpoint")
    # The first model is written before a checkpoint, a later one after it.
    lines = read_metrics(folder / "metrics.csv")
    num_validations = sum(line.valid_perplexity is not None for line in lines)
    is_first = (folder / LOCK).exists() and num_validations < 2
    if (folder / DESCRIPTION).exists() and not is_first:
        problem = "has a model, but no checkpoint that training could continue from"
        raise CheckpointError(f"{folder} {problem}: train in another folder, --run_dir=FOLDER")
    return None


def prepare_run(run: Run, resume: str | None, *, progress: bool = True) -> Run:
    """Prepare the data of a run that can start, or continue with its data as they are.

    Arguments and errors are those of `train`.
    """
    checkpoint = checkpoint_to_resume(run.config, resume)
    if checkpoint is None:
        check_tree(run.config.output)
        check_not_given(run.config.prepared_path)
    return run.prepare(keep=checkpoint is not None, progress=progress)


def report_new_length(state: TrainingState) -> None:
    """Log the learning rates if a run continues with another length than it has written."""
    changes = _differences(state.run.folder / "config.yaml", state.config)
    length = {key: change for key, change in changes.items() if key.startswith("train.max_")}
    group = state.optimizer.param_groups[0]
    before, after = group["lr"] / group["scale"], state.learning_rate
    if length and before != after and not state.is_finished:
        text = "%s: the learning rate was %.3g at step %d, and continues with %.3g"
        _log.info(text, describe_differences(length), before, state.step, after)


def _differences(written: Path, config: Config, free: tuple[str, ...] = ()) -> Differences:
    """The `differences` from the configuration that a run has written, none without a file."""
    return differences(load_run_config(written.parent), config, free) if written.exists() else {}


def write_run_metadata(run: Run) -> None:
    """Write the configuration, tokenizer, classes or the file of the tree, and the environment."""
    text = to_yaml(run.config)
    if run.config.tree_is_file and not run.keeps_tree:
        write_hashed(run.folder / TREE, [Path(run.config.output.tree).read_bytes()])
    run.prepared.copy_to(run.folder, classes=run.config.needed_classes is not None)
    write_hashed(run.folder / "config.yaml", [text.encode()])
    write_json_atomically(run.folder / "env.json", describe_environment())


def describe_environment() -> dict[str, str | int | None]:
    """Versions of the libraries, processor, threads and GPU, as written to `env.json`."""
    return {
        "sqrtlm": lm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
