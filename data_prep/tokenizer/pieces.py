"""The pieces that the words of a vocabulary consist of, by a unigram model of these words."""

import io
import logging
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizer.word_index import WORDS_PER_CHUNK

MAX_PIECES = 8
"""Most pieces of a word; the others at its end are left out."""
MAX_WORDS = 1_000_000
"""Most words that pieces are found in, 1.1 kB of memory each; of more, every k-th."""
MAX_COUNT = 50
"""A more frequent word counts as one of this frequency: else it would be a piece as a whole."""
RARE = "\N{REPLACEMENT CHARACTER}"
"""Takes the place of characters that have no piece."""

logger = logging.getLogger("data_prep")


def find_pieces(
    words: Sequence[str],
    counts: NDArray[np.int64],
    num_pieces: int,
    without: Collection[int] = (),
    others: Sequence[str] = (),
) -> NDArray[np.int32]:
    """Divide the words of a vocabulary, and then others, into the pieces of the vocabulary.

    The characters have at most half of the pieces, of which there are at most `num_pieces`, 8 or
    more; rarer characters share one. The words with the ids `without` have no pieces. Equal
    arguments, equal pieces.

    Returns:
        int32 [N + others, L] in [0, num_pieces), L ≤ `MAX_PIECES`: the pieces of each, then -1.

    Source: unigram model: Kudo 2018.

    Example:
        >>> words = ["<eos>", "walks", "walked", "walking", "talks", "talked", "talking"]
        >>> pieces = find_pieces(words, np.ones(7, np.int64), 20, without=[0])
        >>> walked, talked = ({*row} - {-1} for row in pieces[[2, 5]].tolist())
        >>> pieces[0].max(), len(walked & talked) > 0
        (np.int32(-1), True)
    """
    import sentencepiece

    characters = Counter("".join(words)).most_common()
    rare = {ord(character): RARE for character, _ in characters[num_pieces // 2 - 2 :]}
    spelled = [word.translate(rare) if rare else word for word in (*words, *others)]
    excluded = set(without)
    known = [id for id in range(len(words)) if id not in excluded]
    if not known:
        return np.full((len(words) + len(others), 1), -1, np.int32)
    known = known[:: -(-len(known) // MAX_WORDS)]
    logger.info("finding %d pieces of %d words", num_pieces, len(known))
    counted = (f"{spelled[id]}\t{min(max(1, counts[id]), MAX_COUNT)}" for id in known)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=counted,
        model_writer=model,
        input_format="tsv",
        vocab_size=num_pieces,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        bos_id=-1,
        eos_id=-1,
        seed_sentencepiece_size=max(50_000, 10 * num_pieces),
        shrinking_factor=0.5,
        num_sub_iterations=1,  # with the two lines above, in less than half the time
        num_threads=1,  # the sums of unigram training depend on it
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = np.full((len(spelled), MAX_PIECES), -1, np.int32)
    for first in range(0, len(spelled), WORDS_PER_CHUNK):
        found = processor.encode(spelled[first : first + WORDS_PER_CHUNK])
        for row, ids in zip(pieces[first:], found, strict=False):
            row[: len(ids)] = ids[:MAX_PIECES]
    pieces[[*excluded]] = -1
    return np.ascontiguousarray(pieces[:, : max(1, int((pieces >= 0).sum(1).max()))])
