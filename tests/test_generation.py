"""Generation: a memorised text is reproduced, and samples depend on the seed only."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm import generation
from lm.cli import main
from lm.generation import generate
from lm.model.files import load_model
from lm.model.language_model import LanguageModel
from lm.training.metrics import read_metrics

SONG = [
    "one man went to mow",
    "he went to mow a meadow",
    "his dog came along and slept",
    "until the moon rose over them",
]
Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """`printed(*arguments)`: what `lm generate` prints."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["generate", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(params=["lstm_run", "transformer_run"])
def run(request: pytest.FixtureRequest) -> Path:
    """A run folder, not to be changed."""
    folder = request.getfixturevalue(request.param)
    assert isinstance(folder, Path)
    return folder


@pytest.fixture(scope="module", params=["lstm", "transformer"])
def song_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has memorised one short text."""
    folder = tmp_path_factory.mktemp(f"song_{request.param}")
    (folder / "song.txt").write_text("\n".join(SONG * 12) + "\n")
    config = folder / "song.yaml"
    config.write_text(
        f"""\
name: song
run_dir: {folder / "run"}
data: {{dir: {folder}, files: {{train: song.txt}}}}
model: {{backbone: {request.param}, hidden: 24, layers: 1, heads: 2}}
optim: {{lr: 0.02, schedule: cosine}}
train: {{max_steps: 120, batch_size: 4, seq_len: 16, threads: 1}}
log: {{every_steps: 10}}
"""
    )
    assert main(["train", str(config), "--no-progress"]) == 0
    return folder / "run"


def test_tiny_model_memorises_a_short_text(song_run: Path) -> None:
    lines = read_metrics(song_run / "metrics.csv")
    assert lines[0].train_perplexity > 3
    assert lines[-1].train_perplexity < 1.5


def test_greedy_generation_reproduces_the_text(song_run: Path, printed: Printed) -> None:
    length = sum(len(line.split()) + 1 for line in SONG)
    text = printed(song_run, "--temperature=0", f"--tokens={2 * length}", "--prompt", SONG[0])
    assert text == "\n".join([*SONG, *SONG, SONG[0]]) + "\n"


def test_prompt_of_several_lines_is_continued(song_run: Path, printed: Printed) -> None:
    prompt = f"{SONG[1]}\nhis dog"
    text = printed(song_run, "--temperature=0", "--tokens=4", "--prompt", prompt)
    assert text == f"{SONG[1]}\n{SONG[2]}\n"


def test_greedy_token_is_the_most_probable_given_all_before(song_run: Path) -> None:
    model, description = load_model(song_run)
    tokens = [description.eos_id]
    drawn = list(generate(model, tokens, num_tokens=12, num_samples=1, temperature=0.0))
    with torch.no_grad():
        for token in drawn:
            hidden, _ = model(torch.tensor(tokens)[:, None])
            assert torch.equal(model.output.log_prob(hidden[-1]).argmax(1), token)
            tokens.append(int(token))


def test_long_prompts_are_read_in_chunks(
    run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "the old cat sees a dog today\na man finds"
    options = ["--prompt", prompt, "--tokens=20", "--temperature=0"]
    whole = printed(run, *options)
    lengths: list[int] = []
    forward = LanguageModel.forward

    def recorded(self: LanguageModel, tokens: Tensor, state: Any = None) -> Any:
        lengths.append(len(tokens))
        return forward(self, tokens, state)

    monkeypatch.setattr(LanguageModel, "forward", recorded)
    monkeypatch.setattr(generation, "PROMPT_CHUNK_TOKENS", 4)
    assert printed(run, *options) == whole
    assert lengths == [4, 4, 4, *[1] * 19]  # twelve with both <eos>


def test_text_depends_on_the_seed_only(run: Path, printed: Printed) -> None:
    first = printed(run, "--seed=5", "--tokens=40")
    assert printed(run, "--seed=5", "--tokens=40") == first
    assert printed(run, "--seed=6", "--tokens=40") != first


def test_samples_differ_and_json_equals_the_printed_text(run: Path, printed: Printed) -> None:
    options = ["--prompt=the cat", "--samples=3", "--tokens=20", "--seed=2"]
    values = json.loads(printed(run, *options, "--json"))
    assert values["prompt"] == "the cat"
    assert len(set(values["samples"])) == 3
    for sample in values["samples"]:
        assert len(sample.split()) + sample.count("\n") == 20
    assert printed(run, *options) == "".join(f"the cat{sample}\n" for sample in values["samples"])
    (sample,) = json.loads(printed(run, *options, "--samples=1", "--json"))["samples"]
    assert printed(run, *options, "--samples=1") == f"the cat{sample}\n"


def test_prompt_is_read_from_stdin(
    lstm_run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(lstm_run, "--prompt", "the old dog", "--tokens=6")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the old dog\n"))
    assert printed(lstm_run, "--prompt", "-", "--tokens=6") == expected


def test_options_that_leave_one_word_are_greedy(lstm_run: Path, printed: Printed) -> None:
    greedy = printed(lstm_run, "--temperature=0", "--tokens=15")
    for option in ("--top-k=1", "--top-p=1e-9", "--temperature=1e-4"):
        assert printed(lstm_run, option, "--tokens=15", "--seed=3") == greedy


def test_frequencies_of_the_first_word_match_its_probabilities(lstm_run: Path) -> None:
    model, description = load_model(lstm_run)
    (drawn,) = generate(model, [description.eos_id], num_tokens=1, num_samples=20_000, seed=4)
    with torch.no_grad():
        hidden, _ = model(torch.tensor([[description.eos_id]]))
        probability = model.output.log_prob(hidden)[0, 0].exp()
    expected = 20_000 * probability
    counts = torch.bincount(drawn, minlength=model.vocab_size)
    chi_square = float(((counts - expected) ** 2 / expected)[expected > 5].sum())
    degrees = int((expected > 5).sum()) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_empty_prompt_raises(lstm_run: Path) -> None:
    model, _ = load_model(lstm_run)
    with pytest.raises(ValueError, match=r"^the prompt must have at least one token$"):
        next(generate(model, [], num_tokens=1, num_samples=1))


def test_prompt_from_stdin_must_be_utf8(
    lstm_run: Path, complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \xff cat"), "utf-8"))
    assert complaint("generate", lstm_run, "--prompt", "-").startswith("--prompt -: invalid UTF-8")
