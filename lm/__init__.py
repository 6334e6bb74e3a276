"""Train, evaluate and generate with language models of very large vocabularies."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm.loaded import LoadedModel

__version__ = "0.2.0"


def load(path: str | Path, *, device: str = "cpu") -> "LoadedModel":
    """Load a trained model, to score text with it, to continue text, or to search.

    Args:
        path: run folder or exported model.
        device: where the model computes.

    Raises:
        UserError: if there is no model, a file is damaged, or the tokenizer is not the one that the
            model was trained with.
    """
    from lm.loaded import LoadedModel  # torch takes seconds

    return LoadedModel(Path(path), device=device)
