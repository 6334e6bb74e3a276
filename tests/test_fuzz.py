"""Readers of damaged files: a result, or one line that names the file; never another error or hang.

Valid files are mutated at random. More by hand: `FUZZ=100 pytest tests/test_fuzz.py`.
"""

import json
import os
import random
import re
import signal
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from data_prep.classes.class_file import read_class_levels, read_vectors
from data_prep.corpus.hints import find_text
from data_prep.corpus.lines import read_text
from data_prep.errors import UserError
from data_prep.meta import read_meta
from data_prep.prepared import Prepared, open_prepared
from data_prep.storage import map_array, sha256_file
from data_prep.tokenizer.serialization import load_tokenizer
from data_prep.tokenizer.speller import Speller
from lm.config import load_config
from lm.model.files import _sha256, load_model
from lm.output import ClassTree
from lm.rescoring.lattice import read_lattices
from lm.rescoring.nbest import read_costs, read_nbest
from lm.scoring.arpa import read_arpa
from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics
from tests.data_prep.conftest import write_table

FACTOR = float(os.environ.get("FUZZ", "1"))
"""Times as many executions as in the test suite."""
HANGS_AFTER = 20.0
"""Processor seconds of a reader of a tiny file."""
PIECES = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"\t", b" ", b"\\", b'"', b"'", b"#", b"&"),
    *(b"-", b"-1", b"0", b"1e999", b"nan", b"inf", b"99999999999999999999", b"0x10", b"1_0"),
    *(b"{", b"}", b"[", b"]", b"null", b"true", b":", b",", b"=", b"/", b"..", b"<unk>"),
    b"\\end\\",
    *("\u2028".encode(), "é".encode(), "٣".encode(), "²".encode()),
)
WORDS = ["<eos>", "<unk>", "the", "cat", "dog"]
FILES = {
    "mkcls": "the\t1\ncat\t2\ndog\t2\n",
    "brown": "0110\tthe\t9\n10\tcat\t3\n111\tdog\t2\n",
    "srilm": "A 0.5 the\nB 1 cat\nB 0.25 dog\n",
    "taxonomy": "the\tarticle\ncat\tanimal/pet\ndog\tanimal/pet/big\n",
    "tree": "<eos> 0\n<unk> 1\nthe 2 0\ncat 2 1 0\ndog 2 1 1\n",
    "nbest": "u1\t-120.5\t-9.25\tthe cat\nu1\t-121\t-8\tthe dog\nu2\t-3\t-1\tdog\n",
    "kaldi nbest": "u1-1 the cat\nu1-2 the dog\nu2-1 dog\n",
    "costs": "u1-1 120.5\nu1-2 121\nu2-1 3\n",
    "vectors": "3 2\nthe 1.5 -2\ncat 0 1e9\ndog .5 2\n",
    "csv": 'n,text\n1,the cat\n2,"a dog,\na cow"\n3,\n',
    "json": '{"n": 1, "text": "the cat"}\n{"n": 2, "text": "a dog"}\n{"n": 3, "text": null}\n',
    "slf": "VERSION=1.0\nUTTERANCE=u1\nlmscale=9.5 wdpenalty=0\nN=4 L=4\nI=0 t=0.0 W=!NULL\n"
    "I=1 t=0.3 W=the\nI=2 t=0.5 W=cat\nI=3 t=0.9 W=!NULL\nJ=0 S=0 E=1 a=-10.5 l=-1.5\n"
    "J=1 S=1 E=2 a=-9 l=-2\nJ=2 S=2 E=3 a=0 l=-1\nJ=3 S=1 E=3 a=-12 l=0\n",
    "kaldi lattice": "u1\n0 1 the 1.5,10.5,1_2\n1 2 cat 2,9,3\n1 2 dog 2.5,9,\n2 0,0,\n\n"
    "u2\n0 1 dog 1,2,\n1 0,0,\n\n",
    "arpa": "\\data\\\nngram 1=5\nngram 2=3\n\n\\1-grams:\n-0.7 <unk>\n-99 <s> -0.3\n-0.7 </s>\n"
    "-0.5 the -0.2\n-0.6 cat\n\n\\2-grams:\n-0.4 <s> the\n-0.3 the cat\n-0.2 cat </s>\n\n\\end\\\n",
    "metrics": "step,epoch,tokens,learning_rate,train_perplexity,valid_perplexity,seconds,"
    "tokens_per_second\n5,0.1,80,0.01,12.5,,1.5,53\n10,0.2,160,0.01,11.5,10.5,3.0,53\n",
}


@dataclass(frozen=True)
class Reader:
    """A valid file, what reads it at its place, and how often the suite does so."""

    path: Path
    read: Callable[[Path], object]
    num_executions: int
    content: bytes


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four random changes."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        first = rng.randrange(len(found) + 1)
        last = min(len(found), first + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(8):
            case 0 if first < len(found):
                found[first] ^= 1 << rng.randrange(8)
            case 1:
                del found[first:last]
            case 2:
                found[first:first] = found[first:last] * rng.choice((1, 1, 2, 30))
            case 3:
                del found[first:]
            case 4:  # a whole field
                fields = list(re.finditer(rb"[^\s,:=]+", found))
                if fields:
                    field = rng.choice(fields)
                    found[field.start() : field.end()] = rng.choice(PIECES)
            case 5:  # lines in another order
                lines = found.splitlines(keepends=True)
                rng.shuffle(lines)
                found = bytearray(b"".join(lines))
            case _:
                found[first : rng.choice((first, last))] = rng.choice(PIECES)
    return bytes(found)


def table(path: Path, field: str | None = None) -> object:
    return list(find_text(path, field).lines())


def text_readers(folder: Path) -> Iterator[tuple[str, Reader]]:
    def tree(path: Path) -> object:
        with suppress(ValueError):  # which names the file where the command reads it
            return ClassTree.from_file(path, WORDS)
        return None

    def lattices(path: Path) -> object:
        return read_lattices(str(path), list(read_text(str(path))))

    def kaldi(path: Path) -> object:
        costs = {"u1-1": 1.0, "u1-2": 2.0, "u2-1": 1.5}
        return read_nbest(str(path), [costs, costs])

    readers: Any = {"tree": tree, "json": table, "csv": partial(table, field="text")}
    readers |= {"slf": lattices, "kaldi lattice": lattices, "kaldi nbest": kaldi}
    readers |= {"nbest": lambda path: read_nbest(str(path)), "metrics": read_metrics}
    readers |= {"costs": lambda path: read_costs(str(path))}
    readers |= {"vectors": partial(read_vectors, words=WORDS), "arpa": lambda p: read_arpa(p, {})}
    for name in ("mkcls", "brown", "srilm", "taxonomy"):
        format: Any = name
        readers[name] = partial(read_class_levels, file_format=format, words=WORDS, depth=3)
    for name, read in readers.items():
        path = folder / f"{name.replace(' ', '-')}.txt"
        yield name, Reader(path, read, 200 if name == "arpa" else 500, FILES[name].encode())


def run_readers(run: Path, data: Path, folder: Path) -> Iterator[tuple[str, Reader]]:
    """Readers of a table, the files of a run and its prepared data, in copies of their folders."""

    def described(path: Path) -> object:
        description = json.loads((run / "model.json").read_text())
        description |= {"weights_sha256": sha256_file(path)}
        description["sha256"] = _sha256(description)
        path.with_name("model.json").write_text(json.dumps(description))
        return load_model(path.parent)

    def vocabulary(path: Path) -> object:
        return load_tokenizer(path.parent, verify=False).encode("the cat sees")

    def speller(path: Path) -> object:
        sha256 = json.loads((data / "meta.json").read_text())["tokenizer"]["sha256"]
        return Speller.load(path, sha256)

    (tables := folder / "tables").mkdir()
    write_table(tables / "a.parquet", [{"n": 1, "text": word} for word in WORDS])
    meta = open_prepared(data).meta
    array = meta.splits["train"].array

    def prepared(read: Callable[[Prepared], object]) -> Callable[[Path], object]:
        return lambda path: read(open_prepared(path.parent))

    for name, file, read, count in (
        ("parquet", tables / "a.parquet", table, 300),
        ("tokens", data / "train.npy", partial(map_array, info=array, below=5), 300),
        ("verified tokens", data / "valid.npy", prepared(lambda d: d.tokens("valid")), 100),
        ("meta.json", data / "meta.json", lambda path: read_meta(path.parent), 300),
        ("classes.npy", data / "classes.npy", prepared(Prepared.class_levels), 100),
        ("tokenizer.json", data / "tokenizer.json", vocabulary, 300),
        ("vocab.txt", data / "vocab.txt", vocabulary, 300),
        ("speller.npz", data / "speller.npz", speller, 100),
        ("config.yaml", run / "config.yaml", load_config, 60),
        ("model.json", run / "model.json", lambda path: load_model(path.parent), 100),
        ("model.safetensors", run / "model.safetensors", described, 100),
        ("checkpoint", run / "checkpoints" / "last.ckpt", load_checkpoint, 100),
    ):
        target = copytree(file.parent, folder / name.replace(" ", "-"))
        yield name, Reader(target / file.name, read, count, file.read_bytes())
    yield "pickle", pickle_reader(run / "checkpoints" / "last.ckpt", folder / "pickle")


def pickle_reader(checkpoint: Path, path: Path) -> Reader:
    """Reader of the pickle of a checkpoint, which has checksums that fit."""
    with zipfile.ZipFile(checkpoint) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))

    def read(path: Path) -> object:
        archived = path.with_suffix(".ckpt")
        with zipfile.ZipFile(archived, "w") as archive:
            for name, entry in (entries | {pickled: path.read_bytes()}).items():
                archive.writestr(name, entry)
        return load_checkpoint(archived)

    return Reader(path, read, 100, entries[pickled])


class Hang(Exception):
    """A reader takes too long."""


def hang(*_: object) -> None:
    raise Hang


def problem(reader: Reader, content: bytes) -> str:
    """How a reader fails on a file; empty if it reads or refuses it as it should."""
    reader.path.write_bytes(content)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_AFTER)
    try:
        reader.read(reader.path)
    except UserError as error:
        return "" if str(reader.path.parent) in str(error) else f"no file: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ""


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_reader_of_a_damaged_file_has_a_result_or_a_message_that_names_the_file(
    lstm_run: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    readers = dict([*text_readers(tmp_path), *run_readers(lstm_run, prepared_dir, tmp_path)])
    num_executions, problems = 0, dict[str, bytes]()
    before = signal.signal(signal.SIGVTALRM, hang)
    try:
        for name, reader in readers.items():
            assert problem(reader, reader.content) == ""
            rng = random.Random(name)
            for _ in range(round(FACTOR * reader.num_executions)):
                content = mutated(reader.content, rng)
                if found := problem(reader, content):
                    problems[re.sub(r"\d+|'.*'", "", f"{name}: {found}")] = content
                num_executions += 1
    finally:
        signal.signal(signal.SIGVTALRM, before)
    print(f"{num_executions} executions")
    assert not problems, "\n".join(f"{key}\n    {value!r}" for key, value in problems.items())
