"""Corpus → tokenizer → token files → classes: each stage is done only if it is missing or outdated.

Each finished stage is recorded in `meta.json`, so that an interrupted preparation continues where
it stopped; a file that does not match its record is made again.
"""

import logging
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from data_prep.classes.class_file import lowest_classes
from data_prep.corpus.hints import compared, continued, noted
from data_prep.corpus.lines import SPLITS
from data_prep.corpus.reader import read_lines
from data_prep.errors import DataError, UserError
from data_prep.meta import (
    CLASSES,
    COUNTS,
    FILES,
    GIVEN,
    KNOWN,
    META,
    ClassesInfo,
    Meta,
    Split,
    find_changes,
    has_speller,
    read_meta,
    requested_meta,
    stored_array,
    verify_stored,
    write_meta,
)
from data_prep.prepared import Prepared
from data_prep.sequences import word_item
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.storage import link_or_copy, locked, make_folder, write_array
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.serialization import TOKENIZER, load_tokenizer, save_tokenizer
from data_prep.tokenizer.speller import SPELLER, Speller
from data_prep.tokenizer.token_file import counted_known, encode_split
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import WordCounts, count_words, train_sentencepiece

LOCK = ".lock"

logger = logging.getLogger("data_prep")


class Given(NamedTuple):
    """What a folder has from a trained run, instead of finding it in the text."""

    origin: str  # SHA-256 of the weights of the run
    tokenizer: Tokenizer
    counts: NDArray[np.int64] | None  # [N] of words in the training split; None: no words
    levels: NDArray[np.int32]  # [levels, N], classes; -1 for the words that are in none
    speller: Speller | None = None  # None: that of the text


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig | None,
    folder: Path | str,
    *,
    keep: bool = False,
    progress: bool = True,
    others: Iterable[Path] = (),
) -> Prepared:
    """Make a prepared folder match the settings, with as little work as possible.

    Each difference from the settings and files that made it is logged to `data_prep`, and only what
    depends on it is made again: everything if the training text or the tokenizer changed, one token
    file if its split changed (of events, that of test if validation did), the classes alone if
    `classes` changed. A dataset on the hub is compared by its revision, where the hub can be
    reached. Preparations of one folder wait for each other.

    Args:
        data: where the text is.
        tokenizer: how a line becomes tokens; the vocabulary is built from the training split alone.
        classes: how words are assigned to classes. None if no classes are needed: existing classes
            are then neither made, checked nor removed, unless the tokens change.
        folder: the prepared folder, created if necessary.
        keep: whether a complete folder that was made from something else is an error, instead of
            being made again.
        progress: whether progress bars are shown on stderr.
        others: prepared folders that a new folder may take the files of, if they were made from the
            same text by the same settings; they are verified as those of the folder itself.

    Returns:
        The folder, open for reading.

    Raises:
        UserError: a setting, a file of the corpus or the folder is invalid; the folder contains
            files with the names of prepared files that no preparation wrote.
    """
    folder = Path(folder)
    _check_owner(folder)
    make_folder(folder)
    with locked(folder / LOCK):
        try:
            found = read_meta(folder)
        except UserError as error:
            logger.warning("%s; preparing from the beginning", error)
            found = None
        requested = requested_meta(data, tokenizer, classes, folder, found, keep)
        changed = find_changes(found, requested) if found else {}
        differences = list(chain.from_iterable(changed.values()))
        if keep and found and found.complete and differences:
            raise DataError(
                f"{folder} was prepared from something else ({'; '.join(differences)}), and a"
                " run continues with the data it started with: undo that, or start another run"
            )
        for difference in differences:
            logger.info("%s", difference)
        if found is None:
            found, changed = _take_over(folder, requested, others)
        meta = _valid_stages(folder, found, requested, changed.keys())
        if meta.complete and meta == found:
            logger.info("%s is up to date", folder)
        else:
            stages = _Stages(data, tokenizer, classes, folder, progress)
            # Before any file is replaced, because a class file may be wrong.
            levels = None if meta.counts is None else stages.class_levels(meta)
            write_meta(folder, meta)
            if found:
                _remove_stale(folder, found, meta)
            meta = stages.run(meta, levels)
    # Every file was verified or has just been written, except classes that are not needed.
    return Prepared(folder, meta, verified=set(FILES) - ({CLASSES} if classes is None else set()))


def prepare_with(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig | None,
    folder: Path,
    given: Given,
    *,
    progress: bool = True,
) -> Prepared:
    """Prepare a folder from the beginning, as `prepare`, with what is given."""
    _check_owner(folder)
    make_folder(folder)
    with locked(folder / LOCK):
        meta = requested_meta(data, tokenizer, classes, folder, None)
        meta = replace(meta, settings=meta.settings | {GIVEN: {"weights_sha256": given.origin}})
        write_meta(folder, meta)  # the files of an earlier preparation are no longer valid
        meta = replace(meta, tokenizer=save_tokenizer(folder, given.tokenizer, given.counts))
        if given.speller is not None and meta.tokenizer is not None:
            sha256 = given.speller.save(folder / SPELLER, meta.tokenizer.sha256)
            meta = replace(meta, speller_sha256=sha256)
        if classes is not None:
            classes = replace(classes, shortlist=0)  # words that are in no class have class -1
        stages = _Stages(data, tokenizer, classes, folder, progress)
        levels = None if classes is None else given.levels
        return Prepared(folder, stages.run(meta, levels, given.tokenizer))


def _check_owner(folder: Path) -> None:
    """Refuse a folder with files of the same names that no preparation wrote (there is no lock)."""
    present = [name for name in FILES if (folder / name).exists()]
    if not present or (folder / LOCK).exists():
        return
    with suppress(UserError):
        if read_meta(folder) is not None:
            return
    raise DataError(
        f"{folder / present[0]} is not from a preparation and would be replaced: choose another"
        " data.prepared_dir"
    )


def _take_over(
    folder: Path, requested: Meta, others: Iterable[Path]
) -> tuple[Meta | None, dict[str, list[str]]]:
    """Link the files of another folder with the same tokens; its record, and what differs."""
    for other in others:
        try:
            found = read_meta(other)
            if found is None or not found.complete or GIVEN in found.settings:
                continue
            changed = find_changes(found, requested)
            if changed.keys() - {"classes"}:
                continue
            # Files are replaced and never changed in place, so that both of their names stay valid.
            for name in FILES:
                if name != META and (other / name).exists():
                    link_or_copy(other / name, folder / name)
            write_meta(folder, found)
        except (UserError, OSError) as error:
            logger.warning("%s is not used: %s", other, error)
            continue
        logger.info("the prepared data of %s are used: the same text and settings", other)
        return found, changed
    return None, {}


def _valid_stages(folder: Path, found: Meta | None, requested: Meta, changed: Set[str]) -> Meta:
    """The requested record with the finished stages that are still valid."""
    if found is None or found.tokenizer is None or changed & {"data", "tokenizer", "train"}:
        return requested
    if "valid" in changed and requested.settings["data"].get("user_field"):
        changed = changed | {"test"}  # events of validation are known there
    intact = partial(_is_intact, folder, found)
    if not intact(TOKENIZER):
        return requested
    splits = {
        split: info
        for split, info in found.splits.items()
        if split in requested.inputs
        and split not in changed
        and intact(f"{split}.npy")
        and (info.known is None or intact(KNOWN.format(split)))
    }
    if found.counts is None or not intact(COUNTS):
        splits.pop("train", None)
    speller = found.speller_sha256 if found.speller_sha256 and intact(SPELLER) else None
    given = {name: keys for name, keys in found.settings.items() if name == GIVEN}
    valid = replace(requested, settings=requested.settings | given, tokenizer=found.tokenizer)
    valid = replace(valid, splits=splits, speller_sha256=speller)
    if "train" not in splits:
        return valid
    valid = replace(valid, counts=found.counts)
    if found.classes and "classes" not in valid.settings:  # not needed, and stay as they are
        settings = valid.settings | {"classes": found.settings["classes"]}
        inputs = valid.inputs | {n: f for n, f in found.inputs.items() if n == "classes"}
        valid = replace(valid, settings=settings, inputs=inputs, classes=found.classes)
    elif found.classes and "classes" not in changed and intact(CLASSES):
        valid = replace(valid, classes=found.classes)
    is_complete = valid.classes is not None or "classes" not in valid.settings
    is_complete &= speller is not None or not has_speller(requested.settings)
    return replace(valid, complete=is_complete and set(splits) == valid.inputs.keys() - {"classes"})


def _is_intact(folder: Path, found: Meta, name: str) -> bool:
    """Whether a file is as recorded; otherwise log why."""
    try:
        verify_stored(folder, found, name)
    except UserError as error:
        logger.warning("%s; making it again", error)
        return False
    return True


def _remove_stale(folder: Path, found: Meta, valid: Meta) -> None:
    """Delete the files that are no longer valid, after `meta.json` has ceased to describe them."""
    stale = found.arrays().keys() - valid.arrays().keys()
    stale |= {SPELLER} if found.speller_sha256 and not valid.speller_sha256 else set()
    for name in stale:
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Stages:
    """The stages of a preparation, with the arguments of `prepare`."""

    data: DataConfig
    tokenizer: TokenizerConfig
    classes: ClassesConfig | None
    folder: Path
    progress: bool

    def run(
        self, meta: Meta, levels: NDArray[np.int32] | None, tokenizer: Tokenizer | None = None
    ) -> Meta:
        """Do the stages that a record lacks, classes unless they are given; return the new one."""
        settings, found = self.tokenizer, None
        if meta.tokenizer is None:
            logger.info("building the vocabulary from the training split")
            lines = read_lines(self.data, "train")
            if settings.kind == "words":
                found = count_words(lines, settings)
                tokenizer = WordTokenizer(
                    found.words,
                    lowercase=settings.lowercase,
                    split_punctuation=settings.split_punctuation,
                )
            else:
                tokenizer = SentencePieceTokenizer(train_sentencepiece(lines, settings))
            info = save_tokenizer(self.folder, tokenizer, found and found.counts)
            meta = replace(meta, tokenizer=info)
            write_meta(self.folder, meta)
        if has_speller(meta.settings) and meta.speller_sha256 is None:
            meta = replace(meta, speller_sha256=self._build_speller(meta, found))
            write_meta(self.folder, meta)
        del found  # large
        for split in SPLITS:
            if split in meta.inputs.keys() - meta.splits.keys():
                tokenizer = tokenizer or load_tokenizer(self.folder, verify=False)
                meta = self._encode(meta, cast(Split, split), tokenizer)
                write_meta(self.folder, meta)
        del tokenizer  # large, and most methods of making classes do not need it
        levels = self.class_levels(meta) if levels is None else levels
        if self.classes is not None and levels is not None:
            classes = ClassesInfo(
                method=self.classes.method,
                num_word_classes=max(1, int(lowest_classes(levels).max()) + 1),
                num_levels=len(levels),
                shortlist=self.classes.shortlist,
                array=write_array(self.folder / CLASSES, levels, "int32"),
            )
            meta = replace(meta, classes=classes)
        meta = replace(meta, complete=True)
        write_meta(self.folder, meta)
        return meta

    def _build_speller(self, meta: Meta, found: WordCounts | None) -> str:
        assert meta.tokenizer is not None
        logger.info("counting the spellings of the words")
        found = found or count_words(read_lines(self.data, "train"), self.tokenizer)
        unk_id = next(id for id, word in enumerate(found.words) if word == UNK)
        num_unknown = int(found.counts[unk_id])
        share = (found.num_literal + 0.5) / (num_unknown + 1)  # Krichevsky & Trofimov 1981
        speller = Speller.train(found.words, found.others, literal_share=share)
        return speller.save(self.folder / SPELLER, meta.tokenizer.sha256)

    def _encode(self, meta: Meta, split: Split, tokenizer: Tokenizer) -> Meta:
        lines, path = read_lines(self.data, split), self.folder / f"{split}.npy"
        num_known: list[int] = []
        if self.data.sequences == "independent":
            lowercase = self.tokenizer.lowercase
            if split != "train" and self.data.user_field is None:
                lines = continued(lines, read_lines(self.data, "train"), split)
            lines = counted_known(lines, split, num_known, lowercase=lowercase)
        elif split == "train":
            others = {s: read_lines(self.data, s) for s in SPLITS[1:] if s in meta.inputs}
            lines = noted(compared(lines, others), "train")
        info, occurrences = encode_split(lines, tokenizer, path, progress=self.progress)
        logger.info("%s: %d lines, %d tokens, %d unknown", split, info.lines, info.tokens, info.oov)
        if any(num_known):
            known = write_array(self.folder / KNOWN.format(split), [np.array(num_known)], "int64")
            info = replace(info, known=known)
        meta = replace(meta, splits={**meta.splits, split: info})
        if split != "train":
            return meta
        return replace(meta, counts=write_array(self.folder / COUNTS, [occurrences], "int64"))

    def class_levels(self, meta: Meta) -> NDArray[np.int32] | None:
        """The classes of each word, [levels, N]; None if not required, or recorded already."""
        if self.classes is None or meta.classes is not None:
            return None
        from data_prep.classes.word_classes import build_class_levels  # imports scipy

        logger.info("building word classes by %s", self.classes.method)
        try:
            return build_class_levels(
                stored_array(self.folder, meta, COUNTS, verify=False),
                self.classes,
                tokens=stored_array(self.folder, meta, "train.npy", verify=False),
                words=self._words,
                folder=Path(self.data.dir),
                progress=self.progress,
            )
        except UserError as error:
            raise type(error)(f"{error}; the tokens in {self.folder} remain valid") from error

    def _words(self) -> list[str]:
        """The words as a file of the user's has them: items as in their table."""
        tokenizer = load_tokenizer(self.folder, verify=False)
        words = list(map(tokenizer.token, range(tokenizer.vocab_size)))
        return words if self.data.user_field is None else list(map(word_item, words))
