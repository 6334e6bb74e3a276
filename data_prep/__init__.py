"""Text → tokens → classes: everything that happens before a model sees a token.

Imports neither `lm` nor torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from data_prep.classes.word_classes import WordClass


def word_classes(
    tokens: "ArrayLike", vocab_size: int, *, num_word_classes: int | None = None, seed: int = 1
) -> "WordClass":
    """Word classes that suit a text, for `ClassTree.two_level`, by the method `exchange`.

    Example:
        >>> word_classes([0, 2, 1, 2, 0, 3, 1, 3] * 20, vocab_size=4).tolist()
        [1, 1, 0, 0]

    Args:
        tokens: [T] integers within 0 … N - 1, the text as word ids.
        vocab_size: N.
        num_word_classes: C, at most N; by default √N, rounded.
        seed: seed of the first classes, which are then improved.

    Returns:
        int32 [N], the class of each word.

    Raises:
        ValueError: if a token is not a word, or there are no words.
    """
    from pathlib import Path

    import numpy as np

    from data_prep.classes.word_classes import build_word_classes
    from data_prep.settings import ClassesConfig

    ids = np.asarray(tokens, dtype=np.int64)
    known = not ids.size or 0 <= ids.min() <= ids.max() < vocab_size
    if vocab_size < 1 or ids.ndim != 1 or not known:
        raise ValueError(f"tokens must be one-dimensional, within 0 … {vocab_size - 1}")
    counts = np.bincount(ids, minlength=vocab_size)
    settings = ClassesConfig(num_word_classes=num_word_classes, seed=seed)
    return build_word_classes(
        counts, settings, tokens=ids, words=list, folder=Path(), progress=False
    )
