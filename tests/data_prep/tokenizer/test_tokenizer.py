"""Words and pieces: round trips, special tokens, streaming; their files, and token files."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from data_prep.errors import UserError
from data_prep.storage import map_array
from data_prep.tokenizer import tokenizer as tokenizer_module
from data_prep.tokenizer.punctuation import separate_words
from data_prep.tokenizer.serialization import load_tokenizer, save_tokenizer
from data_prep.tokenizer.token_file import encode_split
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from tests.data_prep.conftest import trained_pieces

TEXT = (
    "the cat sat on the mat",
    "the dog saw the cat , and the cat ran away",
    "a mat is on a mat : so is a cat",
    "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
)
WORDS = ("<eos>", "<unk>", "the", "cat", "sat", "don't", ",", ".", "3,000.5", '"', "(", ")", "-")
TOKENIZER = WordTokenizer(["the", "<eos>", "cat", "<unk>", "é"])


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    return trained_pieces(TEXT, 44)


@pytest.fixture(scope="module")
def byte_pieces() -> SentencePieceTokenizer:
    return trained_pieces(TEXT, 300, byte_fallback=True)


@pytest.fixture(params=["words", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, pieces: SentencePieceTokenizer) -> Tokenizer:
    return WordTokenizer(WORDS) if request.param == "words" else pieces


def test_words_of_the_vocabulary_come_back_and_others_are_unknown() -> None:
    tokenizer = WordTokenizer(WORDS)
    assert tokenizer.encode("  the\tzebra sat  <unk> <eos> ") == [2, 1, 4, 1, 0]
    assert tokenizer.decode([2, 1, 4]) == "the <unk> sat"
    assert tokenizer.decode([2, 3, 0, 0, 4, 0]) == "the cat\n\nsat\n"
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.unk_id) == (13, 0, 1)
    assert tokenizer.token(5) == "don't"
    assert WordTokenizer(WORDS, lowercase=True).encode("The CAT <UNK>") == [2, 3, 1]


def test_a_literal_mark_of_spaces_is_no_space(pieces: Tokenizer, byte_pieces: Tokenizer) -> None:
    marks, spaces = "the ▁▁▂ cat▁", "the   ▂ cat "
    unknown = pieces.unk_id
    assert [id for id in pieces.encode(marks) if id == unknown] == [unknown] * 4
    assert pieces.encode(spaces).count(unknown) == 1
    assert byte_pieces.decode(byte_pieces.encode(marks)) == marks
    assert byte_pieces.decode(byte_pieces.encode(spaces)) == spaces
    for tokenizer in (pieces, byte_pieces):
        aligned = tokenizer.align(marks)
        assert aligned.ids.tolist() == tokenizer.encode(marks)
        assert aligned.words == marks.split()
        assert aligned.word_of_id[[0, -1]].tolist() == [0, 2]


@pytest.mark.parametrize("line", ["İSTANBUL", "İstanbul", "istanbul", "ISTANBUL"])
def test_capital_letters_i_with_and_without_dot_are_the_same_in_lower_case(line: str) -> None:
    assert separate_words([line], lowercase=True, split_punctuation=False) == "istanbul\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Don't stop.", ["Don't", "stop", "."]),
        ("3,000.5 km, 7.", ["3,000.5", "km", ",", "7", "."]),
        ("§:n EU:n, maa- ja", ["§:n", "EU:n", ",", "maa-", "ja"]),
        ("`--max-size=5` 24.12.2026.", ["`", "--max-size=5", "`", "24.12.2026", "."]),
        ("%%a%, b.% %%,a .%…", ["%%a", "%", ",", "b", ".", "%", "%%,a", ".", "%", "…"]),
        ("x%<unk>%.%<eos>.,", ["x", "%", "<unk>", "%", ".", "%", "<eos>", ".", ","]),
        (',%a%] "%.', [",", "%a", "%", "]", '"', "%", "."]),
        ("...so U.S., %5", [".", ".", ".", "so", "U.S", ".", ",", "%5"]),
        ("वह गया। क्यों?", ["वह", "गया", "।", "क्यों", "?"]),
        ("نعم، لماذا؟", ["نعم", "،", "لماذا", "؟"]),
        ("l\u2019été e\u0301t", ["l\u2019été", "e\u0301t"]),
    ],
)
def test_punctuation_is_split_but_not_inside_words_and_numbers(line: str, words: list[str]) -> None:
    vocabulary = list(dict.fromkeys(["<eos>", "<unk>", *words]))
    tokenizer = WordTokenizer(vocabulary, split_punctuation=True)
    assert tokenizer.encode(line) == [vocabulary.index(word) for word in words]


@pytest.mark.parametrize("run", [*"%!", "%,", ".,", ")%", "'.", "a%", "%a", "<unk>%", "<un", "%…"])
def test_the_steps_of_separation_are_proportional_to_the_text(run: str) -> None:
    """A million characters: seconds here, hours if each mark looked at all after it."""
    text = run * (1_000_000 // len(run))
    separated = separate_words([text], lowercase=False, split_punctuation=True)
    assert separated.replace(" ", "") == f"{text}\n"


@pytest.mark.parametrize(
    "line",
    [
        'The cat (a "big" one) didn\'t sit, at 3.5: well-known.',
        "Run `ls --max-size=5` (or -v): it's $5.50, 50% off! U.S. and e.g. - a / b",
        "5 §:n EU:n maa- ja metsätalous (24.12.2026) ”hei”, hän sanoi; »niin», klo 12.30.",
        "İstanbul'da 3,5 milyon kişi var; \"evet\" dedi: Türkiye'nin %5'i.",
        "वह घर गया। نعم، لماذا؟",
        "„Ja“, sagte er. “Yes”, ‘no’ ¿qué? «oui»",
    ],
)
def test_decoding_attaches_punctuation_to_its_neighbours(line: str) -> None:
    separated = separate_words([line], lowercase=False, split_punctuation=True)
    words = list(dict.fromkeys(separated.split()))
    tokenizer = WordTokenizer(["<eos>", "<unk>", *words], split_punctuation=True)
    assert tokenizer.decode(tokenizer.encode(line)) == line


def test_encode_lines_equals_encode_line_by_line(tokenizer: Tokenizer) -> None:
    lines = ["the cat", "", " a <unk> mat", "<unk>", "<unk><unk> cat <unk>", "漢 cat"]
    assert tokenizer.encode_lines(lines) == [tokenizer.encode(line) for line in lines]
    assert tokenizer.encode_lines([]) == []
    assert tokenizer.encode("") == []


def test_the_text_unk_and_unknown_characters_are_one_piece(pieces: SentencePieceTokenizer) -> None:
    the = pieces.encode("the")
    assert pieces.encode("the <unk> the") == [*the, pieces.unk_id, *the]
    assert pieces.encode("<unk> the <unk>") == [pieces.unk_id, *the, pieces.unk_id]
    assert pieces.decode(pieces.encode("the <unk> cat <unk>")) == "the <unk> cat <unk>"
    assert pieces.encode("漢").count(pieces.unk_id) == 1
    assert pieces.decode(pieces.encode("a 漢 cat")) == "a <unk> cat"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r<")))
@example("\u3000a\u3000b\u3000")
def test_byte_fallback_restores_every_text(byte_pieces: SentencePieceTokenizer, line: str) -> None:
    ids = byte_pieces.encode(line)
    assert byte_pieces.unk_id not in ids
    assert byte_pieces.decode([*ids, byte_pieces.eos_id, *ids]) == f"{line}\n{line}"
    aligned = byte_pieces.align(line)
    assert (aligned.ids.tolist(), aligned.words) == (ids, line.split())
    assert set(aligned.word_of_id.tolist()) <= set(range(len(aligned.words) + 1))
    for place, word in enumerate(aligned.words):
        spelled = byte_pieces.decode(aligned.ids[aligned.word_of_id == place].tolist())
        assert spelled.split() == [word]


def test_streams_hold_bytes_until_they_are_a_character(byte_pieces: SentencePieceTokenizer) -> None:
    ids = byte_pieces.encode("漢字")
    assert [len(text) for text in byte_pieces.stream_decode(iter(ids))] == [0, 0, 0, 1, 0, 0, 1]
    assert list(byte_pieces.stream_decode([ids[-3]])) == ["", "\ufffd"]


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {id} is outside the vocabulary of"):
            tokenizer.decode([id])


def test_invalid_vocabularies_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="the vocabulary of 2 words lacks <eos>"):
        WordTokenizer(["<unk>", "the"])
    with pytest.raises(ValueError, match="a word occurs twice in the vocabulary"):
        WordTokenizer(["<unk>", "<eos>", "<unk>"])
    with pytest.raises(ValueError, match="4 bytes that are not a sentencepiece model"):
        SentencePieceTokenizer(b"\xff\xff\xff\xff")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=44, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ValueError, match="has no piece for the end of a line"):
        SentencePieceTokenizer(model.getvalue())


def test_a_token_file_holds_lines_with_eos_and_their_counts(tmp_path: Path) -> None:
    lines = ["the cat", "", " é zebra  <unk>"]
    info, occurrences = encode_split(lines, TOKENIZER, tmp_path / "x.npy", progress=False)
    assert np.load(tmp_path / "x.npy").tolist() == [0, 2, 1, 1, 4, 3, 3, 1]
    assert occurrences.tolist() == [1, 3, 1, 2, 1]
    assert (info.tokens, info.lines, info.words, info.oov) == (8, 3, 5, 2)
    assert info.utf8_bytes == len("the cat\n\n é zebra  <unk>\n".encode())
    assert map_array(tmp_path / "x.npy", info.array).dtype == np.uint16


def test_special_words_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    encode_split(["the <eos>", "x<eos>y"], TOKENIZER, tmp_path / "x.npy", progress=False)
    assert caplog.messages == ["x: the text contains <eos> (2), counted as special words"]
    encode_split(["the cat"], TOKENIZER, tmp_path / "x.npy", progress=False)
    assert len(caplog.messages) == 1


def test_more_than_65536_words_take_four_bytes(tmp_path: Path) -> None:
    for vocab_size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        words = ["<eos>", "<unk>", *map(str, range(vocab_size - 2))]
        path, vocabulary = tmp_path / "x.npy", WordTokenizer(words)
        info, _ = encode_split([words[-1]], vocabulary, path, progress=False)
        assert np.load(tmp_path / "x.npy").tolist() == [vocab_size - 1, 0]
        assert info.dtype == dtype


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text("thecaé \u00a0\u2028", max_size=12), min_size=1, max_size=12))
def test_the_batch_size_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    whole = encode_split(lines, TOKENIZER, tmp_path / "x.npy", progress=False)
    monkeypatch.setattr(tokenizer_module, "LINES_PER_BATCH", 2)
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
