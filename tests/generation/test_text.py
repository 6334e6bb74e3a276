"""Text: where it stops, how prompts are batched, and which words are unknown."""

import random
from pathlib import Path
from typing import Any

import pytest

from data_prep.tokenizer.serialization import load_tokenizer
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.generation import generate_text, sampling, stream_text, text
from lm.generation.text import encode_prompt, level_probs, unknown_words, until
from lm.model.files import load_model


def test_text_before_the_first_stop_string_is_kept_however_it_is_cut_into_pieces() -> None:
    rng = random.Random(0)
    for _ in range(500):
        whole = "".join(rng.choices("ab", k=rng.randrange(12)))
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(3))]
        cuts = sorted(rng.choices(range(len(whole) + 1), k=4))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        ends = [whole.find(each) for each in stop if each in whole]
        assert "".join(until(stop, pieces)) == whole[: min(ends, default=len(whole))]


def test_text_is_withheld_only_while_it_can_begin_a_stop_string() -> None:
    pieces = until(["cat sat"], iter(["a cat", " ran", " cat s", "at", " down"]))
    assert list(pieces) == ["a ", "cat ran", " ", ""]


def test_texts_do_not_depend_on_how_they_are_batched(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(lstm_run)
    tokenizer = load_tokenizer(lstm_run)
    prompts = ["the cat", "a", "", "the dog", "a man sees the", "a dog"]
    options: dict[str, Any] = {"num_tokens": 15, "stop": ["\n", "sees"], "seed": 5}

    def texts() -> list[list[str]]:
        results = generate_text(model, tokenizer, prompts, num_samples=3, **options)
        return [[sample.text for sample in samples] for samples in results]

    expected = texts()
    for prompt, samples in zip(prompts, expected, strict=True):
        assert "".join(stream_text(model, tokenizer, prompt, **options)) == samples[0]
    monkeypatch.setattr(text, "PROMPTS_AT_ONCE", 4)
    assert texts() == expected
    monkeypatch.setattr(text, "STATE_BYTES", 2 * text.state_bytes(model, 0))
    assert texts() == expected


def test_stopped_samples_are_drawn_no_further(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(lstm_run)
    tokenizer = load_tokenizer(lstm_run)
    sizes: list[int] = []
    draw = sampling.Sampler.draw

    def recorded(self: sampling.Sampler) -> object:
        tokens = draw(self)
        sizes.append(len(tokens))
        return tokens

    monkeypatch.setattr(sampling.Sampler, "draw", recorded)
    (samples,) = generate_text(
        model, tokenizer, ["the cat"], num_tokens=40, num_samples=8, stop=["\n"]
    )
    lengths = [len(sample.tokens) for sample in samples]
    assert len(set(lengths)) > 1
    assert sizes == sorted(sizes, reverse=True)
    assert sum(lengths) <= sum(sizes) <= sum(lengths) + 8  # at most one more of each
    assert all(
        sample.tokens[-1] == tokenizer.eos_id or len(sample.tokens) == 40 for sample in samples
    )


def test_prompt_ids_and_unknown_words() -> None:
    tokenizer = WordTokenizer(["<eos>", "<unk>", "the", "cat"])
    assert encode_prompt(tokenizer, "") == [0]
    assert encode_prompt(tokenizer, "the cat\n\nthe") == [0, 2, 3, 0, 0, 2]
    assert unknown_words(tokenizer, ["the dog", "<unk> dog\ncat bird"]) == ["dog", "bird"]


def test_probabilities_of_levels_are_those_of_one_pass_over_chunks(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(lstm_run)
    tokens = [3, 5, 2, 0, 7, 4]
    whole = level_probs(model, [0, 4], tokens)
    monkeypatch.setattr(sampling, "PROMPT_CHUNK_TOKENS", 3)
    chunked = level_probs(model, [0, 4], tokens)
    assert len(whole) == len(tokens)
    for first, second in zip(whole, chunked, strict=True):
        assert first == pytest.approx(second, rel=1e-5)
