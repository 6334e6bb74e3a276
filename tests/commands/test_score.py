"""`lm score`: layouts whose figures agree and add up; mistakes."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lm
from lm.run import TrainedRun
from lm.scoring import Scorer

Printed = Callable[..., list[str]]


@pytest.fixture
def printed(printed: Callable[..., str], tmp_path: Path) -> Printed:
    """`printed(run, lines, *options)`: the lines that `lm score` prints."""

    def run(folder: Path, lines: list[str], *options: str) -> list[str]:
        path = tmp_path / "text.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        return printed("score", folder, path, *options).splitlines()

    return run


LINES = ["the cat sees a dog today", "zebra follows", ""]
UNIT = re.compile(r"(\S+)=(\d+) (\d+) (-?[\d.e-]+)\t")


def test_a_perplexity_beyond_a_float_is_infinite_and_in_json_null(
    lstm_run: Path, printed: Printed
) -> None:
    options = (lstm_run, ["%" * 8000], "--open-vocabulary", "--level=summary")
    assert printed(*options)[0] == "Perplexity including OOVs:\tinf"
    summary = json.loads(printed(*options, "--format=json")[0])["summary"]
    assert (summary["perplexity"], summary["log_prob"] < -2000) == (None, True)


def test_the_layout_is_that_of_kenlm_and_figures_add_up(lstm_run: Path, printed: Printed) -> None:
    *sentences, including, excluding, oov, tokens = printed(lstm_run, LINES, "--level=word")
    total = oov_total = 0.0
    for line, row in zip(LINES, sentences, strict=True):
        units = UNIT.findall(row)
        match: Any = re.fullmatch(r"Total: (\S+) OOV: (\d+)", UNIT.sub("", row))
        assert [unit[0] for unit in units] == [*line.split(), "</s>"]
        assert [int(unit[2]) for unit in units] == list(range(2, len(units) + 2))
        assert int(match[2]) == line.count("zebra") == sum(unit[1] == "0" for unit in units)
        assert float(match[1]) == pytest.approx(sum(float(unit[3]) for unit in units), rel=1e-6)
        total += float(match[1])
        oov_total += sum(float(unit[3]) for unit in units if unit[1] == "0")
    values = [row.split("\t") for row in (including, excluding, oov, tokens)]
    names = ["Perplexity including OOVs:", "Perplexity excluding OOVs:", "OOVs:", "Tokens:"]
    assert [name for name, _ in values] == names
    assert float(values[0][1]) == pytest.approx(10 ** (-total / 11), rel=1e-5)
    assert float(values[1][1]) == pytest.approx(10 ** (-(total - oov_total) / 10), rel=1e-5)
    assert (values[2][1], values[3][1]) == ("1", "11")
    by_sentence = printed(lstm_run, LINES, "--level=sentence")
    assert by_sentence == [UNIT.sub("", row) for row in sentences] + by_sentence[-4:]
    assert printed(lstm_run, LINES, "--level=summary") == [including, excluding, oov, tokens]


def test_ids_end_at_a_tab_or_else_at_a_space_which_is_reported_once(
    lstm_run: Path, printed: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"item 1\t{LINES[0]}", f"item {LINES[0]}"]
    printed(lstm_run, lines[:1], "--ids")
    assert "--ids" not in caplog.text
    _, first, second, _ = printed(lstm_run, [*lines, lines[1]], "--ids", "--format=tsv")
    (notice,) = [message for message in caplog.messages if message.startswith("--ids")]
    assert "line 2 has no tab, so that its id is its first word, 'item'" in notice
    assert first.split("\t")[0] == "item 1"
    assert second.split("\t")[0] == "item"
    assert first.split("\t")[1:] == second.split("\t")[1:]


def test_units_layouts_and_ids_agree(lstm_run: Path, printed: Printed) -> None:
    with_ids = [f"utt{k}\t{line}" for k, line in enumerate(LINES)]
    rows = printed(lstm_run, with_ids, "--ids")
    totals = [float(row.split("Total: ")[1].split()[0]) for row in rows[:3]]
    assert [row.split("\t")[0] for row in rows[:3]] == ["utt0", "utt1", "utt2"]
    header, *table = printed(lstm_run, with_ids, "--ids", "--format=tsv", "--unit=bits")
    assert header == "id\tbits\twords\ttokens\toov"
    for total, row in zip(totals, table, strict=True):
        assert float(row.split("\t")[1]) == pytest.approx(total * math.log2(10), rel=1e-6)
    options = ["--ids", "--format=json", "--unit=nats", "--level=word", "--details"]
    *sentences, _ = map(json.loads, printed(lstm_run, with_ids, *options))
    header, *words = printed(lstm_run, with_ids, *options, "--format=tsv")
    columns = "id position word nats surprisal oov tokens context rank entropy_nats class_nats"
    assert header.split("\t") == columns.split()
    for sentence in sentences:
        for place, word in enumerate(sentence["words"], 1):
            assert word["position"] == place
            bits = None if word["oov"] else pytest.approx(-word["log_prob"] / math.log(2), rel=1e-6)
            assert word["surprisal"] == bits
    flat = [(each["id"], *word.values()) for each in sentences for word in each["words"]]
    cells = [["" if cell is None else str(cell) for cell in row] for row in flat]
    assert cells == [row.split("\t") for row in words]
    assert {(row[4], row[8]) for row in cells if row[5] == "1"} == {("", "")}
    for option in ("--open-vocabulary", "--vocabulary-size=1000"):
        _, *words = printed(lstm_run, with_ids, *options, "--format=tsv", option)
        cells = [row.split("\t") for row in words]
        assert all(float(row[4]) > 0 for row in cells)
        assert ("" in {row[8] for row in cells if row[5] == "1"}) == (option == "--open-vocabulary")
    for total, sentence in zip(totals, sentences, strict=True):
        assert sentence["log_prob"] == pytest.approx(total * math.log(10), rel=1e-6)


def test_csv_readers_read_every_row_of_a_table(lstm_run: Path, printed: Printed) -> None:
    lines = ['say " now', '"', "NA nan null 'the cat\""]
    rows = printed(lstm_run, lines, "--format=tsv", "--level=word")
    header, *table = csv.reader(rows, delimiter="\t")
    assert header == ["id", "position", "word", "log10", "surprisal", "oov", "tokens", "context"]
    words = [word for line in lines for word in [*line.split(), "<eos>"]]
    assert [row[2] for row in table] == words


def test_figures_of_words_of_several_pieces_are_sums(pieces_run: Path, printed: Printed) -> None:
    lines = ["the cat sees a horse"]
    table = ["--details", "--unit=nats"]  # implies --level=word --format=tsv
    rows = list(csv.DictReader(printed(pieces_run, lines, *table), delimiter="\t"))
    (score,) = Scorer(TrainedRun(pieces_run, "cpu")).sentences(lines, details=True)
    figures: Any = score.tokens
    assert len(score.unit_of_token) > len(rows) == 6
    for place, row in enumerate(rows):
        tokens = score.unit_of_token == place
        assert int(row["tokens"]) == tokens.sum()
        assert int(row["rank"]) == figures.rank[tokens].sum()
        found = float(row["entropy_nats"]), float(row["nats"])
        expected = figures.entropy[tokens].sum(), figures.log_prob[tokens].sum()
        assert found == pytest.approx(expected, rel=1e-6)
    rows = list(csv.DictReader(printed(pieces_run, lines, *table, "--level=token"), delimiter="\t"))
    assert [int(row["position"]) for row in rows] == (score.unit_of_token + 1).tolist()
    text = "".join(f"▁{word}" for word in lines[0].split())
    assert "".join(row["word"] for row in rows) == f"{text}<eos>"
    for name, expected in (("nats", figures.log_prob), ("entropy_nats", figures.entropy)):
        assert [float(row[name]) for row in rows] == pytest.approx(expected.tolist(), rel=1e-6)
    for line_end in ("", "\n"):  # which is no piece
        (same,) = lm.load(pieces_run).score([lines[0] + line_end])
        assert same.log_prob == pytest.approx(score.log_prob, abs=1e-5)


def test_a_summary_is_printed_in_every_layout(lstm_run: Path, printed: Printed) -> None:
    options = ["--level=summary", "--unit=bits"]
    (row,) = printed(lstm_run, LINES, *options, "--format=json")
    summary = json.loads(row)["summary"]
    header, values = printed(lstm_run, LINES, *options, "--format=tsv")
    names = "sentences words tokens oov bits perplexity perplexity_excluding_oov word_perplexity"
    assert header.split("\t") == names.split()
    assert summary.pop("unit") == "bits"
    assert list(map(float, values.split("\t"))) == list(summary.values())
    including, *_ = printed(lstm_run, LINES, *options)
    assert including == f"Perplexity including OOVs:\t{summary['perplexity']}"


def test_lines_of_an_id_are_one_text(
    lstm_run: Path, printed: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [["the cat sees a dog today", "a bird"], ["zebra follows zebra"]]
    lines = [f"text {k}\t{line}" for k, text in enumerate(texts) for line in text]
    table = ["--level=word", "--format=tsv", "--unit=nats"]
    _, *rows = printed(lstm_run, lines, *table, "--stream-by-id")
    model = lm.load(lstm_run)
    scores = [score for text in texts for score in model.score(text, stream=True)]
    expected = [float(each) for score in scores for each in score.log_prob]
    assert [float(row.split("\t")[3]) for row in rows] == pytest.approx(expected, rel=1e-6)
    assert scores[1].log_prob[0] != model.score(texts[0])[1].log_prob[0]
    assert "2 of 11 words are unknown, without a surprisal: lm/scoring/README.md" in caplog.messages
    printed(lstm_run, lines[2:], *table, "--ids")
    assert any("67 % of the words of the text are unknown" in each for each in caplog.messages)
