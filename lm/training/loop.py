"""Training a run from a configuration: data, model, optimizer, Lightning's Trainer, and the run's
folder.
"""

import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

import lm
from data_prep.errors import UserError
from data_prep.prepare import open_made_by
from data_prep.prepared import TOKENIZER, Prepared, copy_tokenizer
from data_prep.storage import locked, sha256_file, write_atomically, write_json_atomically
from lm.config import Config, differences, has_sparse_table, load_config, to_yaml
from lm.evaluation import TextCounts
from lm.model.build_tree import build_tree
from lm.model.language_model import build_model
from lm.report import draw_curves
from lm.training.batches import Batches, BatchLoader
from lm.training.callbacks import (
    Observer,
    ProgressBar,
    RunKeeper,
    ValidationText,
    Vocabulary,
    WandbLog,
)
from lm.training.checkpoint import AtomicCheckpointIO, batches_done
from lm.training.environment import processor_name
from lm.training.memory_estimate import check_memory
from lm.training.state import TrainingModule

_log = logging.getLogger(__name__)
_FREE_ON_RESUME = (
    "log.",
    "name",
    "run_dir",
    "data.dir",
    "data.prepared_dir",
    "train.devices",
    "train.threads",
    "train.checkpoint_every_steps",
    "train.max_",
)
"""Keys, or beginnings of keys, that may differ between a run and its continuation."""
LOCK = ".lock"
"""Of a run's folder: one process trains a run."""


def train(
    config: Config,
    *,
    resume: str | None = None,
    progress: bool = True,
    observers: Iterable[Observer] = (),
) -> Path:
    """Train the run of `config` on its prepared data.

    Args:
        config: of the run.
        resume: "auto" continues the run's last checkpoint, or starts if there is none; a path
            continues that one; None starts a new run in an empty folder.
        progress: whether to show a progress bar.
        observers: are told how it goes; an exception of theirs ends it.

    Returns:
        The run's folder.

    Raises:
        UserError: if the folder holds a run already, the continuation does not fit it, the memory
            does not suffice, or the loss is not finite.
        Interrupted: if a signal ended it; the checkpoint is written.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    folder = config.run_path
    prepared = open_made_by(config.data, config.tokenizer, config.classes, config.prepared_path)
    observers = [Inputs(config, prepared), *observers]
    if progress:
        observers.append(ProgressBar())
    if config.log.wandb != "disabled":
        observers.append(WandbLog(config))
    keeper = RunKeeper(config, _validation_text(prepared), _vocabulary(prepared), observers)
    trainer = _build_trainer(config, keeper)
    checkpoint = check_folder(config, resume) if trainer.is_global_zero or resume else None
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    module = _build_module(config, prepared, trainer, weights=checkpoint is None)
    if checkpoint is not None and batches_done(checkpoint) >= module.total_batches:
        if checkpoint.resolve().parent.parent != folder.resolve():
            raise UserError(f"{checkpoint} is of the last step: there is nothing to go on with")
        _log.info("%s is complete already", folder)
    else:
        if checkpoint is not None:
            _check_tokenizer(folder, prepared)
        trainer.fit_loop.epoch_loop.max_steps = module.total_steps
        loader = BatchLoader(module.batches, lambda: module.progress.batches_done)
        alone = _alone(config, resume, checkpoint) if trainer.is_global_zero else nullcontext()
        with alone, keeper.listening(), _matmul_precision(config.train.matmul_precision):
            trainer.fit(module, loader, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        draw_curves(folder, config.name)
    return folder


@contextmanager
def _alone(config: Config, resume: str | None, checkpoint: Path | None) -> Iterator[None]:
    """Keep other processes from training this run meanwhile.

    Raises:
        UserError: if one does, or did since `checkpoint` was found.
    """
    folder = config.run_path
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"{folder}: another process trains this run"
    with locked(folder / LOCK, busy=busy):
        if check_folder(config, resume) != checkpoint:
            raise UserError(busy)
        yield


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Multiply fp32 matrices so, for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _build_module(
    config: Config, prepared: Prepared, trainer: pl.Trainer, *, weights: bool
) -> TrainingModule:
    """The model, its parameters of the type they are trained in, and its batches; freshly
    initialised by `seed`, or without `weights`, which a checkpoint will bring.
    """
    torch.manual_seed(config.seed)
    tree = build_tree(config, prepared)
    check_memory(config, tree)
    counts = torch.tensor(prepared.counts()) if config.model.input_backoff else None
    device = nullcontext() if weights else torch.device("meta")
    with trainer.precision_plugin.module_init_context(), device:
        model = build_model(
            config.model,
            config.output,
            tree,
            config.train.seq_len,
            counts=counts,
            sparse=has_sparse_table(config, tree.num_rows),
        )
    if trainer.global_rank:  # the same weights, but noise of its own
        torch.manual_seed(config.seed + trainer.global_rank)
    batches = Batches(
        prepared.tokens("train"),
        eos_id=prepared.eos_id,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        shuffle=not model.backbone.carries_state,
        seed=config.seed,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
    )
    steps = _total_steps(config, batches)
    return TrainingModule(config, model, batches, steps, prepared.splits["train"].sha256)


def _build_trainer(config: Config, keeper: RunKeeper) -> pl.Trainer:
    train = config.train
    accelerator, devices = _devices(config)
    strategy: str | Strategy = train.strategy
    if strategy == "ddp" or devices > 1:
        strategy = DDPStrategy(
            broadcast_buffers=False,  # the tree never changes
            find_unused_parameters=config.output.tree == "adaptive",  # clusters without a target
        )
    return pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=train.precision,
        max_epochs=-1,  # to Lightning, the whole training is one endless pass
        accumulate_grad_batches=train.accumulate,
        gradient_clip_val=config.optim.clip or None,
        callbacks=[keeper],
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def _devices(config: Config) -> tuple[str, int]:
    """What Lightning calls the accelerator, and how many of them; Apple's is none, as it has no
    fp64 to sum in.

    Raises:
        UserError: if there are not so many, or they are none for the settings.
    """
    train, found = config.train, torch.cuda.device_count()
    on_cpu = train.accelerator == "cpu" or (train.accelerator == "auto" and found == 0)
    devices = train.devices if train.devices != "auto" else 1 if on_cpu else found
    if on_cpu and train.precision == "16-mixed":
        raise UserError("train.precision: 16-mixed wants a GPU; on a CPU it is bf16-mixed")
    if on_cpu and config.output.backend == "triton":
        raise UserError("output.backend: triton wants a GPU")
    if not on_cpu and not 0 < devices <= found:
        raise UserError(
            f"train.accelerator: {train.accelerator}, train.devices: {train.devices}: there are"
            f" {found} CUDA devices"
        )
    return "cpu" if on_cpu else "cuda", devices


def check_folder(config: Config, resume: str | None) -> Path | None:
    """The checkpoint to continue from, or None for a new run, whose folder must not hold one yet.

    Raises:
        UserError: if the folder is occupied, or the continuation is of another configuration.
    """
    folder = config.run_path
    written, last = folder / "config.yaml", folder / "checkpoints" / "last.ckpt"
    if resume is None:
        if written.exists() or last.exists():
            raise UserError(
                f"{folder} holds a run already: continue it with --resume auto, or choose another"
                " --name or --run_dir"
            )
        return None
    checkpoint = last if resume == "auto" else Path(resume)
    if not checkpoint.exists():
        if resume != "auto":
            raise UserError(f"--resume {resume}: no such checkpoint")
        return None
    if resume != "auto" and not written.exists():
        written = checkpoint.parent.parent / "config.yaml"
    if written.exists():
        changed = differences(load_config(written), config)
        changed = {
            key: pair for key, pair in changed.items() if not key.startswith(_FREE_ON_RESUME)
        }
        if changed:
            what = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in changed.items())
            raise UserError(f"{written.parent} was started with another configuration ({what})")
    return checkpoint


def _total_steps(config: Config, batches: Batches) -> int:
    """Optimizer steps until the first of the two limits.

    Raises:
        UserError: if the limits leave no step.
    """
    limits = []
    if config.train.max_epochs is not None:
        limits.append(config.train.max_epochs * batches.per_epoch // config.train.accumulate)
    if config.train.max_steps is not None:
        limits.append(config.train.max_steps)
    if min(limits) == 0:
        raise UserError(
            f"train.max_epochs = {config.train.max_epochs} has fewer batches than"
            f" train.accumulate = {config.train.accumulate}"
        )
    return min(limits)


def _validation_text(prepared: Prepared) -> ValidationText | None:
    if "valid" not in prepared.splits:
        return None
    return ValidationText(
        tokens=prepared.tokens("valid"), counts=TextCounts.of(prepared.splits["valid"])
    )


def _vocabulary(prepared: Prepared) -> Vocabulary:
    return Vocabulary(
        eos_id=prepared.eos_id,
        unk_id=prepared.unk_id,
        tokenizer_sha256=prepared.tokenizer_sha256,
    )


def _check_tokenizer(folder: Path, prepared: Prepared) -> None:
    """Refuse data that were prepared again, with another vocabulary.

    Raises:
        UserError: if they were.
    """
    path = folder / TOKENIZER
    if path.exists() and sha256_file(path) != prepared.tokenizer_sha256:
        raise UserError(
            f"{prepared.folder} was prepared again, with another tokenizer than that of {folder}"
        )


class Inputs(Observer):
    """Puts into the run's folder what is known before the first step, once a continuation is sure
    of its checkpoint.
    """

    def __init__(self, config: Config, prepared: Prepared) -> None:
        self.config, self.prepared = config, prepared

    def start(self, module: TrainingModule) -> None:
        """Write it."""
        _write_inputs(self.config, self.prepared)


def _write_inputs(config: Config, prepared: Prepared) -> None:
    """Everything in the run's folder that is known before the first step."""
    folder = config.run_path
    write_atomically(folder / "config.yaml", lambda file: file.write(to_yaml(config).encode()))
    copy_tokenizer(prepared, folder)
    write_atomically(folder / "classes.npy", lambda file: np.save(file, prepared.word_class()))
    environment = {
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
    write_json_atomically(folder / "env.json", environment)
