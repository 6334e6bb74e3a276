"""One text file, cut into a training, a validation and a test split.

The units that are cut apart are lines; documents, which empty lines separate; or rows of a table,
so that a cell of several lines is in one split. Of every `period` units one is validation and one
is test text, spread evenly over the file. A sample decides what a large file is like; a plain one
with many documents or lines is read as a whole only to write the splits.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from data_prep.corpus.formats import is_compressed
from data_prep.corpus.lines import TextFile
from data_prep.errors import DataError
from data_prep.settings import BYTE_ORDER_MARK

Unit = Literal["lines", "documents", "rows"]

SAMPLE_BYTES = 1 << 22
SAMPLE_BLOCKS = 16
"""Places of a large file, evenly spaced, at which the sample is read."""
MIN_UNITS = 20
"""Texts of fewer units are not cut."""
HELD_OUT_BYTES = 1_000_000
"""The validation and the test split of a large text have this size: 200,000 words."""
MIN_HELD_OUT_BYTES = 10_000
"""Smaller validation and test splits are not made of whole documents: 2,000 words."""


@dataclass(frozen=True)
class Sample:
    """Some of a text."""

    lines: list[str]  # whole lines
    share: float  # relative to the size of the text; 1 if it is the whole text
    num_bytes: int  # size of the text, decompressed
    num_counted: int = 0  # units of the whole text that are not empty; 0: they were not counted

    def num_units(self, unit: Unit) -> int:
        """Number of lines or documents in the sample, or of rows in all, that are not empty."""
        return self.num_counted if unit == "rows" else _num_units(self.lines, unit)

    @property
    def period(self) -> int:
        """P: of P units, one is validation and one is test text."""
        most = self.num_counted or self.num_bytes  # of a few long units, some are held out too
        return max(MIN_UNITS, min(self.num_bytes // HELD_OUT_BYTES, most))


Sizes = dict[str, tuple[int, int]]
"""The numbers of units that are not empty and bytes of each split."""


def check_file(path: Path) -> None:
    """UserError unless the path is that of a file, which can be read twice."""
    if not path.is_file():  # a pipe cannot be read twice
        is_read_twice = path.exists() or str(path) == "-"
        problem = "give a file, which is read more than once" if is_read_twice else "no such file"
        problem = "a folder: give a file" if path.is_dir() else problem
        raise DataError(f"{path}: {problem}")


def read_sample(text: TextFile) -> Sample:
    """Read a whole text, or `SAMPLE_BYTES` of a large one: the beginning unless it is plain.

    UserError if the file cannot be read, is not UTF-8, or has no word.
    """
    num_bytes, num_rows, num_read, lines = text.path.stat().st_size, 0, 0, list[str]()
    if text.format == "text" and num_bytes > SAMPLE_BYTES and not is_compressed(text.path):
        next(text.lines())  # which is an error if it is no text
        lines = [line.removeprefix(BYTE_ORDER_MARK) for line in _spread_lines(text.path, num_bytes)]
        num_read = sum(len(line.encode()) + 1 for line in lines)
    else:
        num_bytes = 0
        for row in text.rows():
            num_rows += text.format != "text" and any(map(str.strip, row))
            for line in row:
                num_bytes += len(line.encode()) + 1
                if num_read < SAMPLE_BYTES:
                    lines.append(line)
                    num_read = num_bytes
    if not any(line.strip() for line in lines):
        raise DataError(f"{text.path}: the text has no word")
    return Sample(lines, min(1.0, num_read / num_bytes), num_bytes, num_rows)


def count_units(text: TextFile, sample: Sample, unit: Unit) -> Sample:
    """A sample of a text whose units are counted in the whole text if it has few itself."""
    few = 2 * MIN_UNITS  # as parts of longer lines are among them
    if unit == "rows" or sample.share == 1 or sample.num_units(unit) >= few:
        return sample
    return replace(sample, num_counted=_num_units(text.lines(), unit))


def _num_units(lines: Iterable[str], unit: Unit) -> int:
    """Number of lines or documents that are not empty."""
    filled = (bool(line.strip()) for line in lines)
    if unit == "lines":
        return sum(filled)
    return sum(now and not before for before, now in pairwise(chain([False], filled)))


def _spread_lines(path: Path, num_bytes: int) -> Iterator[str]:
    """The whole lines within each block; a block within one line is that part of the line."""
    block_bytes = SAMPLE_BYTES // SAMPLE_BLOCKS
    with path.open("rb") as file:
        for i in range(SAMPLE_BLOCKS):
            file.seek((num_bytes - block_bytes) * i // (SAMPLE_BLOCKS - 1))
            # The ends may cut a character; the splits are checked byte by byte when written.
            text = file.read(block_bytes).decode(errors="ignore").replace("\r\n", "\n")
            lines = text.replace("\r", "\n").split("\n")
            yield from lines[1:-1] or lines


def split_text(
    source: TextFile,
    folder: Path,
    sample: Sample,
    held_out: Sequence[str],
    unit: Unit | None = None,
) -> tuple[Unit, Sizes]:
    """Write splits by `write_splits`; return what was cut apart, and the size of each split.

    Without a `unit`, documents are cut apart if there are enough of them for splits of a useful
    size, and otherwise lines.
    """
    chosen: Unit = unit or ("documents" if sample.num_units("documents") >= MIN_UNITS else "lines")
    sizes = write_splits(source, folder, chosen, sample.period, held_out)
    if unit is None and chosen == "documents":
        largest = sizes["train"][1] // 4
        if not all(MIN_HELD_OUT_BYTES <= sizes[split][1] <= largest for split in held_out):
            chosen = "lines"
            sizes = write_splits(source, folder, chosen, sample.period, held_out)
    return chosen, sizes


def write_splits(
    source: TextFile, folder: Path, unit: Unit, period: int, held_out: Sequence[str]
) -> Sizes:
    """Write `train.txt` and the splits `held_out` (of valid, test) to a folder.

    Unit i, from 0, belongs to test if i mod period is period - 1, to valid if it is period / 2 - 1
    rounded down, and else to train. The empty lines after a document belong to it. UserError if the
    text is not UTF-8 or has a NUL character.
    """
    place = {"valid": period // 2 - 1, "test": period - 1}
    split_of = {place[split]: split for split in held_out}
    num_units = dict.fromkeys(["train", *held_out], 0)
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.txt").open("wb")) for split in num_units
        }
        index, split, after_empty = -1, "train", True
        rows = ([line] for line in source.lines()) if unit == "lines" else source.rows()
        for lines in tqdm(rows, desc="splitting", unit=" lines", disable=None):
            empty = not any(map(str.strip, lines))
            if not empty and (unit != "documents" or after_empty):
                index += 1
                split = split_of.get(index % period, "train")
                num_units[split] += 1
            after_empty = empty
            files[split].writelines(line.encode() + b"\n" for line in lines)
        return {split: (num_units[split], file.tell()) for split, file in files.items()}
