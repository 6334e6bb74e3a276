"""Small random models in fp64, and what they predict by one pass over the whole text."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from data_prep.tokenizer.tokenizer import Tokenizer
from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model.build import build_model
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.run import TrainedRun


def small_model(
    tree: ClassTree, backbone: Any = "lstm", context: int = 6, **settings: Any
) -> LanguageModel:
    """A model of hidden size 8, with parameters drawn for predictions that differ."""
    sections = {"layers": 1} | settings
    config = ModelConfig(backbone=backbone, hidden=8, heads=2, **sections)
    model = build_model(config, OutputConfig(), WordTable(), tree, context).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model


def run_of(model: LanguageModel, tokenizer: Tokenizer, context: int = 6) -> TrainedRun:
    """A run without a folder."""
    run, description = TrainedRun(Path("absent")), SimpleNamespace(context=context)
    vars(run).update(model=model, tokenizer=tokenizer, description=description)
    return run


def new_model(
    tree: ClassTree | None,
    parts: dict[str, Any],
    *,
    tied: bool = False,
    row_wise: bool = False,
    **settings: Any,
) -> LanguageModel:
    """A model of hidden size 12 as training begins with it, the same each time.

    Rows of the output layer are 12 numbers and 4 zeros; without a tree, it is the adaptive softmax.
    """
    torch.manual_seed(0)
    config = ModelConfig(**{"hidden": 12, "heads": 2, **settings})
    table = WordTable(tied=tied, row_wise=row_wise)
    return build_model(config, OutputConfig(), table, tree, 5, **parts).double()


def words(num_words: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [T, B] = [5, 3]."""
    tokens = torch.randint(num_words, (6, 3), generator=torch.Generator().manual_seed(1))
    return tokens[:-1], tokens[1:]


@torch.no_grad()
def log_probs(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """log P of all words [T, N] after each token of a text."""
    hidden, _ = model(torch.tensor(tokens)[:, None])
    return model.output.log_prob(hidden[:, 0])
