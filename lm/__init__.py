"""Train, evaluate and generate with language models of very large vocabularies."""

from __future__ import annotations

TYPE_CHECKING = False  # so that nothing is imported before the command handles Ctrl-C
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import torch

    from lm.loaded import LoadedModel
    from lm.scoring import LineScore
    from lm.states import State, Step

__all__ = ["LineScore", "LoadedModel", "State", "Step", "load"]
__version__ = "0.3.0"
SPIN_COUNT = 1_000
"""Iterations for which idle OpenMP threads spin."""


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    threads: int | None = None,
    vocabulary_size: int | None = None,
    open_vocabulary: bool = False,
    ngram: bool = False,
) -> LoadedModel:
    """Load a trained model, to score text with it, to continue text, or to search.

    Args:
        path: folder of the run.
        device: where the model computes: `auto`, `cpu`, `cuda[:N]` or a device of torch; auto is
            the GPU if there is one where the model fits, else the CPU.
        threads: number of CPU threads, of the whole process; None leaves that of torch. The
            commands take that of the training, with which figures agree to the last digit. On a
            computer that has other work, 1 is fastest.
        vocabulary_size: V, the number of words that exist, `<eos>` included and `<unk>` not: each
            of the V - (N - 1) words that the model of N words lacks has an equal share of
            P(`<unk>`). None: each has all of it, as V = N, so that an unknown word may be more
            probable than a known one; see `lm.loaded`.
        open_vocabulary: whether each of these words has the probability of its spelling instead,
            so that those of all strings add up to 1.
        ngram: whether to mix the model with the n-gram model of `lm ngram`, see `lm.mixed`.

    Raises:
        UserError: if there is no model, a file is damaged, the tokenizer is not the one that the
            model was trained with, there is no such device, V is less than N, V or an open
            vocabulary is asked of a model of pieces of words, or there is no speller.
        ValueError: if `threads` is not an integer ≥ 1.
    """
    import sys
    from pathlib import Path

    check_packages()
    if "torch" not in sys.modules:
        limit_spinning()
    from lm.device import set_num_threads
    from lm.loaded import LoadedModel
    from lm.mixed import MixedModel
    from lm.run import TrainedRun

    if threads is not None:
        set_num_threads(threads)
    run = TrainedRun(Path(path), str(device))
    kind = MixedModel if ngram else LoadedModel
    return kind(run, vocabulary_size=vocabulary_size, open_vocabulary=open_vocabulary)


def check_packages() -> None:
    """Raise an ImportError if a file of the user's hides our package `data_prep`."""
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec("data_prep")
    file = Path((found and found.origin) or "").resolve()
    if file != Path(__file__).resolve().parents[1] / "data_prep" / "__init__.py":
        hiding = file if file.name != "__init__.py" else file.parent
        is_checkout = (hiding.parent / "lm" / "__init__.py").exists()
        remedy = f"import lm from {hiding.parent} too, or leave that folder"
        remedy = remedy if is_checkout else "rename it"
        raise ImportError(f"{hiding} hides the package data_prep of sqrtlm: {remedy}")


def limit_spinning() -> None:
    """Set how long idle OpenMP threads spin, unless the user has; before torch is imported.

    After each parallel region, idle threads of libgomp spin for `GOMP_SPINCOUNT` iterations before
    they sleep. On a quiet computer this saves wake-ups. On a busy one it takes processor time from
    threads that have work: libgomp's 300,000 iterations make training up to a hundred times slower
    there. `SPIN_COUNT` loses little on either. It changes no result, unlike the number of threads,
    which orders sums.
    """
    import os

    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def __getattr__(name: str) -> Any:
    """The classes of `lm.loaded`, imported when they are first used: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_packages()
    from lm import loaded

    return getattr(loaded, name)
