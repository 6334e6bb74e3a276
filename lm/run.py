"""A run, opened: each of its parts is read, verified and built once, when it is first used."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import UserError
from lm.config import Config, load_run_config

if TYPE_CHECKING:
    import torch

    from data_prep.prepared import Prepared
    from data_prep.tokenizer.tokenizer import Tokenizer
    from lm.model.files import Description
    from lm.model.language_model import LanguageModel


class Run:
    """The folder of a trained model. A part that cannot be had raises a `UserError`.

    Attributes:
        folder: folder of the run.
        config: the configuration.
        prepared: the prepared data, with the tokenizer that the model has.
        description: the content of `model.json`.
        tokenizer: the tokenizer that the model was trained with.
        model: the trained model in evaluation mode, on `device`.
        device: where the model computes.
    """

    def __init__(self, folder: Path, *, device: str = "auto") -> None:
        self.folder = folder
        self._device_name = device

    @classmethod
    def open(cls, folder: str | Path, *, device: str = "auto", threads: int | None = None) -> "Run":
        """Open the folder of a trained model.

        Args:
            folder: folder of the run.
            device: `auto`, `cpu` or `cuda[:N]`; auto is the GPU if there is one where the model
                fits, else the CPU.
            threads: number of CPU threads, of the whole process; None: as the run was trained with.

        Raises:
            UserError: if there is no such device.
        """
        from lm.device import set_num_threads

        run = cls(Path(folder), device=device)
        if threads is None and (run.folder / "config.yaml").exists():
            threads = run.config.train.threads
        set_num_threads(threads)
        return run

    @cached_property
    def config(self) -> Config:
        """The configuration."""
        return load_run_config(self.folder)

    @cached_property
    def prepared(self) -> "Prepared":
        """The prepared data."""
        from data_prep.prepared import open_prepared

        prepared = open_prepared(self.config.prepared_path)
        if prepared.tokenizer_sha256 != self.description.tokenizer_sha256:
            raise UserError(
                f"{prepared.folder} was prepared again, with another tokenizer than that of"
                f" {self.folder}"
            )
        return prepared

    @cached_property
    def _loaded(self) -> "tuple[LanguageModel, Description]":
        from lm.model.files import load_model

        return load_model(self.folder)

    @cached_property
    def description(self) -> "Description":
        """What `model.json` says."""
        return self._loaded[1]

    @cached_property
    def model(self) -> "LanguageModel":
        """The trained model, in evaluation mode."""
        return self._loaded[0].to(self.device)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that the model was trained with."""
        from data_prep.storage import sha256_file
        from data_prep.tokenizer.files import TOKENIZER, load_tokenizer

        if sha256_file(self.folder / TOKENIZER) != self.description.tokenizer_sha256:
            raise UserError(
                f"{self.folder}: the tokenizer is not the one that the model was trained with"
            )
        return load_tokenizer(self.folder)

    @cached_property
    def device(self) -> "torch.device":
        """Where the model computes."""
        from lm.device import choose_device
        from lm.model.files import WEIGHTS

        return choose_device(self._device_name, (self.folder / WEIGHTS).stat().st_size)
