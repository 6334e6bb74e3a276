"""Which tree of softmaxes a configuration means: `output.tree` over the words of the prepared
data.
"""

import math
from itertools import pairwise

import torch

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from lm.config import Config
from lm.output import ClassTree


def build_tree(config: Config, prepared: Prepared) -> ClassTree:
    """The tree that `output.tree` names, over the words of the prepared data.

    Raises:
        UserError: if the tree's file is missing or does not fit the vocabulary.
    """
    output, vocab_size = config.output, prepared.vocab_size
    if output.tree == "full":
        return ClassTree.full(vocab_size)
    if output.tree == "balanced":
        return ClassTree.balanced(
            vocab_size, output.branching or max(2, math.isqrt(vocab_size - 1) + 1)
        )
    if output.tree == "huffman":
        return ClassTree.huffman(torch.tensor(prepared.counts()), output.arity)
    if output.tree == "adaptive":
        counts = torch.tensor(prepared.counts())
        head, *others = output.cutoffs or [max(1, vocab_size // 10), vocab_size // 3]
        if not 0 < head < vocab_size or not all(
            a < b for a, b in pairwise([head, *others, vocab_size])
        ):
            raise UserError(
                f"output.cutoffs: expected rising numbers under {vocab_size}, got {output.cutoffs}"
            )
        rank = torch.empty_like(counts)
        rank[counts.argsort(descending=True, stable=True)] = torch.arange(vocab_size)
        cluster = torch.bucketize(rank, torch.tensor(others, dtype=rank.dtype), right=True)
        return ClassTree.two_level(cluster, head, counts)
    if output.tree == "two_level":
        word_class = torch.from_numpy(prepared.word_class().astype("int64"))
        return ClassTree.two_level(word_class, prepared.head, torch.tensor(prepared.counts()))
    tokenizer = prepared.tokenizer()
    words = [tokenizer.token(word) for word in range(vocab_size)]
    try:
        return ClassTree.from_file(output.tree, words)
    except FileNotFoundError as error:
        raise UserError(
            f"output.tree: {output.tree} is no known tree (full, two_level, balanced, huffman,"
            " adaptive) and no file"
        ) from error
    except ValueError as error:
        raise UserError(f"output.tree: {error}") from error
