"""Generation: a memorised text is reproduced, and samples depend on the seed only."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lm
from lm.cli import main
from lm.output import HierarchicalSoftmax
from tests.conftest import Printed, corpus_of

SONG = ["one man went to mow", "he went to mow a meadow"]
SONG += ["his dog came along and slept", "until the moon rose over them"]


@pytest.fixture
def printed(printed: Printed) -> Printed:
    """`printed(*arguments)`: what `lm generate` prints."""
    return partial(printed, "generate")


@pytest.fixture(scope="module", params=["lstm", "transformer"])
def song_run(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model that has memorised one short text."""
    folder = tmp_path_factory.mktemp(f"song_{request.param}")
    options = corpus_of(folder, "\n".join(SONG * 12) + "\n")
    options += [f"--model={{backbone: {request.param}, hidden: 24, layers: 1}}"]
    options += ["--optim={lr: 0.02, schedule: cosine}", "--train.max_steps=120"]
    assert main(["train", str(tiny), "--no-progress", "--train.seq_len=16", *options]) == 0
    return folder / "run"


def test_a_line_that_is_logged_is_not_in_the_text(
    lstm_run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal: compilation is announced while words are printed."""
    command = (lstm_run, "--prompt=the cat", "--tokens=6")
    text = printed(*command)
    log, sample = logging.getLogger("lm.output.backends.verify"), HierarchicalSoftmax.sample
    drawn: list[Tensor] = []

    def logging_sample(layer: HierarchicalSoftmax, *arguments: Any, **options: Any) -> Tensor:
        drawn.append(sample(layer, *arguments, **options))
        if len(drawn) % 6 == 3:
            log.warning("compiling")
        return drawn[-1]

    monkeypatch.setattr(HierarchicalSoftmax, "sample", logging_sample)
    assert printed(*command) == text
    monkeypatch.setattr("lm.commands.generate.sys.stdout.isatty", lambda: True)
    broken = printed(*command)
    assert broken.replace("\n", "") == text.replace("\n", "")
    assert broken.count("\n") == text.count("\n") + 1
    assert not log.filters


def test_greedy_generation_reproduces_the_text(song_run: Path, printed: Printed) -> None:
    length = sum(len(line.split()) + 1 for line in SONG)
    text = printed(song_run, "--temperature=0", f"--tokens={2 * length}", "--prompt", SONG[0])
    assert text == "\n".join([*SONG, *SONG, SONG[0]]) + "\n"


def test_samples_differ_and_json_equals_the_printed_text(run: Path, printed: Printed) -> None:
    options = ["--prompt=the cat", "--samples=3", "--tokens=20", "--seed=2"]
    values = json.loads(printed(run, *options, "--json"))
    assert values["prompt"] == "the cat"
    assert len(set(values["samples"])) == 3
    for sample in values["samples"]:
        assert len(sample.split()) + sample.count("\n") == 20
    texts = [f"the cat{sample}\n" for sample in values["samples"]]
    expected = [text + "---\n" * (text.count("\n") > 1) for text in texts]
    assert printed(run, *options) == "".join(expected)
    assert any(text.count("\n") > 1 for text in texts)
    (sample,) = json.loads(printed(run, *options, "--samples=1", "--json"))["samples"]
    assert printed(run, *options, "--samples=1") == f"the cat{sample}\n"


def test_prompt_is_read_from_stdin(
    lstm_run: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(lstm_run, "--prompt", "the old\ndog\n", "--tokens=6")
    content = "\ufeffthe old\r\ndog\r\n\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
    assert printed(lstm_run, "--prompt", "-", "--tokens=6") == expected


def test_options_that_leave_one_word_are_greedy(lstm_run: Path, printed: Printed) -> None:
    greedy = printed(lstm_run, "--temperature=0", "--tokens=15")
    for option in ("--top-k=1", "--top-p=1e-9", "--min-p=1", "--temperature=1e-4"):
        assert printed(lstm_run, option, "--tokens=15", "--seed=3") == greedy


def test_stop_strings_end_the_text_before_them(song_run: Path, printed: Printed) -> None:
    options = [song_run, "--temperature=0", "--tokens=30", "--prompt", "one man"]
    assert printed(*options, r"--stop=\n") == f"{SONG[0]}\n"
    expected = "\n".join([*SONG[:2], "his dog came \n"])
    assert printed(*options, "--stop=along", "--stop=nowhere") == expected
    (sample,) = json.loads(printed(*options, "--stop=along", "--json"))["samples"]
    assert sample.endswith("his dog came ")


def test_prompts_of_a_file_are_continued_as_each_alone(
    run: Path, printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.generation.text.PROMPTS_AT_ONCE", 4)
    prompts = ["the cat", "", "a dog", "the old woman sees", "the cat", "a man"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    options = [run, "--tokens=12", "--samples=2", "--seed=3", r"--stop=\n", "--stop=sees"]
    alone = [printed(*options, "--prompt", prompt, "--json") for prompt in prompts]
    assert printed(*options, "--prompts", file, "--json") == "".join(alone)
    text = [printed(*options, "--prompt", prompt) for prompt in prompts]
    for more in ([], ["--line-buffered"]):
        assert printed(*options, *more, "--prompts", file) == "".join(text)


def test_a_prompt_is_answered_before_the_next_one_is_read(
    lstm_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompts(_: str) -> Iterator[str]:
        for prompt in ("the cat", "a dog"):
            yield prompt
            assert capsys.readouterr().out.startswith(prompt)

    monkeypatch.setattr("data_prep.corpus.lines.read_text", prompts)
    assert main(["generate", str(lstm_run), "--prompts=-", "--line-buffered"]) == 0


def test_unknown_words_of_prompts_are_reported(
    lstm_run: Path, caplog: pytest.LogCaptureFixture, printed: Printed
) -> None:
    many, known = " ".join(f"x{number}" for number in range(13)), "the cat"
    for prompt in ("the qwerty sees <unk> a unicorn qwerty", many, known):
        printed(lstm_run, "--tokens=1", "--prompt", prompt)
    few, shortened = caplog.messages
    assert few == "unknown words of the prompt, read as <unk>: qwerty, unicorn"
    assert shortened.endswith("x8, x9 and 3 more")


def test_best_beam_is_printed_and_its_samples_are_in_order(run: Path, printed: Printed) -> None:
    options = [run, "--prompt=the cat", "--tokens=8", "--beams=5", "--length-penalty=0"]
    options += ["--allow-unk"]
    values = json.loads(printed(*options, "--samples=3", "--json"))
    found = lm.load(run).search(
        "the cat", num_tokens=8, num_beams=5, length_penalty=0, allow_unk=True
    )
    assert values["samples"] == [sample.text for sample in found[:3]]
    assert values["log_probs"] == pytest.approx([sample.log_prob for sample in found[:3]])
    assert values["log_probs"] == sorted(values["log_probs"], reverse=True)
    assert printed(*options) == f"the cat{values['samples'][0]}\n"


def test_unknown_words_are_drawn_on_request_only(run: Path, printed: Printed) -> None:
    options = [run, "--tokens=400", "--temperature=9"]
    assert "<unk>" in printed(*options, "--allow-unk")
    assert "<unk>" not in printed(*options)
    assert "<unk>" not in printed(run, "--beams=20", "--samples=20")
