"""Text → tokens → classes: everything that happens before a model sees a token.

Imports neither `lm` nor torch.
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Method = Literal["exchange", "embedding", "frequency", "uniform", "random"]


def word_classes(
    tokens: "ArrayLike",
    vocab_size: int,
    num_word_classes: int | None = None,
    *,
    method: Method = "exchange",
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
        progress: whether progress bars are shown on stderr: ten million tokens take minutes.

    Returns:
        int32 [N], the class of each word, 0 to C - 1; no class is empty.

    Raises:
        ValueError: `tokens` are not [T] word ids, or a number is out of range.

    Example:
        >>> word_classes([0, 2, 1, 3, 0, 3, 1, 2, 0], vocab_size=4).tolist()
        [0, 0, 1, 1]
    """
    options: Any = {"method": method, "shortlist": shortlist, "seed": seed, "progress": progress}
    word_class: NDArray[np.int32]
    (word_class,) = class_levels(tokens, vocab_size, num_word_classes, depth=2, **options)
    return word_class


def class_levels(
    tokens: "ArrayLike",
    vocab_size: int,
    num_word_classes: int | None = None,
    *,
    depth: int = 3,
    method: Method = "exchange",
    shortlist: int = 0,
    seed: int = 1,
    progress: bool = False,
) -> "NDArray[np.int32]":
    """Assign words to classes by a text, and these to larger classes, for a tree of softmaxes.

    Args:
        tokens: as in `word_classes`, and so are `vocab_size`, `method`, `seed` and `progress`.
        num_word_classes: C, number of classes of words; default N^((depth - 1) / depth), rounded.
        depth: number of nodes on a word's path; C^((depth - 2) / (depth - 1)) classes contain the C
            classes, and so on up to the root.
        shortlist: as in `word_classes`; `ClassTree.from_levels` takes the same number.

    Returns:
        int32 [depth - 1, N], the class of each word on each level, from the root down, numbered
        from 0 on each level.

    Raises:
        ValueError: `tokens` are not [T] word ids, or a number is out of range.

    Example:
        >>> class_levels([0, 2, 1, 3, 0], 4, num_word_classes=4, method="uniform").tolist()
        [[0, 0, 1, 1], [0, 1, 2, 3]]
    """
    from pathlib import Path

    import numpy as np

    from data_prep.classes.word_classes import build_class_levels  # imports scipy
    from data_prep.settings import ClassesConfig

    ids = np.asarray(tokens)
    is_valid = ids.ndim == 1 and ids.dtype.kind in "iu"
    if not is_valid or (len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size):
        raise ValueError(f"tokens: expected [T] integers in [0, {vocab_size})")
    if method not in get_args(Method):
        raise ValueError(f"method: expected one of {', '.join(get_args(Method))}, got {method!r}")
    sizes: Any = {"num_word_classes": num_word_classes, "depth": depth, "shortlist": shortlist}
    limits = {"vocab_size": 1, "num_word_classes": 1, "depth": 2}
    for name, number in {"vocab_size": vocab_size, "seed": seed, **sizes}.items():
        if number is not None and number < (least := limits.get(name, 0)):
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    settings = ClassesConfig(method=method, seed=seed, **sizes)
    counts = np.bincount(ids.astype(np.int64), minlength=vocab_size)
    text: Any = {"tokens": ids, "words": list, "folder": Path()}
    return build_class_levels(counts, settings, progress=progress, **text)
