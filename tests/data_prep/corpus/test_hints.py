"""The column of text is found, mistakes are warned of; a text is cut into splits."""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.corpus import split as split_module
from data_prep.corpus.hints import NUM_LINES, compared, find_text, noted, warn_of
from data_prep.corpus.lines import TextFile
from data_prep.corpus.split import Sample, read_sample, split_text, write_splits
from data_prep.errors import UserError

ROWS = [{"id": number, "title": f"t{number}", "text": "the cat sat"} for number in range(3)]
ONE = [{"id": number, "sentence": "the cat sat"} for number in range(3)]
TWO = [{"key": f"k{number}", "sentence": "the cat sat"} for number in range(3)]
BOTH = ["valid", "test"]


def lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows))


def table(rows: Sequence[Mapping[str, object]], separator: str = ",") -> str:
    cells = [rows[0], *(row.values() for row in rows)]
    return "\n".join(separator.join(map(str, row)) for row in cells)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", "the cat sat", ("text", "text")),
        ("a.txt", '{"the cat"} sat\n{}', ("text", "text")),
        ("a.txt", "[1] the cat\n{sat}", ("text", "text")),
        ("a.txt", "a, b\n1, 2", ("text", "text")),
        ("a.jsonl", lines(ROWS), ("json", "text")),
        ("a.txt", f"\n{lines(ONE)}", ("json", "sentence")),
        ("a.ndjson", lines(TWO), ("json", "sentence")),
        ("a.json", json.dumps(ROWS), ("json", "text")),
        ("a", json.dumps(TWO, indent=2), ("json", "sentence")),
        ("a.json", lines([{"text": "2024-05-17"}]), ("json", "text")),
        ("A.CSV", table(ROWS), ("csv", "text")),
        ("a.csv", table(ONE, ";"), ("csv", "sentence")),
        ("a.tsv", table(TWO, "\t"), ("csv", "sentence")),
        ("a.jsonl", lines([{"id": 1}, {"text": None}, *ROWS]), ("json", "text")),
        ("a.jsonl", lines([*[{"id": 1, "text": None}] * NUM_LINES, *ROWS]), ("json", "text")),
        ("a.jsonl", lines([{"sentence": None}, *ONE, {"sentence": ""}]), ("json", "sentence")),
        ("a.csv", f"{table(ONE)},\n3,", ("csv", "sentence")),
        ("a.csv", '"text"\n' + "the cat sat\n" * 3, ("csv", "text")),
    ],
)
def test_the_column_of_text_is_found(tmp_path: Path, name: str, content: str, found: Any) -> None:
    (tmp_path / name).write_text(content)
    text = find_text(tmp_path / name, None)
    assert (text.format, text.field) == found
    expected = content.split("\n") if found[0] == "text" else ["the cat sat"] * 3
    found_lines = [line for line in text.lines() if line]
    assert found_lines == (["2024-05-17"] if "05-17" in content else expected)


@pytest.mark.parametrize("separator", [",", "\t"])
def test_the_name_of_a_column_makes_any_file_a_table(tmp_path: Path, separator: str) -> None:
    (tmp_path / "a").write_text(table(ROWS, separator).replace("title", '"title"'))
    assert [*find_text(tmp_path / "a", "title").lines()] == ["t0", "t1", "t2"]


def test_the_column_of_parquet_is_found_in_a_file_of_any_name(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(TWO), tmp_path / "null")
    text = find_text(tmp_path / "null", None)
    assert (text.format, [*text.lines()]) == ("parquet", ["the cat sat"] * 3)
    assert [*find_text(tmp_path / "null", "key").lines()] == ["k0", "k1", "k2"]
    parquet.write_table(pa.Table.from_pylist(TWO)[:0], tmp_path / "null")
    with pytest.raises(UserError, match=r"null: the file has no row$"):
        find_text(tmp_path / "null", None)


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        ('{"text": "a"}', ["a: the lines are JSON, .* by data.format: json and data.text_field$"]),
        ('[{"text": "a"}, {"text": "b"}]', ["a: the lines are JSON, "]),
        ('["the cat", "a dog"]', ["a: the lines are JSON, "]),
        ('["the cat" he said]', []),
        ("<p>the cat</p>", ["a: the text is XML or HTML, whose tags count as words: remove them$"]),
        ("<s>the cat</s>", ["a: the text is XML or HTML"]),
        ("<s> the cat </s>", ["a: the lines begin with <s>, ", "a: the lines end with </s>, "]),
        ("[CLS] the cat [SEP]", [r"a: the lines begin with \[CLS", r"a: the lines end with \[SEP"]),
        ("[INST] the cat [/INST]", ["a: the lines begin", r"a: the lines end with \[/INST\], "]),
        ("the cat <|endoftext|>", [r"a: the lines end with <\|endoftext\|>, "]),
        ("  return", ["a: lines are indented, which pieces .* keep, not words$"]),
        ("は\u3099れ", ["a: the text has letters and marks apart .* uconv -x nfc a > NEW$"]),
        ("この\t連体詞,*\nEOS", ["a: the lines are a tagger's, one word in each: join sentences$"]),
        ("- the <unk> </s> cat .", []),
        ("[1] the cat", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("num_lines", [2, NUM_LINES + 1])
def test_what_is_no_word_is_warned_of_without_delay(
    caplog: pytest.LogCaptureFixture, line: str, warnings: list[str], num_lines: int
) -> None:
    lines = [*islice(cycle(line.split("\n")), num_lines)]
    seen = noted(iter(lines), "a")
    assert [*islice(seen, num_lines)] == lines
    assert len(caplog.messages) == (len(warnings) if num_lines > NUM_LINES else 0)
    assert [*seen] == []
    for message, warning in zip(caplog.messages, warnings, strict=True):
        assert re.match(warning, message)


@pytest.mark.parametrize(
    ("name", "content", "is_table"),
    [
        ("a", table(TWO), True),
        ("a", table(ONE, "\t"), True),
        ("a", '"","text"\n"1","the, cat"\n"2",sat\n"3",on\n', True),
        ("a", '"id";"text"\n1;"the\ncat;"\n2;sat\n3;"a', True),
        *(
            ("a", text * 9, False)
            for text in ("the cat, sat\n", "Hello,world\nit\n", "a,b\n1,2,3\n", "1,2\n", "a\n")
        ),
        ("a", "x" * 200_000 + ",y\n", False),
        ("a", "id,text\n" + f"1,{'x' * 200_000}\n" * 3, True),
        *((name, "1,the cat", True) for name in ("a.csv", "b/A.TSV.gz")),
    ],
)
def test_a_table_is_known_by_its_name_or_its_columns(
    caplog: pytest.LogCaptureFixture, name: str, content: str, is_table: bool
) -> None:
    warn_of(content.split("\n"), name)
    warn_of(content.split("\n"), name, "give one column")
    problem = f"{name}: the lines are CSV, of which all columns, names and marks count as words"
    remedy = "a configuration reads a column by data.format: csv and data.text_field"
    expected = [f"{problem}: {each}" for each in (remedy, "give one column")]
    assert caplog.messages == (expected if is_table else [])


@pytest.mark.parametrize(
    ("held_out", "share"),
    [
        (["the cat sat", " the dog ran ", "", "new words here"], 67),
        (["the cat sat", "some other words, new, that are far more of the text than it"], None),
        (["the cat sat"] * 3 + ["one of few new lines"], 75),
        (["", ""], None),
    ],
)
def test_lines_of_a_split_that_are_training_text_are_warned_of(
    caplog: pytest.LogCaptureFixture, held_out: list[str], share: int | None
) -> None:
    train = ["the cat sat", "the dog ran", "", "it is late", "the cat sat"]
    assert [*compared(train, {"valid": held_out, "test": ["unseen"]})] == train
    expected = [] if share is None else [f"valid: {share} % of its lines are lines of the training"]
    assert [message[: len(expected[0])] for message in caplog.messages] == expected


def cut(folder: Path, text: str, unit: Any, splits: list[str]) -> tuple[Any, dict[str, list[str]]]:
    """Sizes and lines of the splits, of which each held-out one has every 20th unit."""
    path, new = folder / "text.txt", folder / "new"
    path.write_bytes(text.encode())
    new.mkdir()
    sizes = write_splits(TextFile(path), new, unit, 20, splits)
    return sizes, {path.stem: path.read_text().splitlines() for path in new.iterdir()}


def test_lines_are_held_out_at_even_distances(tmp_path: Path) -> None:
    text = [f"line {number}" for number in range(61)]
    sizes, splits = cut(tmp_path, "\r\n".join(text), "lines", BOTH)
    assert sizes == {"train": (55, 431), "valid": (3, 23), "test": (3, 24)}
    assert splits["valid"] == ["line 9", "line 29", "line 49"]
    assert splits["test"] == ["line 19", "line 39", "line 59"]
    held_out = splits["valid"] + splits["test"]
    assert splits["train"] == [line for line in text if line not in held_out]


def test_documents_are_never_divided(tmp_path: Path) -> None:
    documents = [[f"{number}: {line}" for line in "abc"[: 1 + number % 3]] for number in range(40)]
    text = "\n\n\n".join("\n".join(document) for document in documents)
    sizes, found = cut(tmp_path, text, "documents", ["test"])
    assert {split: num_units for split, (num_units, _) in sizes.items()} == {"train": 38, "test": 2}
    splits = {name: list(filter(None, lines)) for name, lines in found.items()}
    assert splits["test"] == documents[19] + documents[39]
    assert splits["train"] == list(chain(*documents[:19], *documents[20:39]))


def split(folder: Path, documents: list[list[str]]) -> tuple[str, dict[str, int]]:
    """Split a text of documents as `split_text` chooses; return what was cut and the units."""
    path = folder / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n")
    (folder / "new").mkdir(exist_ok=True)
    unit, sizes = split_text(TextFile(path), folder / "new", read_sample(TextFile(path)), BOTH)
    return unit, {name: num_units for name, (num_units, _) in sizes.items()}


def test_documents_stay_whole_if_the_splits_have_useful_sizes(tmp_path: Path) -> None:
    page = ["a line of eight words, that is this"] * 300
    assert split(tmp_path, [page] * 20) == ("documents", {"train": 18, "valid": 1, "test": 1})
    assert split(tmp_path, [page] * 19)[0] == "lines"
    cut = {"train": 4500, "valid": 250, "test": 250}
    assert split(tmp_path, [page[:250]] * 20) == ("lines", cut)
    short = [["one line"]] * 30
    for long in (0, 9):  # in the training and in the validation split
        assert split(tmp_path, [*short[:long], page * 100, *short[long:]])[0] == "lines"


def test_large_texts_are_sampled_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_module, "SAMPLE_BYTES", 1600)
    text = [f"line {number:06}" for number in range(10_000)]
    (tmp_path / "text.txt").write_text("\n".join(text) + "\n")
    sample = read_sample(TextFile(tmp_path / "text.txt"))
    assert set(sample.lines) <= set(text)
    assert int(sample.lines[0].split()[1]) < 20
    assert int(sample.lines[-1].split()[1]) > 9980
    assert 0.008 < sample.share < 1600 / 120_000
    assert sample.num_bytes == 120_000
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"the same line\n" * 10_000))
    assert path.stat().st_size < 1600
    sample = read_sample(TextFile(path))
    assert (sample.num_bytes, len(sample.lines)) == (140_000, 115)
    assert sample.share == 115 / 10_000


def test_large_texts_hold_out_a_size_not_a_share() -> None:
    assert Sample(["a"], 1.0, 1_000_000).period == 20
    assert Sample(["a"], 0.02, 200_000_000).period == 200
