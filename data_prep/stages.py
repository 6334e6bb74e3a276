"""The stages of a preparation: build the tokenizer, encode the splits, make the word classes."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from data_prep.corpus.files import SPLITS
from data_prep.corpus.lines import read_lines
from data_prep.meta import CLASSES, COUNTS, ClassesInfo, Meta, Split, write_meta
from data_prep.settings import ClassesConfig, DataConfig, TokenizerConfig
from data_prep.storage import map_array, write_array
from data_prep.tokenizer.files import TokenizerInfo, load_tokenizer, save_tokenizer
from data_prep.tokenizer.token_file import encode_split
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import count_words, train_sentencepiece

logger = logging.getLogger("data_prep")


@dataclass(frozen=True)
class Stages:
    """The stages of a preparation, with the arguments of `prepare`."""

    data: DataConfig
    tokenizer: TokenizerConfig
    classes: ClassesConfig | None
    folder: Path
    progress: bool

    def run(self, meta: Meta) -> None:
        """Do the stages that are missing from the record `meta`, and record each."""
        if meta.tokenizer is None:
            logger.info("building the vocabulary from the training split")
            meta = replace(meta, tokenizer=self._build_tokenizer())
            write_meta(self.folder, meta)
        missing = [s for s in SPLITS if s in meta.inputs.keys() - meta.splits.keys()]
        tokenizer = load_tokenizer(self.folder) if missing else None
        for split in missing:
            assert tokenizer is not None
            meta = self._encode(meta, cast(Split, split), tokenizer)
            write_meta(self.folder, meta)
        del tokenizer  # large, and most methods of making classes do not need it
        if self.classes is not None and meta.classes is None:
            meta = replace(meta, classes=self._build_classes(meta, self.classes))
        write_meta(self.folder, replace(meta, complete=True))

    def _build_tokenizer(self) -> TokenizerInfo:
        settings, lines = self.tokenizer, read_lines(self.data, "train")
        if settings.kind == "sentencepiece":
            model = train_sentencepiece(lines, settings)
            return save_tokenizer(self.folder, SentencePieceTokenizer(model))
        words, counts = count_words(lines, settings)
        tokenizer = WordTokenizer(
            words, lowercase=settings.lowercase, split_punctuation=settings.split_punctuation
        )
        return save_tokenizer(self.folder, tokenizer, counts)

    def _encode(self, meta: Meta, split: Split, tokenizer: Tokenizer) -> Meta:
        lines, path = read_lines(self.data, split), self.folder / f"{split}.npy"
        info, occurrences = encode_split(lines, tokenizer, path, progress=self.progress)
        logger.info("%s: %d lines, %d tokens, %d unknown", split, info.lines, info.tokens, info.oov)
        meta = replace(meta, splits={**meta.splits, split: info})
        if split != "train":
            return meta
        return replace(meta, counts=write_array(self.folder / COUNTS, [occurrences], "int64"))

    def _build_classes(self, meta: Meta, settings: ClassesConfig) -> ClassesInfo:
        from data_prep.classes.word_classes import build_word_classes  # imports scipy

        assert meta.counts is not None
        logger.info("building word classes by %s", settings.method)
        word_class = build_word_classes(
            map_array(self.folder / COUNTS, meta.counts),
            settings,
            tokens=map_array(self.folder / "train.npy", meta.splits["train"].array),
            words=self._words,
            folder=Path(self.data.dir),
            progress=self.progress,
        )
        return ClassesInfo(
            method=settings.method,
            num_word_classes=int(word_class.max()) + 1,
            shortlist=settings.shortlist,
            array=write_array(self.folder / CLASSES, [word_class], "int32"),
        )

    def _words(self) -> list[str]:
        tokenizer = load_tokenizer(self.folder)
        return [tokenizer.token(id) for id in range(tokenizer.vocab_size)]
