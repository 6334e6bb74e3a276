"""Generation: continuations of a prompt, drawn token by token from a trained model."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from data_prep.tokenizer.files import load_tokenizer
from lm.model.files import load_model
from lm.model.language_model import LanguageModel

PROMPT_CHUNK_TOKENS = 1024
"""Tokens of a prompt read per call; a Transformer's memory grows with their square."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    *,
    num_tokens: int,
    num_samples: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1,
) -> Iterator[Tensor]:
    """Continues a prompt in several independent samples.

    Example:
        >>> from lm.model.lstm import LSTM
        >>> from lm.output import ClassTree, HierarchicalSoftmax
        >>> softmax = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
        >>> _ = torch.nn.init.zeros_(softmax.weight)  # P = 1/4, 1/4, 1/2
        >>> model = LanguageModel(LSTM(4, 4, 1), softmax, embedding_size=4).eval()
        >>> tokens = generate(model, [0], num_tokens=3, num_samples=2, temperature=0)
        >>> torch.stack(list(tokens), dim=1).tolist()
        [[2, 2, 2], [2, 2, 2]]

    Args:
        model: in evaluation mode.
        prompt: at least one token id (`<eos>` at the beginning of a text).
        num_tokens: number of tokens to generate.
        num_samples: B, number of samples.
        temperature, top_k, top_p: as in `HierarchicalSoftmax.sample`.
        seed: seed of the random numbers; the same seed gives the same tokens.

    Yields:
        [B] int64, the next token of each sample.

    Raises:
        ValueError: if the prompt is empty or an option is out of range.
    """
    if not prompt:
        raise ValueError("the prompt must have at least one token")
    generator = torch.Generator(model.device).manual_seed(seed)
    tokens = torch.tensor(prompt, device=model.device)[:, None].expand(-1, num_samples)
    state = model.init_state(num_samples)
    for _ in range(num_tokens):
        for chunk in torch.split(tokens, PROMPT_CHUNK_TOKENS):
            hidden, new_state = model(chunk, state)
            assert new_state is not None
            state = new_state
        drawn = model.output.sample(
            hidden[-1], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
        yield drawn
        tokens = drawn[None, :]


def generate_text(
    folder: Path,
    prompt: str,
    *,
    num_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1,
) -> Iterator[Iterator[str]]:
    """Continues a text with the model saved in a folder.

    Args:
        folder: run folder or exported model.
        prompt: text to continue, empty for the beginning of a text. Lines are separated by `<eos>`.
        num_tokens: number of tokens to generate.
        num_samples, temperature, top_k, top_p, seed: as in `generate`.

    Yields:
        The text of each sample without the prompt, in pieces. A single sample is streamed: its
        pieces are available as soon as they are drawn.

    Raises:
        UserError: if the folder has no model.
        ValueError: if an option is out of range.
    """
    model, description = load_model(folder)
    tokenizer = load_tokenizer(folder)
    prompt_ids = [description.eos_id]
    for i, line in enumerate(prompt.split("\n") if prompt else []):
        prompt_ids += ([description.eos_id] if i else []) + tokenizer.encode(line)
    steps = generate(
        model,
        prompt_ids,
        num_tokens=num_tokens,
        num_samples=num_samples,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    prompt_length = len(tokenizer.decode(prompt_ids[1:]))

    def text(ids: Iterator[int]) -> Iterator[str]:
        """The decoded ids without the prompt."""
        skip = prompt_length
        for piece in tokenizer.stream_decode(chain(prompt_ids[1:], ids)):
            yield piece[skip:]
            skip = max(0, skip - len(piece))

    if num_samples == 1:
        yield text(int(drawn) for drawn in steps)
    else:
        for ids in torch.stack(list(steps), dim=1).tolist():
            yield text(iter(ids))
