"""Tokenizers come back from their files unchanged."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.settings import TokenizerConfig
from data_prep.tokenizer.serialization import load_tokenizer, save_tokenizer
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, WordTokenizer
from data_prep.tokenizer.vocabulary import train_sentencepiece


def test_settings_of_a_word_tokenizer_are_saved_with_the_vocabulary(tmp_path: Path) -> None:
    words = WordTokenizer(["<eos>", "<unk>", "a", "."], lowercase=True, split_punctuation=True)
    save_tokenizer(tmp_path, words, np.array([2, 0, 1, 1], dtype=np.int64))
    assert (tmp_path / "vocab.txt").read_text() == "<eos>\t2\n<unk>\t0\na\t1\n.\t1\n"
    assert load_tokenizer(tmp_path).encode("A.") == [2, 3]
    (tmp_path / "vocab.txt").write_text("<eos>\t2\na\t1\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary of 2 words lacks <unk>"):
        load_tokenizer(tmp_path, verify=False)


def test_a_sentencepiece_model_is_saved_byte_for_byte(tmp_path: Path) -> None:
    settings = TokenizerConfig(kind="sentencepiece", vocab_size=15)
    tokenizer = SentencePieceTokenizer(
        train_sentencepiece(["the cat sat", "the dog", "", "the cat ran", ""], settings)
    )
    info = save_tokenizer(tmp_path, tokenizer)
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model
    assert (info.vocab_size, info.unk_id, info.eos_id) == (15, 0, 1)
    assert load_tokenizer(tmp_path).encode("the cat") == tokenizer.encode("the cat")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "words"}))
    with pytest.raises(UserError, match=r"vocab\.txt cannot be read"):
        load_tokenizer(tmp_path)
