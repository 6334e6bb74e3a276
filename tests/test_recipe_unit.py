"""`lm new` chooses what a token is: a word, an item, a piece or a character."""

import shlex
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from data_prep.corpus.split import Sample
from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import load_config
from lm.recipe import texts as recipe
from lm.recipe.texts import measure
from tests.test_recipe import new

pytestmark = pytest.mark.usefixtures("current_folder")


def test_attached_punctuation_becomes_words_of_its_own() -> None:
    raw = ["The cat sat, and the dog ran.", "It was late."]
    assert "split_punctuation: true" in measure(Sample(raw, 1.0, 43))[2]
    hindi = ["लड़का स्कूल गया।", "वह वापस आया।"]
    assert "split_punctuation: true" in measure(Sample(hindi, 1.0, 80))[2]
    tokenized = ["The cat sat , and the dog ran .", "It was late ."]
    assert "split_punctuation: false" in measure(Sample(tokenized, 1.0, 46))[2]


def test_the_vocabulary_of_a_sample_is_extrapolated() -> None:
    lines = [f"word{number} word{number}" for number in range(5_000)]
    num_tokens, num_words, _ = measure(Sample(lines, 0.1, 10**6))
    assert num_tokens == 150_000
    assert num_words == pytest.approx(50_000, rel=0.01)  # every line has a new word
    same = ["the same words the same words"] * 5_000
    assert measure(Sample(same, 0.1, 10**6))[1] == 5  # with <unk> and <eos>


JAPANESE = "ある日の暮方の事である一人の下人が羅生門の下で雨やみを待っていた"


@pytest.mark.parametrize("length", [30, 9, 4], ids=["sentences", "short lines", "words"])
def test_text_without_spaces_is_cut_into_pieces_or_characters(length: int) -> None:
    sample = [JAPANESE[:length]] * 9
    pieces = "kind: sentencepiece, vocab_size: 8000, byte_fallback: true"
    assert measure(Sample(sample, 0.1, 10**7))[1:] == (8_000, pieces)
    num_tokens, num_words, tokenizer = measure(Sample(sample, 1.0, 999))
    assert (num_tokens, tokenizer) == (9 * (length + 1), f"{pieces}, model_type: char")
    assert num_words == len(set(JAPANESE[:length])) + 259
    for other in ("ｱﾙﾋﾉｸﾚｶﾞﾀ", "བོད་ཡིག་གི་སྐད", "𠀀𠀁𠀂𠀃𠀄𠀅𠀆𠀇"):
        assert measure(Sample([other] * 9, 1.0, 999))[2] == f"{pieces}, model_type: char"
    words = [" ".join(JAPANESE)] * 9
    assert measure(Sample(words, 1.0, 999))[2].startswith("kind: words")


RANDOM = Random(1)
SYLLABLES = [f"{first}{second}" for first in "bdfgklmnprst" for second in "aeiou"]


def name(length: int) -> str:
    return "".join(RANDOM.choices(SYLLABLES, k=length)).capitalize()


def han(length: int) -> str:
    return "".join(chr(0x4E00 + RANDOM.randrange(2_000)) for _ in range(length))


def number(below: int) -> int:
    return int(below * RANDOM.random() ** 2)


WORDS, CHARACTERS, ITEMS = "kind: words, min_count", "kind: sentencepiece", recipe.ITEMS
UNITS: dict[str, tuple[Callable[[], str], str]] = {
    "names": (lambda: name(RANDOM.randrange(2, 5)), CHARACTERS),
    "full names": (lambda: f"{name(1)} {name(4)}", CHARACTERS),
    "serial numbers": (lambda: f"SN-{RANDOM.randrange(10**7)}", CHARACTERS),
    "words that occur once": (lambda: " ".join(name(7) for _ in range(8)), CHARACTERS),
    "chat": (lambda: f"12:03 user{number(9)}: {han(12)} https://ex.com/{number(9)}", CHARACTERS),
    "pairs": (lambda: f"{' '.join(name(1) for _ in range(8))}\t{han(10)}", CHARACTERS),
    "thai": (lambda: f"{name(1)} {name(1)} สวัสดีชาวโลก{name(1)}", CHARACTERS),
    "separated": (lambda: " ".join(chr(0x4E00 + number(900)) * 2 for _ in range(9)), WORDS),
    "foreign words": (lambda: f"{' '.join(name(1) for _ in range(9))} {han(2)}", WORDS),
    "prose": (lambda: " ".join(name(RANDOM.choice((1, 1, 1, 2))) for _ in range(9)), WORDS),
    "items": (lambda: " ".join(f"i{number(900)}" for _ in range(9)), ITEMS),
    "numbers": (lambda: " ".join(str(number(900)) for _ in range(9)), ITEMS),
    "codes": (lambda: ", ".join(f"B00{number(900):04}X." for _ in range(9)), ITEMS),
    "log": (lambda: f"12:0{number(9)} the job {number(50)} of {name(1)} ends well", WORDS),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("share", [1.0, 0.1], ids=["text", "sample"])
def test_the_unit_fits_the_text(unit: str, share: float) -> None:
    line, tokenizer = UNITS[unit]
    lines = [line() for _ in range(3_000)]
    num_tokens, num_words, chosen = measure(Sample(lines, share, 999_999))
    assert chosen.startswith(tokenizer)
    if tokenizer == ITEMS:
        assert num_tokens == 30_000 / share
        assert num_words >= 2 + len({word for line in lines for word in line.split()})


@pytest.mark.parametrize("num_lines", [400, 4_000])
def test_many_words_that_occur_once_are_warned_of(
    num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    common = ["the", "of", "and", "to", "in", "a"]
    lines = [" ".join([*RANDOM.choices(common, k=6), name(7), name(7)]) for _ in range(num_lines)]
    config = new("\n".join(lines))
    (warning,) = caplog.messages
    assert warning.startswith("22 % of the training tokens occur once, and about as many of other")
    remedy = shlex.split(warning[warning.index("--") :])
    assert load_config("my.yaml", remedy).tokenizer.byte_fallback
    assert config.tokenizer.min_count == (1 if num_lines == 400 else 2)


def test_a_short_text_without_spaces_trains_on_characters() -> None:
    new("".join(f"{JAPANESE[i % 20 :]}{chr(0x4E00 + i)}\n" for i in range(60)))
    assert main(["train", "my.yaml", "--no-progress", "--train.max_steps=2"]) == 0
    splits = open_prepared(Path("runs/my/data")).splits
    assert {split: info.oov for split, info in splits.items()} == dict.fromkeys(splits, 0)
    assert splits["train"].tokens > 1000
