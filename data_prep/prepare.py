"""Corpus → tokenizer → token files → classes: does what is missing or out of date, and says why.

Decides which stage depends on which setting and file. Each finished stage is recorded in
`meta.json`, so that an interrupted preparation goes on where it stopped; a file that does not match
its record is made again.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from data_prep.classes.word_classes import build_word_classes
from data_prep.corpus import lines as corpus
from data_prep.errors import UserError
from data_prep.prepared import (
    CLASSES,
    COUNTS,
    META,
    MODEL_FILE,
    TOKENIZER,
    ClassesInfo,
    InputFile,
    Meta,
    Prepared,
    Split,
    TokenizerInfo,
    load_tokenizer,
    open_prepared,
    read_meta,
    save_tokenizer,
    verify_tokenizer,
    write_meta,
)
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.storage import ArrayInfo, locked, map_array, sha256_file, verify_array, write_array
from data_prep.tokenizer.encode import encode_split
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import count_words, train_sentencepiece

LOCK = ".lock"
OWN_FILES = (
    META,
    TOKENIZER,
    *MODEL_FILE.values(),
    COUNTS,
    CLASSES,
    *(f"{split}.npy" for split in corpus.SPLITS),
)
"""What a preparation may replace."""

TEXT_SETTINGS = ("format", "hub", "hub_config", "text_field", "keep_empty_lines")
"""Settings of `data` that change the text; the others say where its files are, which are hashed."""
TOKENIZER_SETTINGS = {
    "words": ("kind", "vocab_size", "min_count", "lowercase", "split_punctuation"),
    "sentencepiece": (
        "kind",
        "vocab_size",
        "model_type",
        "byte_fallback",
        "character_coverage",
        "max_sentences",
    ),
}

logger = logging.getLogger("data_prep")


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig,
    folder: Path | str,
    *,
    keep: bool = False,
    progress: bool = True,
) -> Prepared:
    """Make a prepared folder what the settings say, with as little work as that takes.

    With the same settings and input files it does nothing. Otherwise each difference is logged to
    `data_prep`, and only what depends on it is made again: everything after a change of the
    training text or the tokenizer, one token file after a change of its split, the classes alone
    after a change of `classes`. A dataset on the hub is taken to be what it was. Preparations of
    one folder wait for each other.

    Args:
        data: where the text is.
        tokenizer: how a line becomes tokens; the vocabulary is built from the training split alone.
        classes: how words are put into classes.
        folder: the prepared folder, made if need be.
        keep: whether a complete folder that was made from something else is refused and left as it
            is, instead of made again.
        progress: whether bars on stderr show the progress.

    Returns:
        The folder, open for reading.

    Raises:
        UserError: a setting, a file of the corpus or the folder is at fault; the folder has files
            of these names that no preparation wrote.
    """
    folder = Path(folder)
    _check_owned(folder)
    with _locked(folder):
        found = _found(folder)
        wanted = _wanted(data, tokenizer, classes, folder, found)
        changed = _changes(found, wanted) if found else {}
        differences = list(chain.from_iterable(changed.values()))
        if keep and found and found.complete and differences:
            raise UserError(
                f"{folder} was prepared from something else ({'; '.join(differences)}), and a"
                " run goes on with the data it began with"
            )
        for difference in differences:
            logger.info("%s", difference)
        kept = _kept(folder, found, wanted, changed)
        if kept.complete and kept == found:
            logger.info("%s is up to date", folder)
        else:
            _remove_stale(folder, found, kept)
            write_meta(folder, kept)
            _make(kept, data, tokenizer, classes, folder, progress)
        return open_prepared(folder)


def open_made_by(
    data: DataConfig, tokenizer: TokenizerConfig, classes: ClassesConfig, folder: Path | str
) -> Prepared:
    """Open a prepared folder, if these settings made it; the corpus is not looked at.

    Raises:
        UserError: other settings made it; or as `open_prepared`.
    """
    prepared = open_prepared(folder)
    wanted = _settings(data, tokenizer, classes)
    changes = [
        f"{name} = {before}, not {after}"
        for name, (before, after) in _setting_changes(prepared.meta.settings, wanted)
    ]
    if changes:
        raise UserError(f"{folder} was prepared with {'; '.join(changes)}: run `lm prepare` first")
    return prepared


def _check_owned(folder: Path) -> None:
    """Refuse a folder with files of ours by name alone: every preparation leaves its lock."""
    present = [name for name in OWN_FILES if (folder / name).exists()]
    if not present or (folder / LOCK).exists():
        return
    try:
        ours = read_meta(folder) is not None
    except UserError:
        ours = False
    if not ours:
        raise UserError(
            f"{folder / present[0]} is not from a preparation and would be replaced: choose another"
            " data.prepared_dir"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    with locked(folder / LOCK):
        yield


def _wanted(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig,
    folder: Path,
    found: Meta | None,
) -> Meta:
    """The record of a preparation that has everything still to do."""
    settings = _settings(data, tokenizer, classes)
    paths = {
        split: corpus.input_files(data, split) for split in _wanted_splits(data, settings, found)
    }
    if classes.method == "file" and classes.file is not None:
        paths["classes"] = [Path(data.dir, classes.file)]
    for path in chain.from_iterable(paths.values()):
        if path.resolve().parent == folder.resolve():
            raise UserError(f"{path} is in the prepared folder: the corpus must be elsewhere")
    described = cache(_described)  # the files of a hub folder are those of every split
    inputs = {name: described(tuple(files)) for name, files in paths.items()}
    _warn_of_overlap(inputs, data)
    return Meta(settings=settings, inputs=inputs)


def _settings(
    data: DataConfig, tokenizer: TokenizerConfig, classes: ClassesConfig
) -> dict[str, dict[str, Any]]:
    """The settings that matter to the files, by section."""
    return {
        "data": {name: getattr(data, name) for name in TEXT_SETTINGS},
        "tokenizer": {n: getattr(tokenizer, n) for n in TOKENIZER_SETTINGS[tokenizer.kind]},
        "classes": asdict(classes),
    }


def _wanted_splits(
    data: DataConfig, settings: dict[str, dict[str, Any]], found: Meta | None
) -> list[str]:
    """The splits of the corpus; the hub, which is taken to be what it was, is asked only once."""
    on_hub = data.hub is not None and corpus.hub_folder(data) is None
    if on_hub and found and found.complete:
        before = {"data": found.settings.get("data", {})}
        if not list(_setting_changes(before, {"data": settings["data"]})):
            return [split for split in corpus.SPLITS if split in found.splits]
    return corpus.splits(data)


def _described(paths: tuple[Path, ...]) -> list[InputFile]:
    return [
        InputFile(name=path.name, sha256=sha256_file(path), num_bytes=path.stat().st_size)
        for path in paths
    ]


def _warn_of_overlap(inputs: dict[str, list[InputFile]], data: DataConfig) -> None:
    """Say so if a file is trained on and measured on; a hub folder's files are listed for every
    split.
    """
    trained_on = {file.sha256 for file in inputs["train"]}
    for split in {"valid", "test"} & inputs.keys() if data.hub is None else ():
        for file in inputs[split]:
            if file.sha256 in trained_on:
                logger.warning("%s: %s is in the training split as well", split, file.name)


def _found(folder: Path) -> Meta | None:
    try:
        return read_meta(folder)
    except UserError as error:
        logger.warning("%s; preparing from the beginning", error)
        return None


def _kept(folder: Path, found: Meta | None, wanted: Meta, changed: Mapping[str, list[str]]) -> Meta:
    """The finished stages that still hold, where these sections and splits have changed."""
    if found is None:
        return wanted
    if changed.keys() & {"data", "tokenizer", "train"} or not _tokenizer_is_sound(folder, found):
        return wanted
    kept = replace(wanted, tokenizer=found.tokenizer)
    kept_splits = {
        split: info
        for split, info in found.splits.items()
        if split in wanted.inputs
        and split not in changed
        and _is_sound(folder / f"{split}.npy", info.array)
    }
    if "train" in kept_splits and not _is_sound(folder / COUNTS, found.counts):
        del kept_splits["train"]
    kept = replace(kept, splits=kept_splits)
    if "train" not in kept_splits:
        return kept
    kept = replace(kept, counts=found.counts)
    if "classes" in changed or not found.classes:
        return kept
    if not _is_sound(folder / CLASSES, found.classes.array):
        return kept
    return replace(kept, classes=found.classes, complete=set(kept_splits) == _splits(wanted))


def _splits(meta: Meta) -> set[Split]:
    return cast(set[Split], set(meta.inputs) - {"classes"})


def _changes(found: Meta, wanted: Meta) -> dict[str, list[str]]:
    """What differs, in words, by the sections and splits that do."""
    changed: dict[str, list[str]] = {}
    for name, (before, after) in _setting_changes(found.settings, wanted.settings):
        changed.setdefault(name.split(".")[0], []).append(f"{name}: {before} → {after}")
    for split in {**found.inputs, **wanted.inputs}:
        before, after = found.inputs.get(split, []), wanted.inputs.get(split, [])
        for difference in _differences(before, after):
            changed.setdefault(split, []).append(f"{split}: {difference}")
    return changed


def _setting_changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """`section.key` and its two values, of every setting that differs; one not recorded is None."""
    for section, settings in after.items():
        old = before.get(section, {})
        for key in {**old, **settings}:
            if old.get(key) != settings.get(key):
                yield f"{section}.{key}", (old.get(key), settings.get(key))


def _differences(before: Sequence[InputFile], after: Sequence[InputFile]) -> list[str]:
    """What happened to the input files of a split, in words; nothing if they are the same."""
    if before == after:
        return []
    old, new = map(_by_name, (before, after))
    said = [f"{name} removed" for name in old if name not in new]
    said += [f"{name} added" for name in new if name not in old]
    said += [f"{name} changed" for name in new if name in old and old[name] != new[name]]
    return said or ["order of the files changed"]


def _by_name(files: Iterable[InputFile]) -> dict[str, InputFile]:
    """The files by name; of several of one name, those after the first are numbered."""
    found: dict[str, list[InputFile]] = {}
    for file in files:
        found.setdefault(file.name, []).append(file)
    return {
        f"{name} ({number})" if number > 1 else name: file
        for name, equals in found.items()
        for number, file in enumerate(equals, start=1)
    }


def _tokenizer_is_sound(folder: Path, found: Meta) -> bool:
    if found.tokenizer is None:
        return False
    try:
        verify_tokenizer(folder, found.tokenizer.sha256)
    except UserError as error:
        logger.warning("%s; making it again", error)
        return False
    return True


def _is_sound(path: Path, info: ArrayInfo | None) -> bool:
    if info is None:
        return False
    try:
        verify_array(path, map_array(path, info), info)
    except UserError as error:
        logger.warning("%s; making it again", error)
        return False
    return True


def _remove_stale(folder: Path, found: Meta | None, kept: Meta) -> None:
    """Delete the record before what it describes, so that it never describes what is not there."""
    (folder / META).unlink(missing_ok=True)
    for split in found.splits if found else ():
        if split not in kept.splits:
            (folder / f"{split}.npy").unlink(missing_ok=True)


def _make(
    meta: Meta,
    data: DataConfig,
    tokenizer_settings: TokenizerConfig,
    classes: ClassesConfig,
    folder: Path,
    progress: bool,
) -> None:
    """Make the stages that the record lacks, recording each."""
    if meta.tokenizer is None:
        logger.info("building the vocabulary from the training split")
        meta = replace(meta, tokenizer=_build_tokenizer(data, tokenizer_settings, folder))
        write_meta(folder, meta)
    missing = [split for split in corpus.SPLITS if split in _splits(meta) - set(meta.splits)]
    tokenizer = load_tokenizer(folder) if missing else None
    for split in missing:
        assert tokenizer is not None
        meta = _encode(meta, split, data, tokenizer, folder, progress)
        write_meta(folder, meta)
    del tokenizer  # large, and hardly any classes need it
    if meta.classes is None:
        meta = replace(meta, classes=_build_classes(meta, classes, data, folder, progress))
    write_meta(folder, replace(meta, complete=True))


def _build_tokenizer(data: DataConfig, settings: TokenizerConfig, folder: Path) -> TokenizerInfo:
    lines = corpus.lines(data, "train")
    if settings.kind == "sentencepiece":
        return save_tokenizer(folder, SentencePieceTokenizer(train_sentencepiece(lines, settings)))
    words, counts = count_words(lines, settings)
    tokenizer = WordTokenizer(
        words, lowercase=settings.lowercase, split_punctuation=settings.split_punctuation
    )
    return save_tokenizer(folder, tokenizer, counts)


def _encode(
    meta: Meta, split: Split, data: DataConfig, tokenizer: Tokenizer, folder: Path, progress: bool
) -> Meta:
    path = folder / f"{split}.npy"
    info, occurrences = encode_split(corpus.lines(data, split), tokenizer, path, progress=progress)
    logger.info("%s: %d lines, %d tokens, %d unknown", split, info.lines, info.tokens, info.oov)
    meta = replace(meta, splits={**meta.splits, split: info})
    if split != "train":
        return meta
    return replace(meta, counts=write_array(folder / COUNTS, [occurrences], "int64"))


def _build_classes(
    meta: Meta,
    settings: ClassesConfig,
    data: DataConfig,
    folder: Path,
    progress: bool,
) -> ClassesInfo:
    assert meta.counts is not None
    logger.info("building word classes by %s", settings.method)

    def words() -> list[str]:
        tokenizer = load_tokenizer(folder)
        return [tokenizer.token(id) for id in range(tokenizer.vocab_size)]

    word_class = build_word_classes(
        map_array(folder / COUNTS, meta.counts),
        settings,
        tokens=map_array(folder / "train.npy", meta.splits["train"].array),
        words=words,
        folder=Path(data.dir),
        progress=progress,
    )
    return ClassesInfo(
        method=settings.method,
        num_word_classes=int(word_class.max()) + 1,
        head=settings.head,
        array=write_array(folder / CLASSES, [word_class], "int32"),
    )
