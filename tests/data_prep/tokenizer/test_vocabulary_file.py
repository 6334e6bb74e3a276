"""`vocab.txt`: words and counts come back, and the first wrong line is named."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.tokenizer.vocabulary_file import format_vocabulary, parse_vocabulary


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<eos>\t3\na\t2\na\t1\n", "line 3: 'a' is on line 2 too$"),
        (b"<eos>\t3\na 2\n", "line 2: expected word TAB count, got 'a 2'$"),
        (b"<eos>\t3\na\t-2\n", r"line 2: expected word TAB count, got 'a\\t-2'$"),
        (b"<eos>\t3\n\n<unk>\t1\n", "line 2: expected word TAB count, got ''$"),
        (b"<eos>\t3\n\xff\t1\n", "line 2: invalid UTF-8$"),
        (b"<eos>\t3\na\t1\n", "the word <unk> is missing$"),
        (b"<unk>\t3\na\t1\n", "the word <eos> is missing$"),
        (b"<eos>\t3\na\t5\t\n", r"line 2: expected word TAB count, got 'a\\t5\\t'$"),
        (b"<eos>\t3\na\t\n", r"line 2: expected word TAB count, got 'a\\t'$"),
        (b"<eos>\t3\na", "line 2: expected word TAB count, got 'a'$"),
        (b"<eos>\t3\n\t5\n", r"line 2: expected word TAB count, got '\\t5'$"),
        (b"a\t9999999999999999999\n", r"line 1: expected word TAB count, got 'a\\t9{19}'$"),
        (b"", "line 1: expected word TAB count, got ''$"),
    ],
)
def test_a_bad_vocabulary_is_refused_with_its_line(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=rf"^vocab\.txt(, |: ){message}"):
        parse_vocabulary(content, Path("vocab.txt"))


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_vocabulary_reads_as_words_and_counts(end: str) -> None:
    content = f"<eos>\t3\né\u2028\t2\n<unk>\t0{end}".encode()
    words, counts = parse_vocabulary(content, Path("vocab.txt"))
    assert list(words) == ["<eos>", "é\u2028", "<unk>"]
    assert counts.tolist() == [3, 2, 0]
    assert counts.dtype == np.int64
    assert b"".join(format_vocabulary(words, counts)) == content.removesuffix(b"\n") + b"\n"
