"""A complete prepared folder, open for reading: what `lm` needs of prepared data.

A prepared folder contains `meta.json`, the tokenizer (`tokenizer.json`, and `vocab.txt` and
`speller.npz`, or `tokenizer.model`), one token file for each split (`train.npy`, ...), `counts.npy`
and, if classes were needed, `classes.npy`. Every file is complete or absent.
"""

import shutil
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.classes.class_file import lowest_classes
from data_prep.errors import UserError
from data_prep.meta import CLASSES, COUNTS, KNOWN, META, ClassesInfo, Meta, read_meta
from data_prep.sequences import Sequences, find_sequences
from data_prep.storage import ArrayInfo, map_array, open_to_read, verify_file, write_atomically
from data_prep.tokenizer.serialization import (
    MODEL_FILE,
    TOKENIZER,
    load_tokenizer,
    verify_tokenizer,
)
from data_prep.tokenizer.speller import SPELLER, Speller
from data_prep.tokenizer.token_file import SplitInfo
from data_prep.tokenizer.tokenizer import Tokenizer


class Prepared:
    """A complete prepared folder, opened by `prepare` or `open_prepared`.

    Each file is compared with its SHA-256 on first use, unless `prepare` verified or wrote it.

    Attributes:
        folder: the folder.
        meta: its record.
        splits: the prepared splits and their counts.
        vocab_size: N.
        eos_id: id of the end of a line.
        unk_id: id of unknown words.
        tokenizer_kind: `words` or `sentencepiece`.
        tokenizer_sha256: checksum of `tokenizer.json`.
    """

    def __init__(self, folder: Path, meta: Meta, *, verified: Iterable[str] = ()) -> None:
        assert meta.tokenizer is not None
        assert meta.counts is not None
        self.folder = folder
        self.meta = meta
        self.splits: dict[str, SplitInfo] = {split: meta.splits[split] for split in meta.splits}
        self.vocab_size = meta.tokenizer.vocab_size
        self.eos_id = meta.tokenizer.eos_id
        self.unk_id = meta.tokenizer.unk_id
        self.tokenizer_kind = meta.tokenizer.kind
        self.tokenizer_sha256 = meta.tokenizer.sha256
        self._counts = meta.counts
        self._verified = set(verified)

    @property
    def num_word_classes(self) -> int:
        """C, number of word classes; UserError if there are none."""
        return self._classes.num_word_classes

    @property
    def shortlist(self) -> int:
        """Number of most frequent words that are in no class; UserError if there are no classes."""
        return self._classes.shortlist

    def tokens(self, split: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return all tokens of a split in reading order.

        Returns:
            [tokens], uint16 or uint32, a read-only map of the file.

        Raises:
            UserError: the split was not prepared; the file is absent, truncated or damaged; an id
                is out of range.
        """
        if split not in self.splits:
            raise UserError(
                f"{self.folder} has no {split} split: give its files as data.files.{split}"
                f" (prepared: {', '.join(self.splits)})"
            )
        return self._array(f"{split}.npy", self.splits[split].array, below=self.vocab_size)

    @property
    def is_independent(self) -> bool:
        """Whether each line is a sequence of its own: `data.sequences: independent`."""
        return self.meta.settings["data"].get("sequences") == "independent"

    def sequences(self, split: str) -> Sequences:
        """Return the independent sequences of a split; raises as `tokens`."""
        tokens, known = self.tokens(split), self.splits[split].known
        return find_sequences(
            tokens,
            eos_id=self.eos_id,
            unk_id=self.unk_id,
            num_known=None if known is None else self._array(KNOWN.format(split), known),
            predict_eos=bool(self.meta.settings["data"].get("predict_eos")),
        )

    def counts(self) -> NDArray[np.int64]:
        """Return the occurrences of every id in the training split, int64 [N]."""
        return self._array(COUNTS, self._counts)

    def class_levels(self) -> NDArray[np.int32]:
        """Return the classes of every id, each within the one before.

        Returns:
            int32 [levels, N], from the root down; -1 below a word's last class. The values of the
            `shortlist` most frequent words have no meaning.

        Raises:
            UserError: the folder was prepared without classes; the file is absent or damaged.
        """
        info = self._classes
        levels = self._array(CLASSES, info.array, below=info.num_word_classes, least=-1)
        return levels.reshape(info.num_levels, -1)

    def word_class(self) -> NDArray[np.int32]:
        """Return the class that contains every id; int32 [N], values in [0, num_word_classes).

        Otherwise as `class_levels`.
        """
        return lowest_classes(self.class_levels())

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the token files were written with."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        self._verify_tokenizer()
        return load_tokenizer(self.folder, verify=False)

    def speller(self) -> Speller:
        """Return the model of the spellings of unknown words.

        Raises:
            UserError: the folder has none, or its file is damaged.
        """
        self._verify_speller()
        return Speller.load(self.folder / SPELLER, self.tokenizer_sha256)

    def copy_to(self, folder: Path | str, *, classes: bool = False) -> None:
        """Copy the tokenizer, its speller, and the classes if asked for, to the folder of a run.

        Raises:
            UserError: a file is absent, damaged or belongs to another tokenizer.
        """
        if classes:
            self.class_levels()
        self._verify_tokenizer()
        copied = [MODEL_FILE[self.tokenizer_kind], TOKENIZER, *([CLASSES] if classes else ())]
        if self.meta.speller_sha256 is not None:
            self._verify_speller()
            copied.append(SPELLER)
        for name in copied:
            with open_to_read(self.folder / name) as file:
                write_atomically(Path(folder) / name, partial(shutil.copyfileobj, file))

    def _verify_tokenizer(self) -> None:
        if TOKENIZER not in self._verified:
            verify_tokenizer(self.folder, self.tokenizer_sha256)
            self._verified.add(TOKENIZER)

    def _verify_speller(self) -> None:
        if self.meta.speller_sha256 is None:
            raise UserError(f"{self.folder} has no {SPELLER}: run `lm prepare` (models of words)")
        if SPELLER not in self._verified:
            verify_file(self.folder / SPELLER, self.meta.speller_sha256)
            self._verified.add(SPELLER)

    @property
    def _classes(self) -> ClassesInfo:
        if self.meta.classes is None:
            raise UserError(
                f"{self.folder} was prepared without word classes: run `lm prepare` with"
                " output.tree: two_level or multi_level"
            )
        return self.meta.classes

    def _array(
        self, name: str, info: ArrayInfo, *, below: int | None = None, least: int = 0
    ) -> NDArray[Any]:
        verify = name not in self._verified
        array = map_array(self.folder / name, info, verify=verify, below=below, least=least)
        self._verified.add(name)
        return array


def open_prepared(folder: Path | str) -> Prepared:
    """Open a folder that `prepare` has completed.

    Raises:
        UserError: the folder is absent, incomplete, damaged or has another format version.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise UserError(
            f"{folder} is not a prepared folder: it has no {META} (run `lm prepare` first)"
        )
    if not meta.complete:
        raise UserError(f"{folder} is half prepared: run `lm prepare` again to finish it")
    return Prepared(folder, meta)
