"""Which tree of softmaxes a configuration means: `output.tree` over the words of the prepared
data.
"""

import math

import torch

from data_prep.artifacts import Prepared
from data_prep.settings import UserError
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
    if output.tree == "two_level":
        word_class = torch.from_numpy(prepared.word_class().astype("int64"))
        if output.head > vocab_size:
            raise UserError(f"output.head = {output.head} is more than {vocab_size} words")
        return ClassTree.two_level(word_class, output.head, torch.tensor(prepared.counts()))
    tokenizer = prepared.tokenizer()
    words = [tokenizer.token(word) for word in range(vocab_size)]
    try:
        return ClassTree.from_file(output.tree, words)
    except FileNotFoundError as error:
        raise UserError(
            f"output.tree: {output.tree} is neither full, two_level, balanced, huffman nor a file"
        ) from error
    except ValueError as error:
        raise UserError(f"output.tree: {error}") from error
