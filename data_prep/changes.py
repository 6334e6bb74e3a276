"""What differs between the record of a prepared folder and the settings and files of a request."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.corpus.loader import splits
from data_prep.corpus.paths import SPLITS, hub_folder, input_files
from data_prep.errors import UserError
from data_prep.meta import InputFile, Meta
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.storage import sha256_file

TEXT_SETTINGS = ("format", "hub", "hub_config", "text_field", "keep_empty_lines")
"""Settings of `data` that change the text; the others locate files, whose content is hashed."""
TOKENIZER_SETTINGS = {
    "words": ("min_count", "lowercase", "split_punctuation"),
    "sentencepiece": ("model_type", "byte_fallback", "character_coverage", "max_sentences"),
}

Settings = dict[str, dict[str, Any]]

logger = logging.getLogger("data_prep")


def requested_settings(
    data: DataConfig, tokenizer: TokenizerConfig, classes: ClassesConfig | None
) -> Settings:
    """Collect the settings that affect the prepared files, by section of the configuration."""
    tokenizer_settings = ("kind", "vocab_size", *TOKENIZER_SETTINGS[tokenizer.kind])
    settings = {
        "data": {name: getattr(data, name) for name in TEXT_SETTINGS},
        "tokenizer": {name: getattr(tokenizer, name) for name in tokenizer_settings},
    }
    return settings if classes is None else settings | {"classes": asdict(classes)}


def requested_meta(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    classes: ClassesConfig | None,
    folder: Path,
    found: Meta | None,
) -> Meta:
    """Make the record of a preparation in which every stage is still to be done; hashes all files.

    `found` is the present record of the folder. UserError if a file is missing or in the folder.
    """
    settings = requested_settings(data, tokenizer, classes)
    paths = {split: input_files(data, split) for split in _splits(data, settings, found)}
    if classes is not None and classes.method == "file" and classes.file is not None:
        paths["classes"] = [Path(data.dir, classes.file)]
    for path in chain.from_iterable(paths.values()):
        if path.resolve().parent == folder.resolve():
            raise UserError(f"{path} is in the prepared folder: the corpus must be elsewhere")
    described = cache(_described)  # every split of a hub folder has the same files
    inputs = {name: described(tuple(files)) for name, files in paths.items()}
    _warn_of_overlap(inputs, data)
    return Meta(settings=settings, inputs=inputs)


def find_changes(found: Meta, requested: Meta) -> dict[str, list[str]]:
    """Describe the differences by section or split, except classes that only one record has."""
    changed: dict[str, list[str]] = {}
    for name, (before, after) in setting_changes(found.settings, requested.settings):
        changed.setdefault(name.split(".")[0], []).append(f"{name}: {before} → {after}")
    names = {**found.inputs, **requested.inputs}
    if not found.settings.keys() & requested.settings.keys() & {"classes"}:
        names.pop("classes", None)
    for name in names:
        before, after = found.inputs.get(name, []), requested.inputs.get(name, [])
        for difference in _file_differences(before, after):
            changed.setdefault(name, []).append(f"{name}: {difference}")
    return changed


def setting_changes(before: Settings, after: Settings) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield `section.key` and its two values for every setting that differs.

    A setting that is not recorded counts as None. Classes that only one side has are skipped.
    """
    for section, new in after.items():
        if section == "classes" and section not in before:
            continue
        old = before.get(section, {})
        for key in {**old, **new}:
            if old.get(key) != new.get(key):
                yield f"{section}.{key}", (old.get(key), new.get(key))


def _splits(data: DataConfig, settings: Settings, found: Meta | None) -> list[str]:
    """The splits of the corpus; those of a hub dataset are assumed not to change."""
    on_hub = data.hub is not None and hub_folder(data) is None
    if on_hub and found and found.complete:
        before = {"data": found.settings.get("data", {})}
        if not any(setting_changes(before, {"data": settings["data"]})):
            return [split for split in SPLITS if split in found.splits]
    return splits(data)


def _described(paths: tuple[Path, ...]) -> list[InputFile]:
    return [
        InputFile(name=path.name, sha256=sha256_file(path), num_bytes=path.stat().st_size)
        for path in paths
    ]


def _warn_of_overlap(inputs: dict[str, list[InputFile]], data: DataConfig) -> None:
    """Warn about files that are in the training split and in another one.

    Hub folders are skipped, because all of their files are listed for every split.
    """
    training = {file.sha256 for file in inputs["train"]}
    for split in {"valid", "test"} & inputs.keys() if data.hub is None else ():
        for file in inputs[split]:
            if file.sha256 in training:
                logger.warning("%s: %s is in the training split as well", split, file.name)


def _file_differences(before: Sequence[InputFile], after: Sequence[InputFile]) -> list[str]:
    """What happened to the input files of a split, in words; empty if they are the same."""
    if before == after:
        return []
    old, new = map(_by_name, (before, after))
    differences = [f"{name} removed" for name in old if name not in new]
    differences += [f"{name} added" for name in new if name not in old]
    differences += [f"{name} changed" for name in new if name in old and old[name] != new[name]]
    return differences or ["order of the files changed"]


def _by_name(files: Iterable[InputFile]) -> dict[str, InputFile]:
    """The files by name; further files of the same name are numbered."""
    numbers: Counter[str] = Counter()
    found = {}
    for file in files:
        numbers[file.name] += 1
        number = numbers[file.name]
        found[f"{file.name} ({number})" if number > 1 else file.name] = file
    return found
