"""With an open vocabulary every string has a probability, the same in every way to ask for it."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lm
from data_prep.errors import DataError, UserError
from lm.evaluation import evaluate_split, evaluate_text
from lm.rescoring.models import ArpaScores
from lm.run import TrainedRun
from lm.scoring import Scorer
from lm.scoring.arpa import ArpaModel
from tests.conftest import LETTERS, PIECES, PIECES_WITH_BYTES, Printed, Train
from tests.conftest import OTHER_LETTERS as SENTENCES
from tests.data_prep.tokenizer.spelling import Definition
from tests.scoring.arpa_files import write


@pytest.fixture(scope="module")
def run(letters: Train) -> Path:
    return letters("words")


def test_known_words_and_all_spellings_add_up_to_1(run: Path) -> None:
    loaded = lm.load(run, open_vocabulary=True)
    loaded.model.double()
    types = list(dict.fromkeys(word for line in LETTERS for word in line.split()))
    definition = Definition([word for word in types if word != "<unk>"], 7)
    known = [loaded.tokenizer.token(id) for id in range(loaded.vocab_size)]
    words = definition.words(3)
    numbers = [definition.others(word) - (word == "b~" and "bé" in known) for word in words]
    mass = sum(definition.prob(each) / definition.others(each) for each in ["", *known])
    longer = sum(definition.prob(word, ends=False) for word in words if len(word) == 3)
    longer -= sum(definition.prob(word) for word in words if len(word) == 3)
    in_longer = [word for word in known if len(word) > 3]
    longer -= sum(definition.prob(word) / definition.others(word) for word in in_longer)
    share = (5 + 0.5) / (5 + 5 + 1)  # of 5 literal `<unk>` among 10 unknown words of the text
    for prefix in ("", "b aab", "ab zebra\nb"):
        each = loaded.log_prob(prefix).exp()
        unk = float(each[loaded.unk_id])
        unknown = [word not in known for word in words]
        prob = loaded.candidate_log_prob(prefix, words).exp().numpy() * numbers
        (literal,) = loaded.candidate_log_prob(prefix, ["<unk>"]).exp().tolist()
        assert literal == pytest.approx(unk * share, rel=1e-9)
        rest = unk * (1 - share) * longer / (1 - mass)
        total = float(each.sum()) - unk + prob[unknown].sum() + literal + rest
        assert total == pytest.approx(1, abs=1e-9)


def test_evaluation_and_stream_add_the_spellings(run: Path) -> None:
    text = "\n".join(SENTENCES)
    plain = lm.load(run).evaluate(text)
    opened = TrainedRun(run)
    spelling = float(-opened.speller.log_prob(["baba", "bbb", "é", "<unk>", "aba", "日本"]).sum())
    nll = plain.nll_nats + spelling
    figures = {
        "nll_nats": nll,
        "spelling_nats": spelling,
        "perplexity": math.exp(nll / plain.tokens),
        "word_perplexity": math.exp(nll / (plain.words + plain.lines)),
        "bits_per_byte": nll / math.log(2) / (len(text.encode()) + 1),
    }
    found: Any = {name: pytest.approx(each) for name, each in figures.items()}
    expected = replace(plain, **found)
    assert evaluate_text(opened, SENTENCES, progress=False, open_vocabulary=True) == expected
    assert evaluate_split(opened, "test", progress=False, open_vocabulary=True) == expected
    assert lm.load(run, open_vocabulary=True).evaluate(text) == expected
    scores = Scorer(opened, open_vocabulary=True).stream(SENTENCES)
    assert sum(score.log_prob.sum() for score in scores) == pytest.approx(-nll)


def test_bits_per_byte_require_every_byte_in_tokens_and_spellings(
    run: Path, letters: Train
) -> None:
    def bits(folder: Path, line: str, open_vocabulary: bool = True) -> float | None:
        lines, run = ["", line, "b"], TrainedRun(folder)
        settings: Any = {"progress": False, "open_vocabulary": open_vocabulary}
        return evaluate_text(run, lines, **settings).bits_per_byte

    assert bits(run, "ab zebra") is not None
    assert bits(run, "ab b") == pytest.approx(bits(run, "ab b", open_vocabulary=False))
    for line in ("ab  b", " ab b", "ab b ", "ab\u00a0b", "ab <eos> b"):
        assert bits(run, line, open_vocabulary=False) is None
    for line in ("ab  zebra", " ab zebra", "ab zebra ", "ab\tzebra", "ab\u00a0zebra", "ab <eos> b"):
        assert bits(run, line) is None
    lower = letters("lower", "--tokenizer.lowercase=true")
    assert bits(lower, "ab zebra") is None
    marks = letters("marks", "--tokenizer.split_punctuation=true")
    opened = TrainedRun(marks)
    spelled = evaluate_text(opened, ["zebra, b"], progress=False, open_vocabulary=True)
    assert spelled.spelling_nats == pytest.approx(-opened.speller.log_prob(["zebra", ","]).sum())
    assert spelled.bits_per_byte is None
    reason = "not known: marks are separated (tokenizer.split_punctuation: true)"
    assert reason in spelled.table("text")


def test_pieces_with_bytes_have_every_byte_and_other_unknown_pieces_are_refused(
    letters: Train, printed: Printed
) -> None:
    bytes_run = letters("bytes", *PIECES_WITH_BYTES)
    plain = evaluate_split(TrainedRun(bytes_run), "test", progress=False)
    spelled = evaluate_split(TrainedRun(bytes_run), "test", progress=False, open_vocabulary=True)
    assert (plain.bits_per_byte, plain.oov) == (None, 1)  # `<unk>` itself
    assert spelled.nll_nats == plain.nll_nats
    assert spelled.bits_per_byte == plain.nll_nats / math.log(2) / plain.utf8_bytes
    literal = ["ab<unk>. <unk>"]  # which is read as this word wherever it is
    opened = TrainedRun(bytes_run)
    assert evaluate_text(opened, literal, progress=False, open_vocabulary=True).oov == 2
    partial = letters("pieces", *PIECES, "--tokenizer.vocab_size=10")
    with pytest.raises(UserError, match=r"the text has pieces that .*run does not know"):
        evaluate_split(TrainedRun(partial), "test", progress=False, open_vocabulary=True)
    with pytest.raises(UserError, match="run has pieces that do not spell every word"):
        lm.load(partial, open_vocabulary=True)
    command = ("evaluate", bytes_run, "--open-vocabulary", "--by-frequency")
    assert "spelling of" not in printed(*command)  # there are no unknown words
    with pytest.raises(UserError, match="run has pieces that spell every word, and no speller"):
        lm.load(bytes_run).generate(spell_unk=True)
    scores = [lm.load(bytes_run, open_vocabulary=each).score(SENTENCES) for each in (False, True)]
    for one, other in zip(*scores, strict=True):
        assert one.log_prob.tolist() == other.log_prob.tolist()


def test_commands_spell_on_request(run: Path, printed: Printed, tmp_path: Path) -> None:
    opened = TrainedRun(run)
    expected = evaluate_split(opened, "test", progress=False, open_vocabulary=True)
    found: dict[str, Any] = json.loads(printed("evaluate", run, "--open-vocabulary", "--json"))
    assert found == expected.to_dict() | {"step": 9, "num_steps": 9, "checkpoint": None}
    assert json.loads((run / "evaluate-test-open.json").read_text()) == found
    for text in ([], [f"--text={opened.config.data.dir}/test.txt"]):
        options = [run, "--open-vocabulary", "--by-frequency", "--json", *text]
        bins = json.loads(printed("evaluate", *options))["by_frequency"]
        assert bins["num_spelled"] == expected.oov
        assert bins["spelling_nats"] == expected.spelling_nats
        for each in (bins["target"], bins["previous"]):
            nats = sum(part["nll_nats"] for part in each) + bins["spelling_nats"]
            assert nats == pytest.approx(expected.nll_nats)
    assert printed("evaluate", run, "--open-vocabulary", "--by-frequency").count("spelling of") == 2
    table = printed("evaluate", run, "--open-vocabulary")
    assert f"{expected.oov}, spelled in {expected.spelling_nats:.1f} nats" in table
    assert f"{expected.bits_per_byte:.4f}" in table
    assert "per word and line end, unknown words spelled" in table
    (tmp_path / "text").write_text("\n".join(SENTENCES) + "\n")
    options = [run, tmp_path / "text", "--open-vocabulary", "--format=json", "--unit=nats"]
    *rows, _ = map(json.loads, printed("score", *options).splitlines())
    scores = lm.load(run, open_vocabulary=True).score(SENTENCES)
    expected_rows = [float(score.log_prob.sum()) for score in scores]
    assert [row["log_prob"] for row in rows] == pytest.approx(expected_rows, rel=1e-6)
    (tmp_path / "list").write_text("".join(f"a\t0\t{line}\n" for line in SENTENCES))
    options = [run, tmp_path / "list", "--lm-weight=1", "--open-vocabulary", "--all"]
    options += ["--non-words="]
    columns = [row.split("\t") for row in printed("rescore", *options).splitlines()]
    found = {text: float(value) for _, _, value, text in columns}
    assert [found[line] for line in SENTENCES] == pytest.approx(expected_rows, rel=1e-5)


def test_an_arpa_model_spells_words_it_lacks(run: Path, tmp_path: Path, printed: Printed) -> None:
    known = {"<s>": -99.0, "</s>": -0.7, "<unk>": -1.0, "ab": -0.5, "bbb": -0.9}
    path = write(tmp_path / "model.arpa", {(w,): (value, 0.0) for w, value in known.items()}, 1)
    speller, ngram = TrainedRun(run).speller, ArpaModel(path)
    scores = ArpaScores(ngram, speller=speller)
    lines, spelled = ["ab b bbb", "日本 <unk>"], ["b", "日本", "<unk>"]
    ten = {"ab": -0.5, "bbb": -0.9, "<eos>": -0.7} | dict.fromkeys(spelled, -1.0)
    of_unknown = speller.outside(["ab", "bbb", "<unk>"]).log_prob(spelled)
    nats = {word: math.log(10) * value for word, value in ten.items()}
    for word, value in zip(spelled, of_unknown.tolist(), strict=True):
        nats[word] += value
    for line, found in zip(lines, scores(lines), strict=True):
        assert found == pytest.approx([nats[word] for word in [*line.split(), "<eos>"]])
    words: list[str | int] = ["b", "ab", ngram.eos_id, "日本"]
    (row,) = scores.candidate_log_probs([scores.start()], words)
    assert row == pytest.approx([nats["b"], nats["ab"], nats["<eos>"], nats["日本"]])
    (tmp_path / "list").write_text("a\t0\tb 日本\n")
    options = ["--lm-weight=1", "--open-vocabulary", "--arpa", path, "--mixture=0", "--all"]
    row = printed("rescore", run, tmp_path / "list", *options).split("\t")
    assert float(row[2]) == pytest.approx(nats["b"] + nats["日本"] + nats["<eos>"], rel=1e-5)


def test_drawn_unknown_words_are_spelled(run: Path) -> None:
    model = lm.load(run)
    options: dict[str, Any] = {"num_tokens": 60, "num_samples": 4, "seed": 5}
    plain = model.generate(allow_unk=True, **options)
    spelled = model.generate(spell_unk=True, **options)
    assert "<unk>" in "".join(plain)
    assert spelled == model.generate(spell_unk=True, **options)
    drawn: list[str] = []
    for before, after in zip(plain, spelled, strict=True):
        match = re.fullmatch(re.escape(before).replace("<unk>", r"([ab]+)"), after)
        assert match
        drawn += match.groups()
    assert len(set(drawn)) > 3
    assert not {model.tokenizer.encode(word)[0] for word in drawn} - {model.unk_id}


def test_a_run_without_a_speller_takes_that_of_its_prepared_data(
    run: Path, tmp_path: Path, complaint: Printed
) -> None:
    words = ["baba", "é"]
    expected = TrainedRun(run).speller.log_prob(words).tolist()
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "speller.npz").unlink()
    assert TrainedRun(copy).speller.log_prob(words).tolist() == expected
    shutil.rmtree(copy / "data")
    assert "is not a prepared folder" in complaint("score", copy, "--open-vocabulary")
    with pytest.raises(UserError, match="a vocabulary size and an open vocabulary exclude"):
        lm.load(run, open_vocabulary=True, vocabulary_size=99)


def test_a_split_whose_text_changed_is_refused(letters: Train) -> None:
    opened = TrainedRun(letters("changed", "--train.max_steps=1"))
    text = Path(opened.config.data.dir, "test.txt")
    content = text.read_text()
    try:
        for changed in (content + "more\n", content.replace("b ab", "ab b")):
            text.write_text(changed)
            with pytest.raises(DataError, match="is not the one that was prepared: restore it"):
                evaluate_split(opened, "test", progress=False, open_vocabulary=True)
    finally:
        text.write_text(content)
