"""The record of a prepared folder, `meta.json`: how the folder was made and which stages are done.

`meta.json` describes finished stages only and is replaced after each of them. File names are fixed
here and in `tokenizer.serialization`; none is ever taken from the content of a file.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_prep.errors import UserError
from data_prep.settings import STRICT, NonNegative, Positive
from data_prep.storage import ArrayInfo, read_json, write_json_atomically
from data_prep.tokenizer.serialization import TokenizerInfo
from data_prep.tokenizer.token_file import SplitInfo

META = "meta.json"
FORMAT_VERSION = 1
"""The format of `meta.json`."""
COUNTS = "counts.npy"
CLASSES = "classes.npy"

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the corpus as it was when it was read."""

    __pydantic_config__ = STRICT

    name: str
    """Without the folder, so that a corpus can be moved."""
    num_bytes: NonNegative
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ClassesInfo:
    """What is recorded about the word classes."""

    __pydantic_config__ = STRICT

    method: str
    num_word_classes: Positive
    shortlist: NonNegative
    """Number of most frequent words that are in no class."""
    array: ArrayInfo


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The content of `meta.json`."""

    __pydantic_config__ = STRICT

    format_version: int = FORMAT_VERSION
    settings: dict[str, dict[str, Any]]
    """Sections `data`, `tokenizer` and, if needed, `classes`: the keys that affect the files."""
    inputs: dict[str, list[InputFile]]
    """The corpus files of each split in reading order; under `classes`, the word → class file."""
    tokenizer: TokenizerInfo | None = None
    splits: dict[Split, SplitInfo] = field(default_factory=dict)
    counts: ArrayInfo | None = None
    classes: ClassesInfo | None = None
    """None in a complete folder: it was prepared without classes."""
    complete: bool = False


def read_meta(folder: Path) -> Meta | None:
    """Read `meta.json`, None if there is none; UserError if damaged or of another version."""
    path = folder / META
    if not path.exists():
        return None
    meta: Meta = read_json(path, Meta, FORMAT_VERSION)
    has_tokens = None not in (meta.tokenizer, meta.counts, meta.splits.get("train"))
    has_needed_classes = ("classes" in meta.settings) == (meta.classes is not None)
    if meta.complete and not (has_tokens and has_needed_classes):
        raise UserError(f"{path} is damaged: it is marked complete, but a stage is missing")
    for array in (meta.counts, meta.classes and meta.classes.array):
        if array and meta.tokenizer and array.length != meta.tokenizer.vocab_size:
            raise UserError(f"{path} is damaged: an array has not one value for each word")
    return meta


def write_meta(folder: Path, meta: Meta) -> None:
    """Replace `meta.json` of a prepared folder, atomically."""
    write_json_atomically(folder / META, asdict(meta))
