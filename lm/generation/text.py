"""Text: continuations of prompts that are drawn at random, token by token.

Sample i of a prompt draws token t with random numbers that the seed, i and t determine. Its text
depends neither on the number of samples nor on the other prompts, except for the last bits of
matrix products. Prompts with equal numbers of tokens are continued together, with all samples of
each in one batch as far as their states fit into `STATE_BYTES`.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import NamedTuple, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.speller import Speller
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer
from lm.device import available_bytes
from lm.model.language_model import LanguageModel
from lm.model.reader import read_prefix
from lm.output import Sampling
from lm.output.decoding.draws import derive_seeds
from lm.run import TrainedRun
from lm.states import listed

STATE_BYTES = 1 << 28
"""Memory of the states of the sequences in a batch."""
PROMPT_TOKENS = 1 << 15
"""Largest number of prompt tokens in a batch; a single prompt may have more."""
PROMPTS_AT_ONCE = 1 << 10
"""Prompts that are sorted by length; their texts are available once all of them are complete."""
BYTES_PER_TOKEN = 64
"""Approximate memory of a generated token until its text is printed."""
PLAIN = Sampling()


class Sample(NamedTuple):
    """A continuation of a prompt."""

    text: str  # without the prompt
    tokens: list[int]  # ids, including those of a stop string
    log_prob: float | None = None  # nats, of one that was searched for; given the excluded tokens


def checked_text(text: object) -> str:
    """A text of a user's program; ValueError if it is not a string or not valid Unicode."""
    if not isinstance(text, str):
        raise ValueError(f"expected text, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text {text[:40]!r} is not valid Unicode") from error
    return text


def checked_count(what: str, number: object) -> None:
    """Raise a ValueError unless a number of a user's program is an integer ≥ 1."""
    if not isinstance(number, SupportsIndex):
        raise ValueError(f"the number of {what} must be an integer, got {number!r}")
    if operator.index(number) < 1:
        raise ValueError(f"the number of {what} must be at least 1, got {number!r}")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text: `<eos>`, which precedes every one, and its lines, `<eos>` between."""
    lines = tokenizer.encode_lines(text.split("\n")) if checked_text(text) else []
    return list(chain.from_iterable([tokenizer.eos_id, *ids] for ids in lines or [[]]))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt without a last space, with which the next word or piece begins."""
    return encode_text(tokenizer, checked_text(prompt).removesuffix(" "))


class Continuation:
    """A continuation of a prompt that grows token by token.

    It has at most `num_tokens` tokens; its text ends before the first occurrence of one of the
    strings `stop`. If the prompt ends in a space, it begins without one.

    Attributes:
        tokens: the ids so far, including those of a stop string.
        pieces: the text that each of them adds; what may begin a stop string is withheld.
        is_complete: whether it has all its tokens or a stop string was found.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, num_tokens: int, stop: Sequence[str] = ()
    ) -> None:
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.is_complete = False
        self._num_tokens, self._stop, self._withheld = num_tokens, stop, ""
        self._space, ids = " " * prompt.endswith(" "), encode_prompt(tokenizer, prompt)[1:]
        self._decoded = tokenizer.stream_decode(self._ids(ids))
        for _ in ids:
            next(self._decoded)

    def _ids(self, prompt: list[int]) -> Iterator[int]:
        """What is decoded, in step with `append`."""
        yield from prompt
        while not self.is_complete:
            yield self.tokens[-1]

    def append(self, token: int, spelling: str = UNK) -> None:
        """Add a token; `spelling` is what is written for `<unk>`."""
        self.tokens.append(token)
        text, self._space = next(self._decoded).removeprefix(self._space), ""
        text = self._until_stop(text if spelling == UNK else text.replace(UNK, spelling))
        if not self.is_complete and len(self.tokens) == self._num_tokens:
            self.is_complete = True
            text += self._until_stop(next(self._decoded, ""), is_all=True)
        self.pieces.append(text)

    def _until_stop(self, text: str, *, is_all: bool = False) -> str:
        """The text up to the first stop string, without what may be the beginning of one."""
        text = self._withheld + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        lengths = () if is_all else range(1, max(map(len, self._stop), default=0))
        openings = (
            n for n in lengths if text.endswith(tuple(s[:n] for s in self._stop if n < len(s)))
        )
        begin = len(text) - max(openings, default=0)
        if found and min(found) <= begin:  # no other begins before it
            self.is_complete, self._withheld = True, ""
            return text[: min(found)]
        self._withheld = text[begin:]
        return text[:begin]


@torch.no_grad()
def _draw(
    model: LanguageModel,
    prompts: list[list[int]],
    seeds: Tensor,
    live: list[Continuation],
    sampling: Sampling,
    spelling: Callable[[int, int], str],
) -> Iterator[list[Continuation]]:
    """Draw samples of prompts of equal length together, until all of `live` are complete.

    Those of a prompt are adjacent in `live` and have a seed each, `seeds` [S]. `spelling` is called
    with a token and its seed. Yields the continuations to which a token was added.
    """
    backbone, device, eos_id = model.backbone, model.device, prompts[0][0]
    prompt_of = torch.arange(len(prompts), device=device).repeat_interleave(len(seeds))
    seeds = seeds.repeat(len(prompts))
    ids = torch.tensor(prompts, device=device).T
    hidden, state = read_prefix(model, ids, model.init_state(len(prompts)))
    hidden, state = hidden[prompt_of], backbone.select_state(state, prompt_of)
    previous = _without(eos_id, ids.T)[prompt_of] if sampling.repetition_penalty > 1 else None
    for number in count():
        its_own = derive_seeds(seeds, number)
        token = model.output.sample(hidden, sampling, previous=previous, seeds=its_own)
        for continuation, *drawn in zip(live, token.tolist(), its_own.tolist(), strict=True):
            continuation.append(drawn[0], spelling(*drawn))
        yield live
        places = [place for place, each in enumerate(live) if not each.is_complete]
        if not places:
            return
        if previous is not None:
            previous = torch.cat([previous, _without(eos_id, token[:, None])], dim=1)
        if len(places) < len(live):
            live = [live[place] for place in places]
            index = torch.tensor(places, device=device)
            token, seeds, state = token[index], seeds[index], backbone.select_state(state, index)
            previous = None if previous is None else previous[index]
        hidden, state = read_prefix(model, token[None], state)


def _without(eos_id: int, tokens: Tensor) -> Tensor:
    """The tokens with -1 in place of `<eos>`, to which no repetition penalty applies."""
    return tokens.masked_fill(tokens == eos_id, -1)


def _spelling(tokenizer: Tokenizer, speller: Speller | None, token: int, seed: int) -> str:
    """What is written for a token `<unk>`, drawn by a seed of 64 bits."""
    if speller is None or token != tokenizer.unk_id:
        return UNK
    assert isinstance(tokenizer, WordTokenizer)
    words = tokenizer.words
    return speller.draw(np.random.default_rng(seed % (1 << 64)), lambda word: words.id(word) >= 0)


def generate_text(
    run: TrainedRun,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    num_samples: int = 1,
    sampling: Sampling = PLAIN,
    stop: Sequence[str] = (),
    seed: int = 1,
    allow_unk: bool = False,
    spell_unk: bool = False,
    on_piece: Callable[[str], object] | None = None,
) -> Iterator[list[Sample]]:
    """Continues prompts with random samples; independent sequences end at a predicted `<eos>`.

    Args:
        run: has the model.
        prompts: texts to continue, each empty for the beginning of a text; lines are separated by
            `<eos>`.
        num_tokens: largest number of tokens of a continuation.
        num_samples: number of continuations of each prompt.
        sampling: the distribution to draw from. The repetition penalty applies to the words of the
            prompt and those drawn, but not to `<eos>`.
        stop: a continuation ends before the first occurrence of one of these strings.
        seed: the seed of the random numbers, within -2^63 … 2^64 - 1; s and s + 2^64 are the same.
        allow_unk: whether `<unk>` is drawn as any word.
        spell_unk: whether it is drawn, and then its spelling by the run's speller.
        on_piece: for a single sample of one prompt: called with each piece of its text as soon as
            it is drawn.

    Returns:
        The samples of each prompt, in order.

    Raises:
        UserError: if the results would not fit into memory, or as `TrainedRun.speller`.
        ValueError: if a number or the seed is out of range, or a stop string is empty.
    """
    model, tokenizer = run.model, run.tokenizer
    checked_count("tokens", num_tokens)
    checked_count("samples", num_samples)
    if not isinstance(seed, SupportsIndex) or not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must be within -2^63 … 2^64 - 1, got {seed}")
    seed = operator.index(seed)
    root = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed, device=model.device)
    num_bytes = BYTES_PER_TOKEN * len(prompts) * num_samples * num_tokens
    check_memory(num_bytes, "the texts", torch.device("cpu"))
    spelling = partial(_spelling, tokenizer, run.speller if spell_unk else None)
    excluded = (*sampling.excluded, *run.never_drawn(allow_unk or spell_unk))
    sampling = replace(sampling, excluded=excluded)
    if run.is_independent and run.predicts_eos:
        stop = [*listed("strings to stop at", stop), "\n"]
    is_list = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not is_list or not all(isinstance(each, str) for each in stop):
        raise ValueError(f"stop must be a list of strings, got {stop!r}")
    if "" in stop:
        raise ValueError("a stop string must not be empty")

    def continued(prompts: Sequence[str]) -> list[list[Sample]]:
        encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        results: list[list[Sample]] = [[] for _ in encoded]
        for group, samples in _batches(model, list(map(len, encoded)), num_samples, num_tokens):
            ids = [encoded[index] for index in group]
            seeds = derive_seeds(root, torch.tensor(samples, device=model.device))
            texts = [prompts[index] for index in group]
            drawn = [Continuation(tokenizer, p, num_tokens, stop) for p in texts for _ in samples]
            for live in _draw(model, ids, seeds, drawn, sampling, spelling):
                if on_piece is not None:
                    on_piece(live[0].pieces[-1])
            for place, each in enumerate(drawn):
                sample = Sample("".join(each.pieces), each.tokens)
                results[group[place // len(samples)]].append(sample)
        return results

    parts = (prompts[first:][:PROMPTS_AT_ONCE] for first in range(0, len(prompts), PROMPTS_AT_ONCE))
    return chain.from_iterable(map(continued, parts))


def _batches(
    model: LanguageModel, lengths: list[int], num_samples: int, num_tokens: int
) -> Iterator[tuple[list[int], range]]:
    """Indices of prompts of equal length, and the samples of each that are drawn in one batch."""
    by_length = defaultdict(list)
    for index, length in enumerate(lengths):
        by_length[length].append(index)
    for length, group in by_length.items():
        at_once = max(1, STATE_BYTES // state_bytes(model, length + num_tokens))
        num_prompts = max(1, min(at_once // num_samples, PROMPT_TOKENS // length))
        for begin in range(0, len(group), num_prompts):
            for first in range(0, num_samples, at_once):
                samples = range(first, min(first + at_once, num_samples))
                yield group[begin : begin + num_prompts], samples


def state_bytes(model: LanguageModel, num_tokens: int) -> int:
    """Memory of the state of one sequence after some tokens, at most."""
    empty = model.init_state(1)
    _, longer = read_prefix(model, torch.zeros(1, 1, dtype=torch.int64, device=model.device), empty)
    before, after = (sum(tensor.nbytes for tensor in state) for state in (empty, longer))
    return before + num_tokens * (after - before)


def check_memory(num_bytes: int, what: str, device: torch.device) -> None:
    """Raise a UserError if something needs more memory than a device has available."""
    available = available_bytes(device)
    if available is not None and num_bytes > available:
        raise UserError(
            f"{what} need {num_bytes / 1e9:,.0f} GB of memory, {available / 1e9:,.0f} GB are"
            " available: fewer samples, beams or tokens need less"
        )
