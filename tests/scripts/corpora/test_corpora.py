"""Corpora have the stated words, splits, events and distribution."""

import tarfile
from errno import EACCES
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from scripts.corpora.repository import code_text, split_of
from scripts.corpora.synthetic import WordModel, Zipf
from tests.scripts.conftest import Run

FILES = {
    "README.md": b"not code",
    "b/z.PY": b"\xef\xbb\xbf\n\nx = 1  # \xc3\xa9t\xc3\xa9\r\n\t\r\n  \ny\r\n\r\n",
    "b/copy.c": b"int main(void);\n",
    "a.c": b"int main(void);\n",
    "latin.c": b"\xe9",
    "object.c": b"a\0b",
    "empty.c": b" \n\n",
}
Ranks = NDArray[np.int64]


@pytest.fixture
def make(run_benchmark: Run) -> Run:
    """`make(*arguments)` runs the command."""
    return partial(run_benchmark, "scripts.corpora.repository")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with `FILES`, and files of one line that are in every split."""
    for name, content in FILES.items() | {(f"n/{i:02}.rs", b"%d" % i) for i in range(40)}:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "tree/link.c").symlink_to("n/00.rs")
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a_1=b2->c;", "a_1 = b2 -> c ;"),
        ("x<<=0x1Ful|1.5e3f", "x <<= 0x1Ful | 1.5e3f"),
        ("for(i=0;i<10;++i)*p++", "for ( i = 0 ; i < 10 ; ++ i ) * p ++"),
        ("1..10 a.b 1.", "1 .. 10 a . b 1 ."),
        ("std::map<a,b<c>>&&r // it's", "std :: map < a , b < c >> && r // it ' s"),
        ('\t"<eos> 日本" \x1f\f', '" < eos > 日本 "'),
        ("a===b!==c...**d/**/", "a === b !== c ... ** d /* */"),
    ],
)
def test_words_are_names_numbers_and_the_longest_operators(line: str, words: str) -> None:
    assert code_text(line.encode()).decode() == f"{words}\n"


def test_a_folder_or_archive_gives_each_file_once(tree: Path, tmp_path: Path, make: Run) -> None:
    expected = dict.fromkeys(("train", "valid", "test"), "")
    text = {"a.c": "int main ( void ) ;\n", "b/z.PY": "x = 1 # été\ny\n"}
    text |= {f"n/{i:02}.rs": f"{i}\n" for i in range(40)}
    for name in sorted(text):
        expected[split_of(name.encode(), 0.2)] += text[name]
    assert all(expected.values())
    with tarfile.open(tmp_path / "tree.tar.xz", "w:xz") as archive:
        for path in sorted(tree.rglob("*")):
            archive.add(path, str(path.relative_to(tree)), recursive=False)
    for source in ("tree", "tree.tar.xz"):
        out = tmp_path / f"{source}-text"
        sources = [tmp_path / source, tmp_path / source]  # the second has no new content
        done = make(*sources, "--out", out, "--held-out=0.2", "--no-progress")
        assert done.stderr == ""
        assert {split: (out / f"{split}.txt").read_text() for split in expected} == expected
        assert f"test: {expected['test'].count(chr(10))} files," in done.stdout


def test_shares_of_paths_are_those_asked_for() -> None:
    splits = [split_of(b"src/%d.c" % i, 0.1) for i in range(20_000)]
    assert splits.count("test") / 20_000 == pytest.approx(0.1, abs=0.01)
    assert splits.count("valid") / 20_000 == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent"], "absent: No such file or directory"),
        (["tree/a.c"], "tree/a.c: expected a folder or a tar archive that is complete: "),
        (["tar1200"], "tar1200: expected a folder or a tar archive that is complete: unexpected"),
        (["tar1600"], "tar1600: expected a folder or a tar archive that is complete: truncated h"),
        (["tar1536"], "tar1536: expected a folder or a tar archive that is complete: empty head"),
        (["shut"], "shut: Permission denied"),
        (["tree", "--suffixes=f77"], "train.txt has none of 0 files of source code: see --suff"),
        (["tree", "--held-out=1e-6"], "valid.txt has none of 42 files of source code: give a lar"),
        (["tree", "--held-out=0.5"], "--held-out: expected at least 1e-06, below 0.5, got 0.5"),
    ],
)
def test_mistakes_are_named(
    tree: Path, make: Run, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tree.parent / "tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tree / "n", "n")  # members of 512 and 1024 bytes
    for size in (1200, 1536, 1600):
        (tree.parent / f"tar{size}").write_bytes((tree.parent / "tar").read_bytes()[:size])
    (tree.parent / "shut").mkdir()
    if arguments == ["shut"]:
        refused = PermissionError(EACCES, "Permission denied", tree.parent / "shut")
        monkeypatch.setattr("os.scandir", Mock(side_effect=refused))
    done = make(tree.parent / arguments[0], *arguments[1:], "--out", tree.parent / "out")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1].replace(f"{tree.parent}/", "")
    assert message.startswith(f"make_corpus: {expected}")
    assert not (tree.parent / "out").exists()


@pytest.mark.parametrize("num_types", [1, 2, 4096, 4097, 10_000_000])
def test_the_quantile_function_inverts_the_cumulative_weights(num_types: int) -> None:
    zipf = Zipf(num_types)
    cumulative = np.cumsum(1 / np.arange(1, num_types + 1))
    assert zipf.total == pytest.approx(cumulative[-1], rel=1e-9)
    share = np.r_[np.linspace(0, 1, 20_000, endpoint=False), np.nextafter(1, 0)]
    rank = zipf.quantile(share)
    exact = np.searchsorted(cumulative, share * cumulative[-1], side="right") + 1
    assert (rank == exact).mean() > 0.999
    assert (rank[0], rank[-1]) == (1, num_types)
    assert (np.diff(rank) >= 0).all()


def ranks_of(markov: float) -> Ranks:
    """Ranks of 400,000 words in lines of 20."""
    model = WordModel(zipf=Zipf(2_000), markov=markov, seed=3)
    return np.concatenate(list(model.blocks(0, 400_000)))


def test_independent_words_follow_zipf() -> None:
    ranks = ranks_of(markov=0.0).reshape(-1)
    expected = 1 / np.arange(1, 2_001)
    expected *= len(ranks) / expected.sum()
    observed = np.bincount(ranks, minlength=2_001)
    assert (observed[0], observed.sum()) == (0, len(ranks))
    assert abs(((observed[1:] - expected) ** 2 / expected).sum() - 1_999) < 5 * (2 * 1_999) ** 0.5


def test_half_of_the_words_are_successors_of_the_previous_word() -> None:
    lines, independent = ranks_of(markov=0.5), ranks_of(markov=0.0)
    following = lines[:, 1:][lines[:, :-1] == 1]
    successors = np.argsort(-np.bincount(following))[:4]
    expected = 0.5 + 0.5 * np.isin(independent, successors).mean()
    assert np.isin(following, successors).mean() == pytest.approx(expected, abs=0.01)
