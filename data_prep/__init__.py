"""Text → tokens → classes: everything that happens before a model sees a token.

Imports neither `lm` nor torch.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


def word_classes(
    tokens: "ArrayLike",
    vocab_size: int,
    num_word_classes: int | None = None,
    *,
    method: Literal["exchange", "embedding", "frequency", "uniform", "random"] = "exchange",
    shortlist: int = 0,
    seed: int = 1,
    progress: bool = False,
) -> "NDArray[np.int32]":
    """Assign words to classes by a text, for a two-level softmax.

    Args:
        tokens: [T] word ids in [0, vocab_size), the text: an array, a list or a tensor on the CPU.
        vocab_size: N.
        num_word_classes: C; default √N, rounded.
        method: as `ClassesConfig.method`.
        shortlist: number of most frequent words that are children of the root, next to the classes:
            their classes have no meaning.
        seed: seed of `random`, `embedding` and `exchange`.
        progress: whether progress bars are shown on stderr.

    Returns:
        int32 [N], the class of each word, 0 to C - 1; no class is empty.

    Raises:
        ValueError: `tokens` are not [T] word ids, or a number is out of range.

    Example:
        >>> word_classes([0, 2, 1, 3, 0, 3, 1, 2, 0], vocab_size=4).tolist()
        [0, 0, 1, 1]
    """
    from pathlib import Path

    import numpy as np

    from data_prep.classes.word_classes import build_word_classes  # imports scipy
    from data_prep.settings import ClassesConfig

    ids = np.asarray(tokens)
    is_valid = ids.ndim == 1 and ids.dtype.kind in "iu"
    if not is_valid or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size):
        raise ValueError(f"tokens: expected [T] integers in [0, {vocab_size})")
    if num_word_classes is not None and num_word_classes < 1:
        raise ValueError(f"num_word_classes: expected at least 1, got {num_word_classes}")
    settings = ClassesConfig(
        method=method, num_word_classes=num_word_classes, shortlist=shortlist, seed=seed
    )
    counts = np.bincount(ids, minlength=vocab_size).astype(np.int64)
    return build_word_classes(
        counts, settings, tokens=ids, words=list, folder=Path(), progress=progress
    )
