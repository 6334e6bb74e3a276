"""Sampling: sequences that are continued token by token, in one batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lm.model.language_model import LanguageModel, State
from lm.output import Sampling
from lm.output.decoding.uniforms import derive_seeds

PROMPT_CHUNK_TOKENS = 1024
"""Tokens of a prompt read per call; a Transformer's memory grows with their square."""
PLAIN = Sampling()


def generate(
    model: LanguageModel,
    prompt: list[int],
    *,
    num_tokens: int,
    num_samples: int = 1,
    sampling: Sampling = PLAIN,
    seed: int = 1,
    eos_id: int | None = None,
) -> Iterator[Tensor]:
    """Continues a prompt in several independent samples.

    Args:
        model: in evaluation mode.
        prompt: at least one token id (`<eos>` at the beginning of a text).
        num_tokens: number of tokens to generate.
        num_samples, sampling, seed, eos_id: as in `Sampler`.

    Yields:
        [B] int64, the next token of each sample.

    Raises:
        ValueError: as for `Sampler`.
    """
    prompts = torch.tensor(prompt, dtype=torch.int64)[:, None]
    sampler = Sampler(
        model, prompts, num_samples=num_samples, sampling=sampling, seed=seed, eos_id=eos_id
    )
    for _ in range(num_tokens):
        yield sampler.draw()


class Sampler:
    """Sequences that are continued together: `num_samples` of each of P prompts of equal length.

    Sample i of a prompt draws token t with random numbers that the seed, i and t determine, by the
    state of the prompt alone. Its tokens depend neither on the number of samples nor on the other
    prompts, except that the last bits of matrix products can depend on the size of the batch.

    Args:
        model: in evaluation mode.
        prompts: [T, P] int64, T ≥ 1.
        num_samples: number of sequences of each prompt; those of one prompt are adjacent.
        first_sample: i of the first of them.
        sampling: the distribution to draw from. The repetition penalty applies to the words of the
            prompt and those drawn.
        seed: within -2^63 … 2^64 - 1; s and s + 2^64 are the same.
        eos_id: token that the repetition penalty does not apply to; None if there is none.

    Raises:
        ValueError: if the prompts are empty or the seed is out of range.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        prompts: Tensor,
        *,
        num_samples: int,
        first_sample: int = 0,
        sampling: Sampling = PLAIN,
        seed: int = 1,
        eos_id: int | None = None,
    ) -> None:
        if not len(prompts):
            raise ValueError("the prompt must have at least one token")
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed must be within -2^63 … 2^64 - 1, got {seed}")
        self._model, self._sampling = model, sampling
        self._eos_id = -1 if eos_id is None else eos_id
        prompts = prompts.to(model.device)
        num_prompts = prompts.shape[1]
        for hidden, state in read(model, prompts, model.init_state(num_prompts)):
            self._hidden, self._state = hidden[-1], state
        sample = torch.arange(first_sample, first_sample + num_samples, device=model.device)
        signed = seed - (1 << 64) if seed >= 1 << 63 else seed
        seeds = derive_seeds(torch.tensor(signed, device=model.device), sample)
        self._num_drawn = 0
        self._last: Tensor | None = None
        self._previous: Tensor | None = None
        if sampling.repetition_penalty > 1:
            self._previous = self._penalised(prompts.T)
        self._seeds = seeds.new_empty(num_prompts)
        self.select(torch.arange(num_prompts, device=model.device).repeat_interleave(num_samples))
        self._seeds = seeds.repeat(num_prompts)

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self._seeds.device

    def select(self, index: Tensor) -> None:
        """Continue the sequences `index` [B'] int64 of the batch, in this order."""
        self._state = self._model.backbone.select_state(self._state, index)
        self._hidden, self._seeds = self._hidden[index], self._seeds[index]
        self._last = None if self._last is None else self._last[index]
        self._previous = None if self._previous is None else self._previous[index]

    @torch.no_grad()
    def draw(self) -> Tensor:
        """The next token of each sequence, [B] int64."""
        if self._last is not None:
            ((hidden, self._state),) = read(self._model, self._last[None], self._state)
            self._hidden = hidden[-1]
        self._last = self._model.output.sample(
            self._hidden,
            temperature=self._sampling.temperature,
            top_k=self._sampling.top_k,
            top_p=self._sampling.top_p,
            min_p=self._sampling.min_p,
            repetition_penalty=self._sampling.repetition_penalty,
            previous=self._previous,
            seeds=derive_seeds(self._seeds, self._num_drawn),
        )
        self._num_drawn += 1
        if self._previous is not None:
            self._previous = torch.cat([self._previous, self._penalised(self._last[:, None])], 1)
        return self._last

    def _penalised(self, tokens: Tensor) -> Tensor:
        """The tokens that the repetition penalty applies to; -1 instead of the others."""
        return tokens.masked_fill(tokens == self._eos_id, -1)


def read(model: LanguageModel, tokens: Tensor, state: State) -> Iterator[tuple[Tensor, State]]:
    """Hidden vectors [T', B, H] of tokens [T, B], and the state after them, chunk by chunk."""
    for chunk in torch.split(tokens, PROMPT_CHUNK_TOKENS):
        hidden, new_state = model(chunk, state)
        assert new_state is not None
        state = new_state
        yield hidden, state
