"""Text: prompts to token ids, continuations to text, and where it stops.

Prompts with equal numbers of tokens are continued together, with all samples of each in one batch
as far as their states fit into `STATE_BYTES`. The text of a sample does not depend on that: see
`Sampler`.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import UNK, Tokenizer
from lm.generation.beam_search import beam_search
from lm.generation.sampling import PLAIN, Sampler, read
from lm.model.language_model import LanguageModel
from lm.output import Sampling

STATE_BYTES = 1 << 28
"""Memory of the states of the sequences in a batch."""
PROMPT_TOKENS = 1 << 15
"""Tokens of prompts in a batch, at most; a single prompt may have more."""
PROMPTS_AT_ONCE = 1 << 10
"""Prompts that are sorted by length; their texts are available once all of them are complete."""
BYTES_PER_TOKEN = 64
"""Memory of a generated token until the text is printed, about."""


class Sample(NamedTuple):
    """A continuation of a prompt."""

    text: str  # without the prompt
    tokens: list[int]  # ids, with those of a stop string
    log_prob: float | None = None  # nats, of a continuation that was searched for


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt: `<eos>`, which precedes every text, and its lines, `<eos>` between."""
    lines = tokenizer.encode_lines(prompt.split("\n")) if prompt else []
    return list(chain.from_iterable([tokenizer.eos_id, *ids] for ids in lines or [[]]))


def unknown_words(tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """The distinct words of texts, separated by whitespace, that are read as `<unk>` or contain it.

    A literal `<unk>` is not one of them.
    """
    words = list(dict.fromkeys(chain.from_iterable(map(str.split, texts))))
    encoded = tokenizer.encode_lines(words)
    pairs = zip(words, encoded, strict=True)
    return [word for word, ids in pairs if tokenizer.unk_id in ids and UNK not in word]


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    sampling: Sampling = PLAIN,
    stop: Sequence[str] = (),
    seed: int = 1,
) -> Iterator[str]:
    """The first sample of `generate_text` in pieces, each available as soon as it is drawn."""
    ids = encode_prompt(tokenizer, prompt)
    sampler = Sampler(
        *(model, torch.tensor(ids)[:, None]),
        num_samples=1,
        sampling=sampling,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    drawn = (int(sampler.draw()) for _ in range(num_tokens))
    return until(stop, _continuation(tokenizer, ids, drawn))


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    num_samples: int = 1,
    sampling: Sampling = PLAIN,
    stop: Sequence[str] = (),
    seed: int = 1,
) -> Iterator[list[Sample]]:
    """Continues prompts with random samples.

    Args:
        model: in evaluation mode.
        tokenizer: that of the model.
        prompts: texts to continue, each empty for the beginning of a text; lines are separated by
            `<eos>`.
        num_tokens: largest number of tokens of a continuation.
        num_samples: number of continuations of each prompt.
        sampling: the distribution to draw from. The repetition penalty does not apply to `<eos>`.
        stop: a continuation ends before the first occurrence of one of these strings.
        seed: of the random numbers. Sample i of a prompt depends on the prompt, the options, the
            seed and i, not on other prompts and samples (but see `Sampler` on rounding).

    Yields:
        The samples of each prompt, in order.

    Raises:
        UserError: if the results would not fit into memory.
        ValueError: if the seed is out of range or a stop string is empty.
    """
    check_memory(BYTES_PER_TOKEN * len(prompts) * num_samples * num_tokens, "the texts")
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts[first:][:PROMPTS_AT_ONCE]]
        results: list[list[Sample]] = [[] for _ in encoded]
        for group, samples in _batches(model, list(map(len, encoded)), num_samples, num_tokens):
            sampler = Sampler(
                *(model, torch.tensor([encoded[index] for index in group]).T),
                num_samples=len(samples),
                first_sample=samples.start,
                sampling=sampling,
                seed=seed,
                eos_id=tokenizer.eos_id,
            )
            owners = [index for index in group for _ in samples]
            batch = _Batch(sampler, len(owners), num_tokens)
            texts = [
                until(stop, _continuation(tokenizer, encoded[index], batch.stream(number)))
                for number, index in enumerate(owners)
            ]
            for index, sample in zip(owners, batch.complete(texts), strict=True):
                results[index].append(sample)
        yield from results


def search_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
) -> list[Sample]:
    """The continuations of a prompt that beam search finds, the best first.

    They end at the end of the line, or have `num_tokens` tokens; see `beam_search`.

    Raises:
        UserError: if the beams would not fit into memory.
        ValueError: as for `beam_search`.
    """
    ids = encode_prompt(tokenizer, prompt)
    beam_bytes = state_bytes(model, len(ids) + num_tokens) + 32 * min(num_beams, model.vocab_size)
    check_memory(num_beams * beam_bytes, "the beams")
    found = beam_search(
        *(model, ids),
        num_tokens=num_tokens,
        num_beams=num_beams,
        length_penalty=length_penalty,
        eos_id=tokenizer.eos_id,
    )
    return [
        Sample("".join(_continuation(tokenizer, ids, tokens)).removesuffix("\n"), tokens, log_prob)
        for tokens, log_prob, _ in found
    ]


@torch.no_grad()
def level_probs(model: LanguageModel, prompt: list[int], tokens: list[int]) -> list[list[float]]:
    """Probability of each choice on the path of each token after a prompt, T rows of D levels.

    They are those of the model: without temperature, penalty and restrictions. The product of a
    row is the probability of the token; below the end of a path they are 1.
    """
    ids = torch.tensor([*prompt, *tokens], device=model.device)[:, None]
    rows, num_read = [], 1
    for hidden, _ in read(model, ids[:-1], model.init_state(1)):
        targets = ids[num_read : num_read + len(hidden)]
        num_read += len(hidden)
        rows.append(model.output.nll_by_level(hidden, targets)[:, :, 0].T)
    probs: list[list[float]] = torch.cat(rows)[len(prompt) - 1 :].neg().exp().tolist()
    return probs


def until(stop: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    r"""The pieces of a text up to the first occurrence of a stop string.

    Text that may be the beginning of one is withheld until that is decided.

    Example:
        >>> list(until(["end", "\n"], [" the", " en", "tire ", "end", "less"]))
        [' th', 'e ', 'entire ', '']
    """
    if "" in stop:
        raise ValueError("a stop string must not be empty")
    withheld = ""
    for piece in pieces:
        text = withheld + piece
        found = [place for place in map(text.find, stop) if place >= 0]
        if found:
            yield text[: min(found)]
            return
        lengths = range(1, max(map(len, stop), default=0))
        num_open = max((n for n in lengths if text.endswith(tuple(s[:n] for s in stop))), default=0)
        withheld = text[len(text) - num_open :]
        yield text[: len(text) - num_open]
    yield withheld


class _Batch:
    """The token ids of sequences that are drawn together as soon as one of them is read on."""

    def __init__(self, sampler: Sampler, num_sequences: int, num_tokens: int) -> None:
        self._sampler, self._num_tokens = sampler, num_tokens
        self._drawn: list[deque[int]] = [deque() for _ in range(num_sequences)]
        self._read: list[list[int]] = [[] for _ in range(num_sequences)]
        self._sequences = list(range(num_sequences))  # those in the sampler
        self._complete: set[int] = set()

    def stream(self, sequence: int) -> Iterator[int]:
        """The ids of a sequence."""
        for _ in range(self._num_tokens):
            if not self._drawn[sequence]:
                self._draw()
            self._read[sequence].append(self._drawn[sequence].popleft())
            yield self._read[sequence][-1]

    def _draw(self) -> None:
        """Draw a token of each sequence but the complete ones."""
        kept = [k for k, s in enumerate(self._sequences) if s not in self._complete]
        if len(kept) < len(self._sequences):
            self._sequences = [self._sequences[k] for k in kept]
            self._sampler.select(torch.tensor(kept, device=self._sampler.device))
        for sequence, token in zip(self._sequences, self._sampler.draw().tolist(), strict=True):
            self._drawn[sequence].append(token)

    def complete(self, texts: list[Iterator[str]]) -> Iterator[Sample]:
        """The samples, once the texts of all sequences have been read, in turns."""
        pieces: list[list[str]] = [[] for _ in texts]
        while len(self._complete) < len(texts):
            for sequence, text in enumerate(texts):
                if sequence not in self._complete:
                    piece = next(text, None)
                    if piece is None:
                        self._complete.add(sequence)
                    else:
                        pieces[sequence].append(piece)
        yield from map(Sample, map("".join, pieces), self._read)


def _continuation(tokenizer: Tokenizer, prompt: list[int], ids: Iterable[int]) -> Iterator[str]:
    """The decoded ids in pieces, without the prompt that precedes them."""
    skip = len(tokenizer.decode(prompt[1:]))
    for piece in tokenizer.stream_decode(chain(prompt[1:], ids)):
        yield piece[skip:]
        skip = max(0, skip - len(piece))


def _batches(
    model: LanguageModel, lengths: list[int], num_samples: int, num_tokens: int
) -> Iterator[tuple[list[int], range]]:
    """Indices of prompts of equal length, and the samples of each that are drawn in one batch."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for length, group in by_length.items():
        at_once = max(1, STATE_BYTES // state_bytes(model, length + num_tokens))
        num_prompts = max(1, min(at_once // num_samples, PROMPT_TOKENS // length))
        for begin in range(0, len(group), num_prompts):
            for first in range(0, num_samples, at_once):
                samples = range(first, min(first + at_once, num_samples))
                yield group[begin : begin + num_prompts], samples


@torch.no_grad()
def state_bytes(model: LanguageModel, num_tokens: int) -> int:
    """Memory of the state of one sequence after some tokens, at most."""
    state = model.init_state(1)
    _, longer = model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), state)
    assert longer is not None
    before, after = (sum(tensor.nbytes for tensor in each) for each in (state, longer))
    return before + num_tokens * (after - before)


def check_memory(num_bytes: int, what: str) -> None:
    """Raise a UserError if something needs more memory than this computer has."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > available:
        raise UserError(
            f"{what} need {num_bytes / 1e9:,.0f} GB of memory, {available / 1e9:,.0f} GB are"
            " available: fewer samples, beams or tokens need less"
        )
