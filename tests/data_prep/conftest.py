"""A small corpus to prepare, shared by the tests of preparation."""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from data_prep.prepare import prepare
from data_prep.prepared import Prepared
from data_prep.settings import ClassesConfig, DataConfig, SplitFiles, TokenizerConfig
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.vocabulary import train_sentencepiece

VOCABULARY = {"vocab.txt", "tokenizer.json", "speller.npz"}
FILES = VOCABULARY | {"train.npy", "valid.npy", "counts.npy", "classes.npy"}


class Corpus:
    def __init__(self, folder: Path) -> None:
        self.folder, self.prepared = folder, folder / "prepared"
        files = SplitFiles(train="train.txt", valid="valid.txt")
        self.data = DataConfig(dir=str(folder), files=files)
        self.tokenizer = TokenizerConfig()
        self.classes: ClassesConfig | None = ClassesConfig(method="frequency")
        self.write("train.txt", "the cat sat\nthe dog ran <unk>\n")
        self.write("valid.txt", "the zebra\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def text(self) -> str:
        prepared = self.prepare()
        return prepared.tokenizer.decode(prepared.tokens("train"))

    def prepare(self, *, keep: bool = False) -> Prepared:
        settings = self.data, self.tokenizer, self.classes
        return prepare(*settings, self.prepared, keep=keep, progress=False)

    def prepare_without(self, module: Any, stage: str) -> None:
        """Prepare until a stage, which fails."""
        with patch.object(module, stage, None), pytest.raises(TypeError):
            self.prepare()

    def written(self) -> dict[str, tuple[int, int]]:
        """The inode of each file, which changes where it is replaced, and its time."""
        stats = {path.name: path.stat() for path in self.prepared.iterdir()}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}

    def rewritten(self) -> set[str]:
        """The files that another preparation writes, `meta.json` aside."""
        for path in self.prepared.iterdir():
            os.utime(path, (0, 0))  # two writes may have one time: clocks of files are coarse
        self.prepare()
        return {name for name, (_, time) in self.written().items() if time} - {"meta.json"}


@pytest.fixture
def corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Corpus:
    caplog.set_level(logging.INFO, "data_prep")
    return Corpus(tmp_path)


def trained_pieces(lines: Iterable[str], size: int, **settings: Any) -> SentencePieceTokenizer:
    config = TokenizerConfig(kind="sentencepiece", vocab_size=size, **settings)
    return SentencePieceTokenizer(train_sentencepiece(lines, config))


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format that the ending of a name says: CSV, parquet or JSON lines."""
    if path.suffix == ".csv":
        csv.write_csv(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
