"""Runs: `Run` is what a training run is computed from, `TrainedRun` what it results in.

Each part is read, verified and computed once, when it is first used, and never replaced. A part
that cannot be had raises a `UserError` that names the file. This module imports torch only where a
part requires it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.errors import CheckpointError, DataError, UserError
from data_prep.storage import sha256_file
from data_prep.tokenizer.serialization import TOKENIZER, load_tokenizer
from data_prep.tokenizer.speller import SPELLER, Speller
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.config import Config, WordTable, load_config, load_run_config, resolve_word_table

if TYPE_CHECKING:
    import torch

    from data_prep.prepared import Prepared
    from lm.model.files import Description
    from lm.model.language_model import LanguageModel
    from lm.output import ClassTree

TREE = "tree.txt"
"""Copy of the file of the tree in the folder of a run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Run:
    """What a training run is computed from: its configuration, and what follows from that."""

    config: Config

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = ()) -> "Run":
        """Read a configuration: a YAML file, or the folder of a run, with overrides."""
        is_folder = Path(source).is_dir()
        return cls((load_run_config if is_folder else load_config)(Path(source), overrides))

    @classmethod
    def of(cls, config: Config, **parts: Any) -> "Run":
        """A run with parts that the caller has already: `prepared`, `tree`, `input_tree`."""
        run = cls(config)
        vars(run).update(parts)  # where cached properties are found
        return run

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.config.run_path

    def prepare(self, *, keep: bool = False, progress: bool = True) -> "Run":
        """Prepare the data; returns the run that has them open.

        Arguments are those of `data_prep.prepare`. Other runs next to this one are looked at for
        the same data.
        """
        from data_prep.prepare import prepare

        others = sorted(self.folder.absolute().parent.glob("*/data"))
        preparation = self.config.preparation
        prepared = prepare(*preparation, keep=keep, progress=progress, others=others)
        return Run.of(self.config, prepared=prepared)

    @cached_property
    def prepared(self) -> "Prepared":
        """The prepared data."""
        from data_prep.prepared import open_made_by

        return open_made_by(*self.config.preparation)

    def check_classes(self) -> None:
        """Check that the folder of the run has the classes of the prepared data, if it has any.

        Raises:
            DataError: if the classes were made again, or their file is damaged.
        """
        path = self.folder / "classes.npy"
        if self.config.needed_classes is None or not path.exists():
            return
        try:
            levels = np.load(path)
        except (ValueError, EOFError, SyntaxError, TokenError) as error:  # the header is Python
            raise DataError(f"{path} is damaged, or not an array of numbers") from error
        if not np.array_equal(levels, self.prepared.class_levels().ravel()):
            problem = f"was prepared again: its classes are not those of {path}"
            raise DataError(f"{self.prepared.folder} {problem}")

    @cached_property
    def tree(self) -> "ClassTree | None":
        """The tree of softmaxes over the words of the prepared data; None for `adaptive`."""
        from lm.model.build import build_tree

        config = self.config
        if self.keeps_tree:
            config = replace(config, output=replace(config.output, tree=str(self.folder / TREE)))
        return build_tree(config, self.prepared)

    @property
    def keeps_tree(self) -> bool:
        """Whether the folder has the tree of a run that has begun, from a file."""
        folder, started = self.folder, self.folder / "config.yaml"
        if not (self.config.tree_is_file and (folder / TREE).exists() and started.exists()):
            return False
        has_begun = (folder / "model.json").exists() or any(folder.glob("checkpoints/*.ckpt"))
        return has_begun and load_run_config(folder).output.tree == self.config.output.tree

    @cached_property
    def input_tree(self) -> "ClassTree | None":
        """The tree whose paths input vectors sum, if it is not `tree`."""
        from lm.model.build import build_input_tree

        return build_input_tree(self.prepared) if self.config.has_input_tree else None

    @cached_property
    def pieces(self) -> "torch.Tensor | None":
        """The pieces of each word, if input vectors have theirs in addition; else None."""
        from lm.model.input_pieces import pieces_of_words

        return pieces_of_words(self.config, self.prepared)

    @cached_property
    def word_table(self) -> WordTable:
        """The section `word_table`, resolved for this tree and the devices."""
        num_rows = self.prepared.vocab_size if self.tree is None else self.tree.num_rows
        return resolve_word_table(self.config, num_rows, self.world_size, on_gpu=self.on_gpu)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether it trains on GPUs here.

        Apple's accelerator is never used: it lacks the fp64 that losses are summed in.
        """
        import torch

        return self.config.train.accelerator != "cpu" and torch.cuda.is_available()

    @cached_property
    def num_devices(self) -> int:
        """The number of devices that it trains on here.

        With torchrun or SLURM it is that of the processes which they have started on this machine.

        Raises:
            UserError: if `train.devices` is another number.
        """
        import torch

        from lm.device import launch

        devices, found = self.config.train.devices, launch()
        if found is None:
            if devices == "auto":
                return torch.cuda.device_count() if self.on_gpu else 1
            return devices or 1
        if devices not in (None, "auto", found.per_machine):
            if found.rank:  # the first process reports
                raise SystemExit(2)
            raise UserError(
                f"train.devices: {devices}, but {found.launcher} started {found.per_machine} on"
                " each machine: omit train.devices, or set it to auto"
            )
        return found.per_machine

    @property
    def world_size(self) -> int:
        """The number of devices that it trains on, on all machines."""
        from lm.device import launch

        found = launch()
        return self.num_devices * (1 if found is None else found.machines)

    @cached_property
    def available_bytes(self) -> int | None:
        """Memory that it can have on a device that it trains on; None where it is unknown."""
        import torch

        from lm.device import available_bytes

        return available_bytes(torch.device("cuda:0" if self.on_gpu else "cpu"))

    @cached_property
    def model_without_weights(self) -> "LanguageModel":
        """The model to be trained, with meta tensors as parameters: for its sizes."""
        import torch

        from data_prep.tokenizer.pieces import MAX_PIECES
        from lm.model.build import build_model, without_weights

        config, tree, input_tree = self.config, self.tree, self.input_tree
        sections = config.model, config.output, self.word_table, tree, config.train.seq_len
        counts = torch.tensor(self.prepared.counts()) if tree is None else None
        num_words = self.prepared.vocab_size if tree is None else tree.vocab_size
        with without_weights():
            pieces = torch.empty(num_words, MAX_PIECES, dtype=torch.int32)
            return build_model(*sections, input_tree=input_tree, pieces=pieces, counts=counts)

    def changed(self, config: Config) -> "Run":
        """A run of the same data and trees by another configuration."""
        known = vars(self).keys() & {"prepared", "tree", "input_tree"}
        return Run.of(config, **{name: vars(self)[name] for name in known})


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """What a training run results in: a folder with a model and its tokenizer.

    Attributes:
        folder: folder of the run.
        device_name: `auto`, `cpu` or `cuda[:N]`, see `lm.device.choose_device`.
        checkpoint: the file that has the weights, if it is not `model.safetensors`.
    """

    folder: Path
    device_name: str = "auto"
    checkpoint: Path | None = None

    @classmethod
    def open(
        cls, folder: str | Path, *, device: str = "auto", threads: int | None = None
    ) -> "TrainedRun":
        """Open the folder of a trained model, and set the CPU threads of the process.

        Args:
            folder: folder of the run.
            device: `auto`, `cpu` or `cuda[:N]`; auto is the GPU if there is one where the model
                fits, else the CPU.
            threads: number of CPU threads, of the whole process; None: as the run was trained with.

        Raises:
            UserError: if there is no trained model, or no such device.
        """
        from lm.device import set_num_threads

        run = cls(Path(folder), device)
        if threads is None and run.has_config:
            threads = run.config.train.threads
        set_num_threads(threads)
        return run

    def with_weights(self, state: "dict[str, torch.Tensor]", step: int, file: Path) -> "TrainedRun":
        """The run with other weights, of a step, from a file."""
        from lm.model.files import load_model

        run = replace(self, checkpoint=file)
        description = replace(self.description, step=step, valid_perplexity=None, valid_ndcg=None)
        try:
            model, _ = load_model(self.folder, description, state)
        except UserError as error:
            raise type(error)(f"{file}: {error}") from error
        vars(run).update(description=description, model=model.to(self.device))
        return run

    @property
    def has_config(self) -> bool:
        """Whether the folder has the configuration, which the model alone does not require."""
        return (self.folder / "config.yaml").exists()

    @cached_property
    def config(self) -> Config:
        """The configuration that the model was trained with."""
        return load_run_config(self.folder)

    @property
    def is_independent(self) -> bool:
        """Whether it has `data.sequences: independent`; not without a configuration."""
        return self.has_config and self.config.data.sequences == "independent"

    @property
    def predicts_eos(self) -> bool:
        """Whether the end of a line is predicted, which is not learned from items without one."""
        return not self.is_independent or self.config.data.predict_eos

    def check_text(self, what: str) -> None:
        """Raises UserError if it is on independent sequences, which `what` does not take."""
        if self.is_independent:
            problem = f"requires a text, but {self.folder} has independent sequences"
            raise UserError(f"{what} {problem}")

    def check_end(self) -> None:
        """Raises UserError if the end of a line is not predicted, whose score would be random."""
        if not self.predicts_eos:
            end = "no end of a sequence: use lm evaluate --ranking or lm recommend"
            raise UserError(f"{self.folder} has items, but {end}")

    def never_drawn(self, allow_unk: bool = False) -> tuple[int, ...]:
        """Token ids that no text has: an `<eos>` that is not predicted, `<unk>` unless allowed."""
        unk = () if allow_unk else (self.tokenizer.unk_id,)
        return unk if self.predicts_eos else (*unk, self.tokenizer.eos_id)

    @cached_property
    def keeps_empty_lines(self) -> bool:
        """Whether an empty line of a text is a line, as in the corpus: `data.keep_empty_lines`.

        Without a configuration, it is, with a warning.
        """
        if not self.has_config:
            _log.warning("%s has no config.yaml: empty lines are counted as lines", self.folder)
            return True
        return self.config.data.keep_empty_lines

    @cached_property
    def prepared(self) -> "Prepared":
        """The prepared data, with the tokenizer of the model."""
        from data_prep.prepared import open_prepared

        expected = self.description.tokenizer_sha256  # UserError if there is no model
        prepared = open_prepared(self.config.prepared_path)
        if prepared.tokenizer_sha256 != expected:
            raise DataError(
                f"{prepared.folder} was prepared again, with another tokenizer than that of"
                f" {self.folder}"
            )
        return prepared

    @cached_property
    def description(self) -> "Description":
        """The content of `model.json`."""
        from lm.model.files import read_description

        return read_description(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        expected = self.description.tokenizer_sha256  # UserError if there is no model
        if sha256_file(self.folder / TOKENIZER) != expected:
            raise CheckpointError(
                f"{self.folder}: the tokenizer is not the one that the model was trained with"
            )
        return load_tokenizer(self.folder)

    @cached_property
    def speller(self) -> Speller:
        """The spellings of unknown words, of the run or of its prepared data."""
        path = self.folder / SPELLER
        if self.is_independent:
            raise UserError(f"{self.folder} has items, which are not spelled: no open vocabulary")
        if self.tokenizer.has_bytes:
            raise UserError(f"{self.folder} has pieces that spell every word, and no speller")
        if self.tokenizer.kind != "words":
            raise UserError(
                f"{self.folder} has pieces that do not spell every word: an open vocabulary"
                " requires words, or pieces with tokenizer.byte_fallback: true"
            )
        if not path.exists():
            return self.prepared.speller()
        return Speller.load(path, self.description.tokenizer_sha256)

    @cached_property
    def model(self) -> "LanguageModel":
        """The model, in evaluation mode, on `device`."""
        from lm.model.files import load_model

        return load_model(self.folder, self.description)[0].to(self.device)

    @cached_property
    def device(self) -> "torch.device":
        """Where the model computes."""
        from lm.device import choose_device
        from lm.model.files import WEIGHTS

        return choose_device(self.device_name, (self.folder / WEIGHTS).stat().st_size)
