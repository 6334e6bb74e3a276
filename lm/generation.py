"""Text from a model: one word after another, each drawn class first, then within the class."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from data_prep.prepared import load_tokenizer
from lm.model.language_model import LanguageModel
from lm.model.files import load_model

WORDS_AT_ONCE = 1024
"""Of a prompt; the memory of a Transformer grows with their square."""


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
    """Continue a prompt, in several samples side by side.

    Args:
        model: in evaluation mode.
        prompt: word ids read first, at least one (`<eos>` for the beginning of a text).
        num_tokens: to generate.
        num_samples: B, independent continuations.
        temperature, top_k, top_p: as in `HierarchicalSoftmax.sample`, with respect to the whole
            vocabulary.
        seed: of the drawing; the same seed gives the same text.

    Yields:
        [B] int64, the next word of each sample.

    Raises:
        ValueError: if the prompt is empty or an option is out of range.
    """
    if not prompt:
        raise ValueError("the prompt must have at least one token")
    generator = torch.Generator(model.device).manual_seed(seed)
    tokens = torch.tensor(prompt, device=model.device)[:, None].expand(-1, num_samples)
    state = model.init_state(num_samples)
    for _ in range(num_tokens):
        for piece in torch.split(tokens, WORDS_AT_ONCE):
            hidden, new_state = model(piece, state)
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
    """Continuations of a prompt by the best model of a run, or an export.

    Args:
        folder: of the run.
        prompt: text to continue; empty for the beginning of a text. Its lines are read with `<eos>`
            between them.
        num_tokens, num_samples, temperature, top_k, top_p, seed: as in `generate`.

    Yields:
        For each sample its text without the prompt, in pieces; those of a single sample come as
        they are drawn.

    Raises:
        UserError: if there is no model in the folder.
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
    written = len(tokenizer.decode(prompt_ids[1:]))

    def text(ids: Iterator[int]) -> Iterator[str]:
        """The decoded ids, less what the prompt says."""
        skip = written
        for piece in tokenizer.stream_decode(chain(prompt_ids[1:], ids)):
            yield piece[skip:]
            skip = max(0, skip - len(piece))

    if num_samples == 1:
        yield text(int(drawn[0]) for drawn in steps)
    else:
        for ids in torch.stack(list(steps), dim=1).tolist():
            yield text(iter(ids))
