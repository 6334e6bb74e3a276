"""A vocabulary built from the training lines: counted words, or a sentencepiece model."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.settings import TokenizerConfig
from data_prep.tokenizer.punctuation import EOS, UNK, separate_words
from data_prep.tokenizer.tokenizer import SENTENCEPIECE_SPACE, line_batches, split_at_special
from data_prep.tokenizer.word_index import WordIndex

MAX_SENTENCE_CHARACTERS = 4_096
"""Longest text that sentencepiece learns from at once; its time grows faster than the length."""


class WordCounts(NamedTuple):
    """The words of a corpus, most frequent first, equal counts in code point order."""

    words: WordIndex  # the vocabulary of N words
    counts: NDArray[np.int64]  # [N], which sum to the number of tokens
    others: WordIndex  # the words that are `<unk>`
    num_literal: int  # how often the text has `<unk>` itself


def count_words(lines: Iterable[str], settings: TokenizerConfig) -> WordCounts:
    """Count the words of a corpus.

    `<eos>` is counted once per line; `<unk>` counts its literal occurrences and those of every word
    outside the vocabulary. Memory grows with the number of distinct words (130 bytes per word), not
    with the text.

    >>> found = count_words(["the cat", "the dog"], TokenizerConfig(min_count=2))
    >>> list(found.words), found.counts.tolist(), list(found.others), found.num_literal
    (['<eos>', '<unk>', 'the'], [2, 2, 2], ['cat', 'dog'], 0)
    """
    if settings.vocab_size is not None and settings.vocab_size < 3:
        raise DataError(
            f"tokenizer.vocab_size is {settings.vocab_size}:"
            f" expected at least 3, {UNK} and {EOS} included"
        )
    import pyarrow
    from pyarrow import compute

    counter, num_lines = Counter({UNK: 0, EOS: 0}), 0  # ids 0 and 1
    for batch in line_batches(lines):
        num_lines += len(batch)
        text = separate_words(batch, settings.lowercase, settings.split_punctuation)
        counter.update(text.split())
    words = pyarrow.array(counter, "large_string", size=len(counter))
    counts = np.fromiter(counter.values(), np.int64, len(counter))
    del counter  # large
    table = pyarrow.table({"word": words, "count": counts})
    keys = [("count", "descending"), ("word", "ascending")]
    order = compute.sort_indices(table, sort_keys=keys).to_numpy().view(np.int64)
    order = order[order > 1]
    num_included = int((counts[2:] >= settings.min_count).sum())
    if settings.vocab_size is not None:
        num_included = min(num_included, settings.vocab_size - 2)
    order, others = order[:num_included], order[num_included:]
    num_literal = int(counts[0])
    counts[0] += counts[others].sum()
    counts[1] += num_lines
    for id, word in enumerate((UNK, EOS)):
        is_tied = counts[order] == counts[id]
        before = compute.less(words.take(order[is_tied]), word)
        place = (counts[order] > counts[id]).sum() + before.to_numpy(zero_copy_only=False).sum()
        order = np.insert(order, place, id)
    indices = (_word_index(words.take(some)) for some in (order, others))
    return WordCounts(next(indices), counts[order], next(indices), num_literal)


def _word_index(words: Any) -> WordIndex:
    """The words of a pyarrow array that was taken from another."""
    _, starts, text = words.buffers()
    starts = np.frombuffer(starts, np.int64)[: len(words) + 1]
    return WordIndex(np.frombuffer(text or b"", np.uint8), starts)


def train_sentencepiece(lines: Iterable[str], settings: TokenizerConfig, seed: int = 1) -> bytes:
    """Train a sentencepiece model and return its file's content; equal arguments, equal bytes.

    Long lines are split, so that sentencepiece skips none. If there are more lines than
    `max_sentences`, a sample is drawn by the seed. UserError if `vocab_size` is missing, too small
    for the characters or too large for the text, or if the text is empty.
    """
    import sentencepiece

    if settings.vocab_size is None:
        raise DataError(
            "tokenizer.vocab_size is not set: tokenizer.kind sentencepiece needs a number of pieces"
        )
    if settings.byte_fallback and settings.model_type == "word":
        raise DataError(
            "tokenizer.byte_fallback requires another tokenizer.model_type than word, in which the"
            " space before a word has no piece"
        )
    sentences = chain.from_iterable(map(_sentences, lines))
    # sentencepiece's own sampling depends on more than its seed.
    drawn = reservoir_sample(sentences, settings.max_sentences, Random(seed))
    model = _trained(drawn, settings)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    if settings.model_type == "word" or pieces.piece_to_id(SENTENCEPIECE_SPACE) != pieces.unk_id():
        return model
    # In long lines without spaces, `character_coverage` leaves out the space before each line.
    return _trained(drawn, settings, required_chars=SENTENCEPIECE_SPACE)


def _trained(sentences: Sequence[str], settings: TokenizerConfig, **options: Any) -> bytes:
    """A model of sentences, with further options of sentencepiece; raises as its caller."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=settings.model_type,
            vocab_size=settings.vocab_size,
            byte_fallback=settings.byte_fallback,
            character_coverage=settings.character_coverage,
            max_sentence_length=4 * MAX_SENTENCE_CHARACTERS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            unk_piece=UNK,
            eos_piece=EOS,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            num_threads=16,  # fixed, because the sums of unigram training depend on it
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        raise DataError(_training_mistake(str(error), settings.vocab_size)) from error
    return model.getvalue()


def reservoir_sample(sentences: Iterable[str], size: int, random: Random) -> list[str]:
    """Draw `size` of the sentences uniformly; all of them if there are no more."""
    drawn: list[str] = []
    for number, sentence in enumerate(sentences):
        if number < size:
            drawn.append(sentence)
        elif (place := int(random.random() * (number + 1))) < size:
            drawn[place] = sentence
    return drawn


def _sentences(line: str) -> Iterator[str]:
    """Split a line as its encoding does, and into texts of at most `MAX_SENTENCE_CHARACTERS`."""
    for text in split_at_special(line)[::2]:
        start = 0
        while len(text) - start > MAX_SENTENCE_CHARACTERS:
            end = start + MAX_SENTENCE_CHARACTERS
            cut = text.rfind(" ", start + 1, end)
            yield text[start : cut if cut > 0 else end]
            start = cut if cut > 0 else end
        yield text[start:]


def _training_mistake(message: str, vocab_size: int | None) -> str:
    if "sentences_.empty()" in message:
        return "the training split has no text that a sentencepiece model could be built from"
    if too_high := re.search(r"value <= (\d+)", message):
        return (
            f"tokenizer.vocab_size is {vocab_size}:"
            f" expected at most {too_high[1]}, all that the training split provides"
        )
    if too_low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"tokenizer.vocab_size is {vocab_size}: expected at least {too_low[1]}, a piece for"
            " every character of the training split (or lower tokenizer.character_coverage)"
        )
    return f"sentencepiece could not build a model of the training split: {message}"
