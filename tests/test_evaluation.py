"""Evaluation: each token once, from the right context; sums over counts; one function for all."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lm.cli import main
from lm.evaluation import evaluate, evaluate_text
from lm.figures import Evaluation, TextCounts
from lm.model import reader
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from lm.run import TrainedRun
from lm.training.metrics import read_metrics
from tests.conftest import Printed, Train
from tests.models import log_probs, small_model

N, EOS, UNK = 9, 0, 1
COUNTS = TextCounts(words=7, lines=3, utf8_bytes=40)
FIELDS = (
    "tokens words lines utf8_bytes oov nll_nats perplexity perplexity_excluding_oov word_perplexity"
    " bits_per_byte class_perplexity within_class_perplexity context eos_rule unit spelling_nats"
)


def make(backbone: str, context: int = 6) -> LanguageModel:
    return small_model(ClassTree.two_level(torch.arange(N) % 3), backbone, context, dropout=0.3)


def text(n: int) -> NDArray[np.uint16]:
    return np.random.default_rng(3).integers(N, size=n).astype(np.uint16)


def measured(model: LanguageModel, tokens: NDArray[np.uint16], context: int = 6) -> Evaluation:
    return evaluate(model, tokens, COUNTS, eos_id=EOS, unk_id=UNK, context=context)


def by_hand(model: LanguageModel, tokens: NDArray[Any], context: int) -> list[float]:
    """The nll of each token by the documented rule: an LSTM sees everything before, a Transformer
    its window, where windows are half a context apart and the last one ends with the text.
    """
    inputs = np.concatenate([[EOS], tokens[:-1]]).astype(np.int64)
    nll = []
    for place in range(len(tokens)):
        begin = 0
        if not model.backbone.carries_state and place >= context:
            stride = context // 2
            begin = math.ceil((place + 1 - context) / stride) * stride
            begin = min(begin, len(tokens) - context)
        after = log_probs(model.eval(), inputs[begin : place + 1].tolist())[-1]
        nll.append(-float(after[int(tokens[place])]))
    return nll


@pytest.mark.parametrize(
    ("backbone", "n", "context"),
    [
        *[("lstm", n, 6) for n in (1, 2, 13, 64)],
        *[("transformer", n, 6) for n in (1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 21, 64)],
        *[("transformer", n, 4) for n in (3, 4, 5, 6, 7)],
        *[("transformer", n, 5) for n in (4, 5, 6, 7, 8)],
        *[("transformer", n, 2) for n in (1, 2, 3, 4)],
    ],
)
def test_the_sum_is_that_of_a_loop_over_the_tokens_in_chunks_of_any_size(
    backbone: str, n: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make(backbone, context), text(n)
    expected = by_hand(model, tokens, context)
    whole = measured(model, tokens, context)
    assert whole.tokens == n
    for chunk in (1, 7, 12, 1000):
        monkeypatch.setattr(reader, "CHUNK_TOKENS", chunk)
        result = measured(model, tokens, context)
        assert result.nll_nats == pytest.approx(sum(expected), rel=1e-11)
        assert result.perplexity == pytest.approx(math.exp(sum(expected) / n), rel=1e-11)
        assert (result.oov, result.context) == (whole.oov, whole.context)


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
def test_the_figures_follow_from_sums_and_counts(backbone: str) -> None:
    model, tokens = make(backbone).train(), text(40)
    assert measured(model, tokens) == measured(model, tokens)
    assert model.training
    with pytest.raises(ValueError, match=r"^no tokens to evaluate$"):
        measured(model, text(0))
    result, nll = measured(model, tokens), by_hand(model, tokens, 6)
    known = [value for value, word in zip(nll, tokens, strict=True) if word != UNK]
    total = sum(nll)
    assert (result.tokens, result.words, result.oov) == (40, 7, 40 - len(known))
    assert result.oov > 0
    assert result.bits_per_byte is None  # unknown words are not spelled
    found = result.perplexity, result.perplexity_excluding_oov, result.word_perplexity
    per_token = total / 40, sum(known) / len(known), total / (7 + 3)
    assert found == pytest.approx(tuple(map(math.exp, per_token)), rel=1e-11)
    product = result.class_perplexity * result.within_class_perplexity
    assert result.perplexity == pytest.approx(product, rel=1e-12)


def test_without_unknown_words_nothing_is_excluded_and_with_only_them_the_rest_is_nan() -> None:
    model = make("lstm")
    known = measured(model, np.array([2, 3, 4], dtype=np.uint16))
    assert known.bits_per_byte == pytest.approx(known.nll_nats / math.log(2) / 40, rel=1e-12)
    assert (known.oov, known.perplexity_excluding_oov) == (0, known.perplexity)
    assert "case or spaces are lost" in replace(known, bits_per_byte=None).table("text")
    assert math.isnan(measured(model, np.array([UNK], dtype=np.uint16)).perplexity_excluding_oov)


Evaluated = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluated(printed: Printed) -> Iterator[Evaluated]:
    """`evaluated(run, *options)`: the output of `lm evaluate … --json`; its files are deleted."""
    runs: list[Path] = []

    def evaluate_command(run: Path, *options: object) -> dict[str, Any]:
        runs.append(run)
        return dict(json.loads(printed("evaluate", run, *options, "--json")))

    yield evaluate_command
    for path in {path for run in runs for path in run.glob("evaluate-*.json")}:
        path.unlink()


def test_validation_during_training_equals_evaluate(run: Path, evaluated: Evaluated) -> None:
    """The alignment of a file's tensors in memory may decide in which order numbers are summed."""
    lines = read_metrics(run / "metrics.csv")
    best = min(line.valid_perplexity for line in lines if line.valid_perplexity is not None)
    perplexity = evaluated(run, "--split=valid")["perplexity"]
    assert perplexity == pytest.approx(best, rel=1e-7)


def test_json_has_every_field_and_is_saved_in_the_run(
    lstm_run: Path, corpus: Path, evaluated: Evaluated
) -> None:
    values = evaluated(lstm_run)
    assert list(values) == [*FIELDS.split(), "step", "num_steps", "checkpoint"]
    assert json.loads((lstm_run / "evaluate-test.json").read_text()) == values
    content = (corpus / "test.txt").read_bytes()
    assert values["words"] == len(content.split())
    assert values["tokens"] == len(content.split()) + len(content.decode().splitlines())
    assert values["oov"] == content.count(b"zebra") == 1
    assert (values["bits_per_byte"], values["unit"]) == (None, "word")


def test_a_full_softmax_has_no_classes_and_text_without_spaces_no_words(lstm_run: Path) -> None:
    opened = TrainedRun(lstm_run, "cpu")
    malayalam = "നിയന്ത്രണം"  # a long word of 30 bytes
    japanese = "猫が犬を見ている。そして"
    for line, size in ((japanese, 37), ("the cat sees a dog", 0), (malayalam, 0), ("", 0)):
        result = evaluate_text(opened, [line], progress=False)
        assert result.utf8_bytes == len(line.encode()) + 1
        (row,) = re.findall("per word  +(.*)", result.table("text"))
        expected = f"not printed: the text has a space every {size} bytes, so no words"
        assert (row == expected) == math.isnan(result.word_perplexity) == (size > 0)
        expected = f"{result.word_perplexity:.2f}, of {result.words} words + 1 line ends"
        assert (row == expected) == (size == 0)
        assert "within classes" in result.table("text")
        huge = replace(result, nll_nats=2e3, words=1, word_perplexity=math.inf)
        assert "10^434.3, of 1 words" in huge.table("text") or size
        assert "within classes" not in replace(result, within_class_perplexity=1.0).table("text")


def test_figures_that_cannot_be_written_are_printed(
    lstm_run: Path, copied_run: Path, evaluated: Evaluated, caplog: pytest.LogCaptureFixture
) -> None:
    (copied_run / "evaluate-test.json" / "a folder").mkdir(parents=True)
    expected = evaluated(lstm_run)
    assert main(["evaluate", str(copied_run)]) == 0
    path = copied_run / "evaluate-test.json"
    assert f"{path} cannot be written: it is not a file that can be" in caplog.messages[-1]
    shutil.rmtree(path)
    assert evaluated(copied_run) == expected


@pytest.mark.parametrize("context", [5, 6])
def test_the_stated_context_is_that_of_the_windows(context: int) -> None:
    model, tokens, few = make("transformer", context), text(40), context - context // 2 + 1
    stated = f"from {few} to {context} tokens before it, and from fewer at the start of the text"
    assert measured(model, tokens, context).context == f"each token is predicted {stated}"
    first, *rest = [before for _, _, before in reader.read_text(model, [tokens], EOS, context)]
    assert first.tolist() == list(range(1, few))
    assert {*np.concatenate(rest).tolist()} == {*range(few, context + 1)}


def test_the_rule_for_line_ends_is_that_of_the_corpus(
    tiny: Path, tmp_path: Path, evaluated: Evaluated, lstm_run: Path, corpus: Path, printed: Printed
) -> None:
    options = ["--data.keep_empty_lines=false", "--train.max_steps=1", "--no-progress"]
    assert main(["train", str(tiny), f"--run_dir={tmp_path / 'run'}", *options]) == 0
    without, with_them = evaluated(tmp_path / "run"), evaluated(lstm_run)
    assert without["tokens"] == with_them["tokens"] - 1
    text = corpus / "test.txt"
    for run, split in ((tmp_path / "run", without), (lstm_run, with_them)):
        assert evaluated(run, "--text", text) | {"num_steps": split["num_steps"]} == split
        stream = ["--stream", "--format=json", "--level=summary", "--unit=nats"]
        summary = json.loads(printed("score", run, text, *stream))["summary"]
        assert summary["tokens"] == split["tokens"]
        for name in ("perplexity", "perplexity_excluding_oov", "word_perplexity"):
            assert summary[name] == pytest.approx(split[name], rel=1e-9)
    assert "empty lines left out" in without["eos_rule"]
    assert "empty lines too" in with_them["eos_rule"]


@pytest.mark.parametrize("lowercase", ["false", "true"])
def test_figures_of_words_and_bytes_are_those_of_sequences_of_which_all_is_predicted(
    lowercase: str, train: Train, tmp_path: Path
) -> None:
    options = ["--data.sequences=independent", "--data.predict_eos=true", "--train.max_steps=1"]
    options += ["--data.prepared_dir=null", f"--tokenizer.lowercase={lowercase}"]
    run = TrainedRun(train(tmp_path, *options), "cpu")
    whole = evaluate_text(run, ["the cat sees a dog", "a bird"], progress=False)
    assert whole.word_perplexity == pytest.approx(math.exp(whole.nll_nats / (7 + 2)))
    bits = None if lowercase == "true" else pytest.approx(whole.nll_nats / math.log(2) / 26)
    assert whole.bits_per_byte == bits
    for lines in (["the cat sees\ta dog", "a bird"], ["the zebra", "a bird"]):
        part = evaluate_text(run, lines, progress=False)
        assert math.isnan(part.word_perplexity)
        assert part.bits_per_byte is None
