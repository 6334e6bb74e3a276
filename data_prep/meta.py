"""The record of a prepared folder, `meta.json`: how the folder was made and which stages are done.

`meta.json` describes finished stages only and is replaced after each of them. What differs between
it and the settings and files of a request decides which stages are done again. File names are fixed
here and in `tokenizer.serialization`; none is ever taken from the content of a file.
"""

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from data_prep.corpus.lines import SPLITS, hub_folder, hub_revision, input_files, splits
from data_prep.errors import DataError, UserError
from data_prep.settings import (
    ClassesConfig,
    DataConfig,
    NonNegative,
    Positive,
    Strict,
    TokenizerConfig,
)
from data_prep.storage import (
    ArrayInfo,
    check_sha256,
    map_array,
    read_json,
    sha256_file,
    write_json_atomically,
)
from data_prep.tokenizer.serialization import MODEL_FILE, TOKENIZER, TokenizerInfo, verify_tokenizer
from data_prep.tokenizer.speller import SPELLER
from data_prep.tokenizer.token_file import SplitInfo

META = "meta.json"
FORMAT_VERSION = 1
"""The format of `meta.json`."""
COUNTS = "counts.npy"
CLASSES = "classes.npy"
KNOWN = "{}-known.npy"
"""How many items of each sequence of a split are not predicted."""
FILES = (
    *(META, TOKENIZER, *MODEL_FILE.values(), SPELLER, COUNTS, CLASSES),
    *(name.format(split) for split in SPLITS for name in ("{}.npy", KNOWN)),
)
"""Files that a preparation may replace."""

GIVEN = "given"
"""Key of the settings of a folder whose words and classes are those of a trained run."""
TEXT_SETTINGS = ("format", "hub", "hub_config", "text_field", "keep_empty_lines")
"""Settings of `data` that change the text; the others locate files, whose content is hashed."""
SEQUENCE_SETTINGS = (
    *("sequences", "predict_eos", "user_field", "item_field", "time_field"),
    *("ties", "split", "valid_from", "test_from"),
)
"""Settings of `data` that are recorded of independent sequences only."""
TOKENIZER_SETTINGS = {
    "words": ("min_count", "lowercase", "split_punctuation"),
    "sentencepiece": ("model_type", "byte_fallback", "character_coverage", "max_sentences"),
}

Split = Literal["train", "valid", "test"]
Settings = dict[str, dict[str, Any]]

logger = logging.getLogger("data_prep")


@dataclass(frozen=True, kw_only=True)
class InputFile(Strict):
    """A file of the corpus as it was when it was read."""

    name: str  # without the folder, so that a corpus can be moved
    num_bytes: NonNegative
    sha256: str  # of a dataset on the hub, its revision


@dataclass(frozen=True, kw_only=True)
class ClassesInfo(Strict):
    """What is recorded about the word classes."""

    method: str
    num_word_classes: Positive  # C, number of classes that contain words
    num_levels: Positive = 1  # number of classes of a word, each within the one before
    shortlist: NonNegative  # number of most frequent words that are in no class
    array: ArrayInfo  # [num_levels · N], each word's class on the first level, on the second, …


@dataclass(frozen=True, kw_only=True)
class Meta(Strict):
    """The content of `meta.json`."""

    format_version: int = FORMAT_VERSION
    settings: Settings  # sections `data`, `tokenizer`, `classes`: the keys that affect the files
    inputs: dict[str, list[InputFile]]  # of each split in reading order; `classes`: the class file
    tokenizer: TokenizerInfo | None = None
    speller_sha256: str | None = None
    """None unless `has_speller`, and in folders of earlier versions."""
    splits: dict[Split, SplitInfo] = field(default_factory=dict)
    counts: ArrayInfo | None = None
    classes: ClassesInfo | None = None  # None in a complete folder: it was prepared without classes
    complete: bool = False
    checksum: str = field(default="", compare=False)
    """SHA-256 of the other keys, which `write_meta` adds; empty in folders of earlier versions."""

    def arrays(self) -> dict[str, tuple[ArrayInfo, dict[str, int]]]:
        """The recorded arrays by the names of their files, each with the limits of its values."""
        found = dict[str, tuple[ArrayInfo, dict[str, int]]]()
        word_ids = {"below": self.tokenizer.vocab_size} if self.tokenizer else {}
        for split, info in self.splits.items():
            found[f"{split}.npy"] = info.array, word_ids
            if info.known:
                found[KNOWN.format(split)] = info.known, {}
        if self.counts:
            found[COUNTS] = self.counts, {}
        if self.classes:
            limits = {"below": self.classes.num_word_classes, "least": -1}
            found[CLASSES] = self.classes.array, limits
        return found


def read_meta(folder: Path) -> Meta | None:
    """Read `meta.json`, None if there is none; UserError if damaged or of another version."""
    path = folder / META
    if not path.exists():
        return None
    meta: Meta = read_json(path, Meta, FORMAT_VERSION)
    if meta.checksum not in ("", _checksum(json.loads(path.read_bytes()))):
        raise DataError(f"{path} is damaged: its SHA-256 is not the recorded one")
    counts, classes, tokenizer = meta.counts, meta.classes, meta.tokenizer
    has_tokens = None not in (tokenizer, counts, meta.splits.get("train"))
    has_needed_classes = ("classes" in meta.settings) == (classes is not None)
    if meta.complete and not (has_tokens and has_needed_classes):
        raise DataError(f"{path} is damaged: it is marked complete, but a stage is missing")
    lengths: set[float] = {counts.length} if counts else set()
    lengths |= {classes.array.length / classes.num_levels} if classes else set()
    if tokenizer and lengths - {tokenizer.vocab_size}:
        raise DataError(f"{path} is damaged: an array has not one value for each word")
    return meta


def check_not_given(folder: Path) -> None:
    """Raises UserError if the words and classes of a folder are those of a trained run."""
    found = None
    with suppress(UserError):  # a damaged one is made again
        found = read_meta(folder)
    if found is not None and GIVEN in found.settings:
        problem = "has the words of a trained run (--init-from)"
        raise DataError(f"{folder} {problem}: delete it, or choose another folder")


def stored_array(folder: Path, meta: Meta, name: str, *, verify: bool = True) -> NDArray[Any]:
    """Map a recorded array by `map_array`; UserError if it is not as recorded."""
    info, limits = meta.arrays()[name]
    return map_array(folder / name, info, verify=verify, **limits)


def verify_stored(folder: Path, meta: Meta, name: str) -> None:
    """Compare a recorded file with its record; UserError if it differs or cannot be read."""
    assert meta.tokenizer is not None
    if name == TOKENIZER:
        verify_tokenizer(folder, meta.tokenizer.sha256)
    elif name == SPELLER:
        check_sha256(folder / name, sha256_file(folder / name), meta.speller_sha256)
    else:
        stored_array(folder, meta, name)


def write_meta(folder: Path, meta: Meta) -> None:
    """Replace `meta.json` of a prepared folder, atomically."""
    content = asdict(meta)
    write_json_atomically(folder / META, content | {"checksum": _checksum(content)})


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the keys that a file has, of whatever version, but for its checksum."""
    content = content | {"checksum": ""}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def requested_settings(
    data: DataConfig, tokenizer: TokenizerConfig, classes: ClassesConfig | None
) -> Settings:
    """Collect the settings that affect the prepared files, by section of the configuration."""
    tokenizer_settings = ("kind", "vocab_size", *TOKENIZER_SETTINGS[tokenizer.kind])
    is_independent = data.sequences == "independent"
    data_settings = (*TEXT_SETTINGS, *(SEQUENCE_SETTINGS if is_independent else ()))
    settings = {
        "data": {name: getattr(data, name) for name in data_settings},
        "tokenizer": {name: getattr(tokenizer, name) for name in tokenizer_settings},
    }
    return settings if classes is None else settings | {"classes": asdict(classes)}


def has_speller(settings: Settings) -> bool:
    """Whether a preparation has spellings of unknown words; items have none."""
    is_independent = settings["data"].get("sequences") == "independent"
    return settings["tokenizer"]["kind"] == "words" and not is_independent


def requested_meta(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig | None,
    folder: Path,
    found: Meta | None,
    keep: bool = False,
) -> Meta:
    """Make the record of a preparation in which every stage is still to be done; hashes all files.

    `found` is the present record of the folder; `keep`: its dataset on the hub is not looked up.
    UserError if a file is missing or in the folder.
    """
    settings = requested_settings(data, tokenizer, classes)
    on_hub = _on_hub(data, settings, found, keep)
    paths = {split: input_files(data, split) for split in on_hub or splits(data)}
    given = None if classes is None else classes.file or classes.vectors
    if given is not None:
        paths["classes"] = [Path(data.dir, given)]
    for path in chain.from_iterable(paths.values()):
        if path.resolve().parent == folder.resolve():
            raise DataError(f"{path} is in the prepared folder: the corpus must be elsewhere")
    described = cache(_described)  # every split of a hub folder has the same files
    inputs = {name: list(map(described, files)) for name, files in paths.items()} | on_hub
    training = {file.sha256 for file in inputs["train"]}
    for split in SPLITS[1:] if data.hub is None and data.split == "files" else ():
        for file in inputs.get(split, []):
            if file.sha256 in training:
                logger.warning("%s: %s is in the training split as well", split, file.name)
    return Meta(settings=settings, inputs=inputs)


def find_changes(found: Meta, requested: Meta) -> dict[str, list[str]]:
    """Describe the differences by section or split, except classes that only one record has."""
    changed = setting_changes(found.settings, requested.settings)
    names = {**found.inputs, **requested.inputs}
    if not found.settings.keys() & requested.settings.keys() & {"classes"}:
        names.pop("classes", None)
    for name in names:
        before, after = found.inputs.get(name, []), requested.inputs.get(name, [])
        if before != after:
            changed.setdefault(name, []).extend(_file_differences(name, before, after))
    return changed


def setting_changes(before: Settings, after: Settings) -> dict[str, list[str]]:
    """Describe the settings that differ by section, except classes that only one side has."""
    changed = {}
    for section, new in after.items():
        old = before.get(section, new if section == "classes" else {})
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if keys:
            changed[section] = [f"{section}.{key}: {old.get(key)} → {new.get(key)}" for key in keys]
    return changed


def _on_hub(
    data: DataConfig, settings: Settings, found: Meta | None, keep: bool
) -> dict[str, list[InputFile]]:
    """The dataset on the hub as the input of its splits, as recorded unless it has changed."""
    if data.hub is None or hub_folder(data) is not None:
        return {}
    recorded = dict[str, list[InputFile]]()
    if found and found.complete:
        before = {"data": found.settings.get("data", {})}
        if not setting_changes(before, {"data": settings["data"]}):
            recorded = {split: found.inputs[split] for split in SPLITS if split in found.splits}
            if keep:
                return recorded
    try:
        revision = hub_revision(data)
    except DataError as error:
        if not recorded:
            raise
        logger.warning("%s: it is taken as unchanged", error)
        return recorded
    today = [InputFile(name=str(data.hub), num_bytes=0, sha256=revision)]
    return recorded if recorded.get("train") == today else dict.fromkeys(splits(data), today)


def _described(path: Path) -> InputFile:
    return InputFile(name=path.name, sha256=sha256_file(path), num_bytes=path.stat().st_size)


def _file_differences(split: str, before: list[InputFile], after: list[InputFile]) -> list[str]:
    """What happened to the input files of a split, in words."""
    old, new = (dict.fromkeys(file.name for file in files) for files in (before, after))
    changed = {file.name for file in {*before} ^ {*after}}
    differences = [f"{split}: {name} removed" for name in old if name not in new]
    differences += [f"{split}: {name} added" for name in new if name not in old]
    differences += [f"{split}: {name} changed" for name in new if name in old and name in changed]
    return differences or [f"{split}: order of the files changed"]
