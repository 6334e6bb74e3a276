"""Files of recognisers: what is read, what is named instead, labels that are no words."""

import logging
import subprocess
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from lm.rescoring.formats import NonWords
from lm.rescoring.lattice import read_lattices
from lm.rescoring.nbest import read_nbest
from lm.rescoring.references import read_references
from lm.rescoring.utterances import Utterances
from lm.rescoring.weights import ScoredList, Weights

SLF = "N=3 L=2\nI=0\nI=1\nI=2\nJ=0 S=0 E=1 {}\nJ=1 S=1 E=2 {}\n"


def read(folder: Path, text: str, references: str = "", non_words: str | None = None) -> Utterances:
    (folder / "x").write_text(text, encoding="utf-8")
    (folder / "said").write_text(references, encoding="utf-8")
    said = str(folder / "said") if references else None
    labels = None if non_words is None else NonWords(non_words)
    return Utterances.read(str(folder / "x"), said, non_words=labels)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("u\n0 1 33 w1 1.5,20\n1 2 0 <eps> 0,3\n2 3 7 w2 2,1\n3 0,0\n\n", ["w1 w2"]),
        ("u\n0 1 a,b\n1 2 w2 1,2\n2\n", ["a,b w2"]),
        ("u \n0\t1\tw1\n1\t2\t7\t1,2,3_4\n2\t0,3,\n\n", ["w1 7"]),
        (SLF.format("W=\\303\\251t\\303\\251", 'W="w1"'), ["été w1"]),
        (SLF.format("W='café'", 'W="new york"'), ["café new york"]),
        (SLF.format("W='em", "W=don't"), ["'em don't"]),
        (SLF.format("W=\\'em", 'W="say \\"so\\""'), ['\'em say "so"']),
        (SLF.format("W=\\042w1", "W=a\\\\b"), ['"w1 a\\b']),
        (SLF.format("W=w1\ta=-1", "\tW=w2").replace(" ", "\t"), ["w1 w2"]),
        ("# of SRILM\n" + SLF.format("W=w1", "W=w2"), ["w1 w2"]),
        ("1001\t\n1001\tw1 w2\n", ["", "w1 w2"]),
        ("#1\tw1 w2\n#1\tw3\n", ["w1 w2", "w3"]),
        ("u\t7\nu\t8\n", ["7", "8"]),
        ("U=5\tw1 w2\nN=1\ta = b\n", ["w1 w2", "a = b"]),
        ("I=0\t-1\tw1\nJ=1\t-2\t\n", ["w1", ""]),
        ("N=1-2 w1 w2\nN=1-1 \n", ["", "w1 w2"]),
        ("u-10 w3\nu-1 w1\nu-2 w2\n", ["w1", "w2", "w3"]),  # as `sort` may leave them
    ],
)
def test_words_are_those_of_the_format(text: str, expected: list[str], tmp_path: Path) -> None:
    assert read(tmp_path, text).nbest.texts == expected


def test_an_utterance_with_numbers_alone_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, "u\n0 1 w1 1,2\n1\n\nv\n0 1 101 1,2\n1\n").nbest.texts == ["w1", "101"]
    assert "the words of utterance v are numbers alone" in caplog.text


@pytest.mark.parametrize("arcs", ["0 1 5 1,2\n1 2 0 2,1\n2", "0 1 7 5 1,2\n1 2 9 0\n2"])
def test_numbers_are_words_if_the_vocabulary_has_them(arcs: str) -> None:
    lines = ["u", *arcs.split("\n")]
    (found,) = read_lattices("x", lines, NonWords(are_known={"0", "5", "6"}.issuperset))
    assert found.words == ["5", "0"]
    with pytest.raises(UserError, match="the words are numbers"):
        read_lattices("x", lines, NonWords(are_known={"5", "6"}.issuperset))


LABELS = "sil SIL !SIL !NULL !SENT_START <SPOKEN_NOISE> <noise> [noise] {breath} #0 <eps> <s> </s>"
LABELS += " <unk> <UNK> ++um++ <v-noise> [laughter] #12 <sil> *DELETE* SENT-START SENT_END"


@pytest.mark.parametrize("label", LABELS.split())
def test_labels_that_are_no_words_are_left_out_of_every_format(
    label: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    nbest = f"x\tw1 {label} w2\n"
    for text in (
        SLF.replace("N=3 L=2", "N=4 L=3").format("W=w1", f"W={label}") + "I=3\nJ=2 S=2 E=3 W=w2\n",
        f"x\n0 1 w1 1,2\n1 2 {label} 1,2\n2 3 w2\n3\n",
        nbest,
    ):
        found = read(tmp_path, text, f"x {label} w1 w2\n")
        assert found.nbest.texts == ["w1 w2"]
        assert found.errors is not None
        assert (found.errors.num_words, found.errors.errors.tolist()) == (2, [0])
    assert f"labels that are no words are left out: {label} (1)" in caplog.text
    assert read(tmp_path, nbest, non_words="").nbest.texts == [f"w1 {label} w2"]
    assert read(tmp_path, nbest, non_words="w.").nbest.texts == [label]


@pytest.mark.parametrize(
    ("references", "num_words", "errors"),
    [
        ("u1 w1 w2\nu2 w3\n", 3, [0, 1, 0]),
        ("w1 w2 (u1)\nw3 (u2)\n", 3, [0, 1, 0]),
        (";; of SCTK\n(u2)\nw1  w2\t(u1)\n", 2, [0, 1, 1]),
        ("u1 w1 (w2)\nu2 (w3)\n", 3, [1, 1, 1]),
        ("u1 w1 w2\nu2\n", 2, [0, 1, 1]),
        ("u1 1 2 3 4 5\nu2 4 5 6 7\n", 9, [5, 5, 4]),  # digits, not the times of a CTM file
    ],
)
def test_references_are_read_in_the_layouts_of_kaldi_and_sctk(
    references: str, num_words: int, errors: list[int], tmp_path: Path
) -> None:
    read_list = read(tmp_path, "u1\tw1 w2\nu1\tw1\nu2\tw3\n", references)
    found = read_list.errors
    assert found is not None
    assert (found.num_words, found.errors.tolist()) == (num_words, errors)
    rate = found.report(read_list.nbest, read_list.nbest.first)["wer_before"]
    assert rate == pytest.approx(100 * (errors[0] + errors[2]) / num_words)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("u1 1 spk 0.00 1.00 w1\nu1 A spk 1 2 <o,f0> w2\nu2 1 spk 0.5 1 w3\n", "an STM file"),
        ("u1 A s 0 1 w1\nu1 A s 1 2 w2\nu2 B t 0 2 w3\n", "an STM file"),
        (
            "u1 1 s 0.5 1 w1 w2\nu2 1 s 0 1 w3\nu3 1 s 1 2 IGNORE_TIME_SEGMENT_IN_SCORING\n"
            "u2 1 s 2 3 <o,f0> ignore_time_segment_in_scoring\n",
            "an STM file",
        ),
        (";; file\nu1 1 0.00 0.3 w1\nu1 1 .3 0.4 w2 0.99\nu2 1 0 1 w3\n", "a CTM file"),
        ("u1\t-12.5\t3\tw1 w2\nu2\t-9\t2\tw3\n", "a list with scores"),
    ],
)
def test_other_files_are_refused_with_a_conversion(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"said is {what}, not lines id words: awk") as raised:
        read(tmp_path, "u1\tw1 w2\n", text)
    command = str(raised.value).partition("words: ")[2]
    assert "  " not in command
    (tmp_path / "new").write_bytes(subprocess.check_output(command, shell=True))
    assert read_references(str(tmp_path / "new")) == {"u1": ["w1", "w2"], "u2": ["w3"]}


def test_unused_references_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read(tmp_path, "u1\tw1 w2\n", "u1 w1 w2\nu2 w3\n")
    assert "1 of 2 references have no hypotheses" in caplog.text
    assert found.errors is not None
    assert found.errors.num_words == 2


@pytest.mark.parametrize("reference", ["u1 w1 (uh) w2", "u1 w1 { w2 / w3 }", "w1 (uh) w2 (u1)"])
def test_optional_words_and_alternatives_of_sctk_are_reported(
    reference: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, "u1\tw1 w2\n", f"{reference}\nu2 w1\n" if reference[0] == "u" else reference)
    assert "1 lines have optional words (uh) or alternatives { w1 / w2 }" in caplog.text


@pytest.mark.parametrize(
    ("hypothesis", "reference", "unit", "errors"),
    [
        ("天地人水火山木日月星", "天地人水火山木日月风", "cer", 1 / 10),
        ("すし たべる", "すしをたべる", "cer", 1 / 6),
        ("天地 人", "天 地 人 水", "cer", 1 / 4),
        ("天地 人水 火山", "天地 人水 火木", "wer", 1 / 3),
        ("天地人水火山木日月星", "天地 人水 火山 木日 月风", "cer", 1 / 10),
        ("天 地 人 水 火 山", "天地 人水 火木", "cer", 1 / 6),
        ("กินข้าวกับแม่", "กิน ข้าว กับ พ่อ", "cer", 3 / 13),
        ("これはAIの木です", "これは AI の本です", "cer", 1 / 9),
        ("我用 Python 写", "我 用 Python 写 代码", "wer", 3 / 5),
        ("옛날 옛적", "옛날 옛날", "wer", 1 / 2),
    ],
)
def test_error_rates_of_references_without_spaces_are_of_characters(
    hypothesis: str, reference: str, unit: str, errors: float, tmp_path: Path
) -> None:
    found = read(tmp_path, f"u\t-1\t{hypothesis}\n", f"u {reference}\n")
    assert found.errors is not None
    report = found.errors.report(found.nbest, found.nbest.first)
    assert report[f"{unit}_before"] == pytest.approx(100 * errors)
    units = reference.replace(" ", "") if unit == "cer" else reference.split()
    assert report["characters" if unit == "cer" else "words"] == len(units)
    assert ("wer_before" in report) == (unit == "wer")


@pytest.mark.parametrize(("penalty", "best"), [(0, 0), (0.75, 0), (1.5, 1), (50, 2)])
@pytest.mark.parametrize("space", ["", " "])
def test_the_insertion_penalty_is_for_characters_of_hypotheses_without_spaces(
    space: str, penalty: float, best: int
) -> None:
    rows = zip([-1, -2, -6], ["天地人水火", "天地人水", "天地"], strict=True)
    nbest = read_nbest("x", lines=[f"u\t{score}\t{space.join(text)}" for score, text in rows])
    scored = ScoredList(nbest, [[np.zeros(len(text.split()) + 1) for text in nbest.texts]])
    totals = scored.totals(Weights(lm_weight=1.0, insertion_penalty=penalty))
    assert totals.tolist() == ([-1, -2, -6] - penalty * np.array([5, 4, 2])).tolist()
    assert scored.choose(totals) == [best]


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ("u1\t100.5\tw1\nu1\t180.2\tw2\n", "has the lowest score of 1 of 1 lists"),
        ("u1\t1\t-7\tw1\nu1\t20\t-8\tw2\nu2\t3\t-1\tw2\n", "lowest score of 1 of 1 lists"),
        ("u1\t-9\t3\tw1\nu1\t-20\t9\tw2\n", "first pass's language model are above 0"),
        ("u1\t-1\tw1\nu1\t-2\tw2\n", ""),
        ("u1\t-2\tw1\nu1\t-1\tw2\nu2\t-1\tw1\nu2\t-2\tw2\n", ""),
        ("u1\tw1\nu1\tw2\n", ""),
    ],
)
def test_scores_that_are_rather_costs_are_reported(
    rows: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, rows)
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)
