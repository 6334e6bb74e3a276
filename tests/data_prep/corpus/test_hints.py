"""The column of text is found, and what is read as words by mistake is warned of."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.corpus.hints import NUM_LINES, compared, find_text, noted, warn_of
from data_prep.errors import UserError

ROWS = [{"id": number, "title": f"t{number}", "text": "the cat sat"} for number in range(3)]
ONE = [{"id": number, "sentence": "the cat sat"} for number in range(3)]
TWO = [{"key": f"k{number}", "sentence": "the cat sat"} for number in range(3)]


def lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows))


def table(rows: Sequence[Mapping[str, object]], separator: str = ",") -> str:
    return "\n".join(
        separator.join(map(str, row)) for row in (rows[0], *(r.values() for r in rows))
    )


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
def test_the_column_of_text_is_found(
    tmp_path: Path, name: str, content: str, found: tuple[str, str]
) -> None:
    (tmp_path / name).write_text(content)
    text = find_text(tmp_path / name, None)
    assert (text.format, text.field) == found
    expected = content.split("\n") if found[0] == "text" else ["the cat sat"] * 3
    found_lines = [line for line in text.lines() if line]
    assert found_lines == (["2024-05-17"] if "05-17" in content else expected)


@pytest.mark.parametrize("separator", [",", "\t"])
def test_the_name_of_a_column_makes_a_file_without_ending_a_table(
    tmp_path: Path, separator: str
) -> None:
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
        (
            '{"text": "a"}',
            ["a: the lines are JSON, .* a column by data.format: json and data.text_field$"],
        ),
        ('[{"text": "a"}, {"text": "b"}]', ["a: the lines are JSON, "]),
        ('["the cat", "a dog"]', ["a: the lines are JSON, "]),
        ('["the cat" he said]', []),
        ("<p>the cat</p>", ["a: the text is XML or HTML, whose tags count as words: remove them$"]),
        ("<s>the cat</s>", ["a: the text is XML or HTML"]),
        ("<s> the cat </s>", ["a: the lines begin with <s>, ", "a: the lines end with </s>, "]),
        (
            "[CLS] the cat [SEP]",
            [r"a: the lines begin with \[CLS\], ", r"a: the lines end with \[S"],
        ),
        ("[INST] the cat [/INST]", ["a: the lines begin", r"a: the lines end with \[/INST\], "]),
        ("the cat <|endoftext|>", [r"a: the lines end with <\|endoftext\|>, "]),
        ("- the <unk> </s> cat .", []),
        ("[1] the cat", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("num_lines", [2, NUM_LINES + 1])
def test_what_is_no_word_is_warned_of_without_delay(
    caplog: pytest.LogCaptureFixture, line: str, warnings: list[str], num_lines: int
) -> None:
    seen = noted(iter([line] * num_lines), "a")
    assert [*islice(seen, num_lines)] == [line] * num_lines
    assert len(caplog.messages) == (len(warnings) if num_lines > NUM_LINES else 0)
    assert [*seen] == []
    for message, warning in zip(caplog.messages, warnings, strict=True):
        assert re.match(warning, message)


@pytest.mark.parametrize("name", ["a.csv", "b/A.TSV.gz"])
def test_the_name_of_a_table_is_warned_of(caplog: pytest.LogCaptureFixture, name: str) -> None:
    warn_of(["1,the cat"], name)
    (message,) = caplog.messages
    assert re.match(f"{name}: the lines are CSV, .* by data.format: csv and data", message)


@pytest.mark.parametrize(
    ("content", "is_table"),
    [
        (table(TWO), True),
        (table(ONE, "\t"), True),
        ('"id";"text"\n1;"the\ncat;"\n2;sat\n3;"a', True),
        *(
            (text * 9, False)
            for text in ("the cat, sat\n", "Hello,world\nit\n", "a,b\n1,2,3\n", "1,2\n", "a\n")
        ),
        ("x" * 200_000 + ",y\n", False),
        ("id,text\n" + f"1,{'x' * 200_000}\n" * 3, True),
    ],
)
def test_a_table_without_a_name_is_known_by_its_columns(
    caplog: pytest.LogCaptureFixture, content: str, is_table: bool
) -> None:
    warn_of(content.split("\n"), "a", "give one column")
    expected = "a: the lines are CSV, of which all columns, names and marks count as words: give"
    assert [each[: len(expected)] for each in caplog.messages] == [expected] * is_table


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
