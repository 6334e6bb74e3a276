"""One text file, cut into a training, a validation and a test split.

The units that are cut apart are lines, or documents, which empty lines separate. Of every `period`
units one is validation and one is test text, spread evenly over the file. A sample decides what a
large file is like; the file is read once, to write the splits.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_prep.corpus.lines import bad_utf8, raw_lines
from data_prep.corpus.loader import COMPRESSED
from data_prep.errors import UserError
from data_prep.settings import BYTE_ORDER_MARK
from data_prep.storage import open_to_read

Unit = Literal["lines", "documents"]

SAMPLE_BYTES = 1 << 22
SAMPLE_BLOCKS = 16
"""Places of a large file, evenly spaced, at which the sample is read."""
EXPANSION = 4
"""Compressed text is assumed to be this many times as large."""
MIN_UNITS = 20
"""Texts of fewer units are not cut; documents are preferred to lines from here on."""
HELD_OUT_BYTES = 1_000_000
"""Size of the validation and of the test split of large texts: 200,000 words."""


@dataclass(frozen=True)
class Sample:
    """Some of a text.

    Attributes:
        lines: whole lines of the text.
        share: size of the sample relative to the text; 1 if it is the whole text.
        num_bytes: size of the text, estimated if it is compressed.
    """

    lines: list[str]
    share: float
    num_bytes: int

    @property
    def unit(self) -> Unit:
        """What the text is best cut into."""
        return "documents" if self.num_units("documents") >= MIN_UNITS else "lines"

    def num_units(self, unit: Unit) -> int:
        """Number of lines or documents in the sample that are not empty."""
        filled = [bool(line.strip()) for line in self.lines]
        if unit == "lines":
            return sum(filled)
        return sum(
            now and not before for before, now in zip([False, *filled], filled, strict=False)
        )

    @property
    def period(self) -> int:
        """One of so many units is validation and one is test text."""
        return max(MIN_UNITS, self.num_bytes // HELD_OUT_BYTES)


def read_sample(path: Path) -> Sample:
    """Read a whole text, or `SAMPLE_BYTES` of a large one: of a compressed one the beginning.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has no word.
    """
    open_to_read(path).close()
    size = path.stat().st_size
    compressed = path.suffix in COMPRESSED
    total = size * EXPANSION if compressed else size
    if compressed or size <= SAMPLE_BYTES:
        blocks = [_first_lines(path)]
    else:
        blocks = list(_spread_blocks(path, size))
    lines = [line.removeprefix(BYTE_ORDER_MARK) for block in blocks for line in block]
    if not any(line.strip() for line in lines):
        raise UserError(f"{path}: the text has no word")
    num_read = sum(len(line.encode()) + 1 for line in lines)
    whole = num_read < SAMPLE_BYTES if compressed else size <= SAMPLE_BYTES
    return Sample(lines, 1.0 if whole else num_read / total, num_read if whole else total)


def _first_lines(path: Path) -> list[str]:
    lines, num_bytes = [], 0
    for number, raw in enumerate(raw_lines(path), start=1):
        lines.append(_decoded(raw, path, number))
        num_bytes += len(raw) + 1
        if num_bytes >= SAMPLE_BYTES:
            break
    return lines


def _spread_blocks(path: Path, size: int) -> Iterator[list[str]]:
    """The whole lines within each block; a block within one line is that part of the line."""
    block_bytes = SAMPLE_BYTES // SAMPLE_BLOCKS
    with path.open("rb") as file:
        for i in range(SAMPLE_BLOCKS):
            file.seek((size - block_bytes) * i // (SAMPLE_BLOCKS - 1))
            # The ends may cut a character; the splits are checked byte by byte when written.
            text = file.read(block_bytes).decode(errors="ignore").replace("\r\n", "\n")
            lines = text.replace("\r", "\n").split("\n")
            yield lines[1:-1] or lines


def write_splits(
    source: Path, folder: Path, unit: Unit, period: int, held_out: list[str]
) -> dict[str, int]:
    """Write `train.txt` and the splits `held_out` (of valid, test) to a folder.

    Unit i, from 0, belongs to test if i mod period is period - 1, to valid if it is period / 2 - 1
    rounded down, and else to train. The empty lines after a document belong to it.

    Returns:
        Number of units of each split.

    Raises:
        UserError: the text is not UTF-8 or has a NUL character.
    """
    place = {"valid": period // 2 - 1, "test": period - 1}
    split_of = {place[split]: split for split in held_out}
    num_units = dict.fromkeys(["train", *held_out], 0)
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.txt").open("wb")) for split in num_units
        }
        index, split, after_empty = -1, "train", True
        for number, raw in enumerate(raw_lines(source), start=1):
            _decoded(raw, source, number)
            empty = not raw.strip()
            if not empty and (unit == "lines" or after_empty):
                index += 1
                split = split_of.get(index % period, "train")
                num_units[split] += 1
            after_empty = empty
            files[split].write(raw + b"\n")
    return num_units


def _decoded(raw: bytes, path: Path, number: int) -> str:
    mistake = "a NUL character" if b"\0" in raw else bad_utf8(raw)
    if mistake:
        raise UserError(f"{path}, line {number}: {mistake}")
    return raw.decode()
