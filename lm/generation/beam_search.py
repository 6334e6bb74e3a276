"""Beam search: the continuations of a prompt with the largest score.

The score of a continuation of L tokens is log P / L^α, with length penalty α. It ends with `<eos>`
or has `num_tokens` tokens. In each step every one of up to K live continuations is extended by its
K + 1 most probable tokens (exact top-k over the tree). Of all of them, the K most probable that do
not end stay live; those that end are results if they are among the K most probable.

The search stops once no live continuation can reach the K-th best result: log P does not increase,
so a score is at most log P / M^α, where M^α is the largest value that it can have. Stopping
changes no result. If K is at least the number of all continuations, the search is exhaustive.
"""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch

from lm.generation.text import (
    Continuation,
    Sample,
    check_memory,
    checked_count,
    encode_prompt,
    state_bytes,
)
from lm.model.language_model import LanguageModel
from lm.model.reader import read_prefix
from lm.output.decoding.draws import word_ids
from lm.run import TrainedRun

MAX_LENGTH_PENALTY = 10.0
LEAST_REST = 1e-3
"""A smaller probability of all words not excluded is their sum: 1 - Σ of the others is inexact."""


class Hypothesis(NamedTuple):
    """A continuation."""

    tokens: list[int]  # with `<eos>` at the end, or as many as were asked for
    log_prob: float  # nats
    score: float  # log_prob / len(tokens)^length_penalty


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prompt: list[int],
    *,
    num_tokens: int,
    num_beams: int,
    eos_id: int,
    length_penalty: float = 1.0,
    excluded: Sequence[int] = (),
) -> list[Hypothesis]:
    """Searches for the continuations of a prompt with the largest score.

    Example:
        >>> from lm.model.lstm import LSTM
        >>> from lm.output import ClassTree, HierarchicalSoftmax
        >>> softmax = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
        >>> _ = torch.nn.init.zeros_(softmax.weight)  # P = 1/4, 1/4, 1/2
        >>> model = LanguageModel(LSTM(4, 4, 1), softmax, embedding_size=4).eval()
        >>> beam_search(model, [0], num_tokens=2, num_beams=1, eos_id=0)[0].tokens
        [2, 2]

    Args:
        model: in evaluation mode.
        prompt: at least one token id.
        num_tokens: largest number of tokens of a continuation.
        num_beams: K.
        eos_id: token that ends a continuation.
        length_penalty: α; 0 compares log-probabilities, 1 their mean per token.
        excluded: tokens that no continuation has; P is conditioned on none of them being drawn.

    Returns:
        Up to K continuations, the best first.

    Raises:
        UserError: if the beams would not fit into memory.
        ValueError: if a number is below 1, or the length penalty is not within ±10.
    """
    checked_count("tokens", num_tokens)
    checked_count("beams", num_beams)
    given: object = length_penalty
    if not isinstance(given, Real) or not abs(float(given)) <= MAX_LENGTH_PENALTY:
        raise ValueError(f"length_penalty must be within ±{MAX_LENGTH_PENALTY:g}, got {given!r}")
    beam_bytes = state_bytes(model, len(prompt) + num_tokens)
    beam_bytes += 32 * min(num_beams, model.vocab_size)
    check_memory(num_beams * beam_bytes, "the beams", model.device)
    tokens, state = torch.tensor(prompt, device=model.device)[:, None], model.init_state(1)
    live, live_log_prob = tokens[:0].T, torch.zeros_like(tokens[0], dtype=torch.float64)
    results: list[Hypothesis] = []
    excluded = tuple(set(word_ids("excluded", excluded)))
    num_candidates = min(num_beams + 1, model.vocab_size - len(excluded))
    for length in range(1, num_tokens + 1):
        hidden, state = read_prefix(model, tokens, state)
        best = model.output.topk(hidden, num_candidates, excluded=excluded)  # [K, M]
        log_prob = live_log_prob[:, None] + best.log_prob.double()
        if excluded:
            words = torch.tensor(excluded, device=model.device).expand(len(hidden), -1)
            prob = model.output.candidate_log_prob(hidden, words).double().exp()
            rest = 1 - prob.sum(dim=1)
            log_rest, is_rounded = rest.log(), rest < LEAST_REST
            if bool(is_rounded.any()):
                every = model.output.log_prob(hidden[is_rounded]).double()
                log_rest[is_rounded] = every.index_fill(1, words[0], -torch.inf).logsumexp(1)
            log_prob -= log_rest[:, None]
        log_prob, order = log_prob.flatten().sort(descending=True, stable=True)
        parent = order // best.word.shape[1]
        extended = torch.cat([live[parent], best.word.flatten()[order, None]], dim=1)  # [K M, L]
        ended = extended[:, -1] == eos_id
        going = (~ended).nonzero().squeeze(1)[:num_beams]
        is_result = ended[:num_beams] | (length == num_tokens)
        ids, nats = (each[:num_beams][is_result].tolist() for each in (extended, log_prob))
        found = zip(ids, nats, strict=True)
        results += [Hypothesis(*each, each[1] / length**length_penalty) for each in found]
        results = sorted(results, key=lambda each: -each.score)[:num_beams]
        live, live_log_prob = extended[going], log_prob[going]
        if not len(live):
            break
        largest = max((length + 1) ** length_penalty, num_tokens**length_penalty)
        if len(results) == num_beams and results[-1].score >= float(live_log_prob[0]) / largest:
            break
        state = model.backbone.select_state(state, parent[going])
        tokens = live[:, -1:].T
    return results


def search_text(
    run: TrainedRun,
    prompt: str,
    *,
    num_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    allow_unk: bool = False,
) -> list[Sample]:
    """The continuations of a prompt to the end of its line, as `beam_search` finds them."""
    tokenizer = run.tokenizer
    found = beam_search(
        run.model,
        encode_prompt(tokenizer, prompt),
        num_tokens=num_tokens,
        num_beams=num_beams,
        eos_id=tokenizer.eos_id,
        length_penalty=length_penalty,
        excluded=run.never_drawn(allow_unk),
    )
    samples = []
    for tokens, log_prob, _ in found:
        continuation = Continuation(tokenizer, prompt, len(tokens))
        for token in tokens:
            continuation.append(token)
        text = "".join(continuation.pieces).removesuffix("\n")
        samples.append(Sample(text, tokens, log_prob))
    return samples
