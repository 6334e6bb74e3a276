"""Token files and the files of tokenizers: what they contain, and that it comes back."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.errors import UserError
from data_prep.storage import map_array
from data_prep.tokenizer import tokenizer
from data_prep.tokenizer.serialization import load_tokenizer, save_tokenizer
from data_prep.tokenizer.token_file import encode_split
from data_prep.tokenizer.tokenizer import WordTokenizer
from tests.data_prep.conftest import trained_pieces

TOKENIZER = WordTokenizer(["the", "<eos>", "cat", "<unk>", "é"])


def test_a_token_file_holds_lines_with_eos_and_their_counts(tmp_path: Path) -> None:
    lines = ["the cat", "", " é zebra  <unk>"]
    info, occurrences = encode_split(lines, TOKENIZER, tmp_path / "x.npy", progress=False)
    assert np.load(tmp_path / "x.npy").tolist() == [0, 2, 1, 1, 4, 3, 3, 1]
    assert occurrences.tolist() == [1, 3, 1, 2, 1]
    assert (info.tokens, info.lines, info.words, info.oov) == (8, 3, 5, 2)
    assert info.utf8_bytes == len("the cat\n\n é zebra  <unk>\n".encode())
    assert map_array(tmp_path / "x.npy", info.array).dtype == np.uint16


def test_special_words_in_the_text_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    encode_split(["the <eos>", "x<eos>y"], TOKENIZER, tmp_path / "x.npy", progress=False)
    assert caplog.messages == ["x: the text contains <eos> (2), counted as special words"]
    encode_split(["the cat"], TOKENIZER, tmp_path / "x.npy", progress=False)
    assert len(caplog.messages) == 1


def test_more_than_65536_words_take_four_bytes(tmp_path: Path) -> None:
    for vocab_size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        words = ["<eos>", "<unk>", *map(str, range(vocab_size - 2))]
        info, _ = encode_split(
            [words[-1]], WordTokenizer(words), tmp_path / "x.npy", progress=False
        )
        assert np.load(tmp_path / "x.npy").tolist() == [vocab_size - 1, 0]
        assert info.dtype == dtype


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text("thecaé \u00a0\u2028", max_size=12), min_size=1, max_size=12))
def test_the_batch_size_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    whole = encode_split(lines, TOKENIZER, tmp_path / "x.npy", progress=False)
    monkeypatch.setattr(tokenizer, "LINES_PER_BATCH", 2)
    batched = encode_split(iter(lines), TOKENIZER, tmp_path / "y.npy", progress=False)
    assert batched[0] == whole[0]
    assert batched[1].tolist() == whole[1].tolist()
    assert whole[0].words == sum(len(line.split()) for line in lines)
    assert whole[0].utf8_bytes == sum(len(line.encode()) + 1 for line in lines)


def test_settings_of_a_word_tokenizer_are_saved_with_the_vocabulary(tmp_path: Path) -> None:
    words = WordTokenizer(["<eos>", "<unk>", "a", "."], lowercase=True, split_punctuation=True)
    save_tokenizer(tmp_path, words, np.array([2, 0, 1, 1], dtype=np.int64))
    assert (tmp_path / "vocab.txt").read_text() == "<eos>\t2\n<unk>\t0\na\t1\n.\t1\n"
    assert load_tokenizer(tmp_path).encode("A.") == [2, 3]
    (tmp_path / "vocab.txt").write_text("<eos>\t2\na\t1\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary of 2 words lacks <unk>"):
        load_tokenizer(tmp_path, verify=False)


def test_a_sentencepiece_model_is_saved_byte_for_byte(tmp_path: Path) -> None:
    tokenizer = trained_pieces(["the cat sat", "the dog", "", "the cat ran", ""], 15)
    info = save_tokenizer(tmp_path, tokenizer)
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model
    assert (info.vocab_size, info.unk_id, info.eos_id) == (15, 0, 1)
    assert load_tokenizer(tmp_path).encode("the cat") == tokenizer.encode("the cat")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "words"}))
    with pytest.raises(UserError, match=r"vocab\.txt cannot be read"):
        load_tokenizer(tmp_path)
