"""A complete prepared folder, open for reading: what `lm` needs of prepared data.

It has `meta.json`, the tokenizer (`tokenizer.json`, and `vocab.txt` and `speller.npz`, or
`tokenizer.model`), a token file for each split (`train.npy`, ...; of sequences `valid-known.npy`,
... too), `counts.npy` and, if needed, `classes.npy`. Every file is complete or absent.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.classes.class_file import lowest_classes
from data_prep.errors import DataError
from data_prep.meta import (
    CLASSES,
    COUNTS,
    KNOWN,
    META,
    ClassesInfo,
    Meta,
    read_meta,
    requested_settings,
    setting_changes,
    stored_array,
    verify_stored,
)
from data_prep.sequences import RARE_REPEATS, Exclude, Sequences, find_sequences
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.storage import copy_atomically
from data_prep.tokenizer.serialization import MODEL_FILE, TOKENIZER, load_tokenizer
from data_prep.tokenizer.speller import SPELLER, Speller
from data_prep.tokenizer.token_file import SplitInfo
from data_prep.tokenizer.tokenizer import Tokenizer


class Prepared:
    """A complete prepared folder, opened by `prepare` or `open_prepared`.

    Each file is compared with its SHA-256 on first use, unless `prepare` verified or wrote it.
    """

    def __init__(self, folder: Path, meta: Meta, *, verified: Iterable[str] = ()) -> None:
        assert meta.tokenizer is not None
        self.folder, self.meta, self._verified = folder, meta, set(verified)
        self.splits: dict[str, SplitInfo] = dict(meta.splits.items())
        self.vocab_size = meta.tokenizer.vocab_size
        self.eos_id, self.unk_id = meta.tokenizer.eos_id, meta.tokenizer.unk_id
        self.tokenizer_kind, self.tokenizer_sha256 = meta.tokenizer.kind, meta.tokenizer.sha256

    @property
    def shortlist(self) -> int:
        """Number of most frequent words that are in no class; UserError if there are no classes."""
        return self._classes.shortlist

    def tokens(self, split: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return all tokens of a split in reading order: [tokens], uint16 or uint32, read-only.

        UserError if the split was not prepared, or the file is absent or damaged.
        """
        if split not in self.splits:
            raise DataError(
                f"{self.folder} has no {split} split (prepared: {', '.join(self.splits)}): training"
                f" takes its files from data.files.{split}, lm evaluate any text with --text FILE"
            )
        return self._array(f"{split}.npy")

    @property
    def is_independent(self) -> bool:
        """Whether each line is a sequence of its own: `data.sequences: independent`."""
        return self.meta.settings["data"].get("sequences") == "independent"

    def sequences(self, split: str, *, items_alone: bool = False) -> Sequences:
        """Return the independent sequences of a split; raises as `tokens`.

        `items_alone`: without an `<eos>` that is predicted, which is no item.
        """
        tokens, known = self.tokens(split), self.splits[split].known
        return find_sequences(
            tokens,
            eos_id=self.eos_id,
            unk_id=self.unk_id,
            num_known=None if known is None else self._array(KNOWN.format(split)),
            predict_eos=not items_alone and bool(self.meta.settings["data"].get("predict_eos")),
        )

    @cached_property
    def repeated_share(self) -> float:
        """Share of the items of the training split that their sequence has had before."""
        return self.sequences("train", items_alone=True).repeated_share

    @property
    def proposed_exclusion(self) -> Exclude:
        """What a ranking leaves out unless asked otherwise: `seen` where repeats are rare."""
        return "seen" if self.repeated_share < RARE_REPEATS else "nothing"

    def counts(self) -> NDArray[np.int64]:
        """Return the occurrences of every id in the training split, int64 [N]."""
        return self._array(COUNTS)

    def class_levels(self) -> NDArray[np.int32]:
        """Return the classes of every id, int32 [levels, N], each within the one before.

        They are -1 below a word's last class; those of the `shortlist` most frequent words have no
        meaning. UserError if the folder was prepared without classes, or the file is damaged.
        """
        num_levels = self._classes.num_levels
        return self._array(CLASSES).reshape(num_levels, -1)

    def word_class(self) -> NDArray[np.int32]:
        """Return the class that contains every id, int32 [N]; otherwise as `class_levels`."""
        return lowest_classes(self.class_levels())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the token files were written with."""
        self._verify(TOKENIZER)
        return load_tokenizer(self.folder, verify=False)

    def speller(self) -> Speller:
        """Return the model of the spellings of unknown words; UserError if there is none."""
        if self.meta.speller_sha256 is None:
            raise DataError(f"{self.folder} has no {SPELLER}: run `lm prepare` (models of words)")
        self._verify(SPELLER)
        return Speller.load(self.folder / SPELLER, self.tokenizer_sha256)

    def copy_to(self, folder: Path | str, *, classes: bool = False) -> None:
        """Copy the tokenizer, its speller, and the classes if asked for, to the folder of a run."""
        copied = [MODEL_FILE[self.tokenizer_kind], TOKENIZER]
        copied += [CLASSES] if classes and self._classes else []
        copied += [SPELLER] if self.meta.speller_sha256 else []
        for name in copied[1:]:
            self._verify(name)
        for name in copied:
            copy_atomically(self.folder / name, Path(folder) / name)

    @property
    def _classes(self) -> ClassesInfo:
        if self.meta.classes is None:
            raise DataError(
                f"{self.folder} was prepared without word classes: run `lm prepare` with"
                " output.tree: two_level or multi_level"
            )
        return self.meta.classes

    def _verify(self, name: str) -> None:
        if name not in self._verified:
            verify_stored(self.folder, self.meta, name)
            self._verified.add(name)

    def _array(self, name: str) -> NDArray[Any]:
        array = stored_array(self.folder, self.meta, name, verify=name not in self._verified)
        self._verified.add(name)
        return array


def open_prepared(folder: Path | str) -> Prepared:
    """Open a folder that `prepare` has completed; UserError if it is not complete and intact."""
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise DataError(
            f"{folder} is not a prepared folder: it has no {META} (run `lm prepare` first)"
        )
    if not meta.complete:
        raise DataError(f"{folder} is half prepared: run `lm prepare` again to finish it")
    return Prepared(folder, meta)


def open_made_by(
    data: DataConfig, tokenizer: TokenizerConfig, classes: ClassesConfig | None, folder: Path | str
) -> Prepared:
    """Open a prepared folder; UserError unless these settings made it, as well as `open_prepared`.

    The corpus is not read.
    """
    prepared = open_prepared(folder)
    requested = requested_settings(data, tokenizer, classes)
    if changed := setting_changes(prepared.meta.settings, requested):
        changes = "; ".join(chain.from_iterable(changed.values()))
        mistake = f"{folder} was prepared with other settings ({changes})"
        raise DataError(f"{mistake}: run `lm prepare` with these settings first")
    if classes is not None and prepared.meta.classes is None:
        raise DataError(f"{folder} was prepared without word classes: run `lm prepare` first")
    return prepared
