"""Exit codes: each kind of failure has its own, and a single line that names what failed."""

import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from data_prep.storage import locked
from lm.cli import main

WRONG_VALUES = """\
--model.hidden=0 --model.hidden=-4 --model.hidden=1.5 --model.hidden=many --model.hidden=1e99
--model.hidden=99999999999999999999 --model.layers=0 --model.layers=20000 --model.dropout=1.5
--model.dropout=nan --model.dropout=-0.1 --model.backbone=gru --model.init_range=0 --model=12
--model.input_pieces=3 --model.count_word_dropout=-1 --output.branching=1 --output.arity=1
--output.cutoffs=[0] --output.num_samples=0 --output.backend=cuda --output.tail_dropout=2
--word_table.dtype=fp8 --word_table.optimizer=lion --word_table.lr=0 --word_table.tied=maybe
--optim.lr=0 --optim.lr=-1 --optim.lr=inf --optim.lr=fast --optim.betas=[0.9]
--optim.betas=[0.9,1.5] --optim.clip=-1 --optim.momentum=2 --optim.schedule=linear
--optim.warmup_steps=-1 --optim.decay=2 --train.max_steps=0 --train.max_minutes=0
--train.batch_size=0 --train.seq_len=0 --train.accumulate=0
--train.precision=int8 --train.precision=16-mixed --train.accelerator=tpu --train.devices=0
--train.strategy=fsdp --train.threads=0 --train.keep_checkpoints=-1 --train.cuda_graph=maybe
--train.skip_nonfinite_steps=-1 --train.checkpoint_every_steps=0 --train.val_every_steps=0
--log.every_steps=0 --log.wandb=yes --seed=-1 --seed=x --data.format=xml --data.sequences=tree
--data.split=random --tokenizer.kind=bytes --tokenizer.vocab_size=0 --tokenizer.min_count=0
--tokenizer.character_coverage=2 --classes.method=magic --classes.num_word_classes=0
--classes.depth=1 --classes.seed=-1 --classes.dimensions=0 --classes.shortlist=-1
"""
"""Each is a usage error, code 2, whose message names the key."""
BAD_INPUTS = """\
2 | train {tiny} --frob | --frob
2 | train {tiny} --model.hiden=12 | model.hidden
2 | train {tiny} more | more
2 | train {tiny} --resume | --resume
2 | train {list} | list.txt
2 | train {folder}/absent.yaml | absent.yaml
2 | train {run} --model.hidden=16 | already contains a run
2 | train {tiny} --output.tree=adaptive --output.cutoffs=[9,3] | output.cutoffs
2 | train {tiny} --model.backbone=transformer --model.heads=5 | model.heads
3 | prepare {tiny} --data.files.train=null | data.files.train
3 | prepare {tiny} --data.dir=/nowhere | /nowhere
3 | prepare {tiny} --data.files.train=absent.txt | absent.txt
3 | prepare {tiny} --data.files.train={binary} | binary.txt
3 | prepare {tiny} --data.files.train={empty} | empty.txt
3 | prepare {tiny} --data.files.train={text} --data.format=json | text.txt
3 | prepare {tiny} --data.files.train={text} --data.format=parquet | text.txt
3 | prepare {tiny} --data.files.train={text} --data.format=csv | text.txt
2 | prepare {tiny} --classes.method=file | classes.file
3 | prepare {tiny} --classes.method=file --classes.file={absent} | absent
3 | prepare {tiny} --classes.method=file --classes.file={binary} | binary.txt
2 | config model.hiden | model.hiden
2 | new {folder}/new.yaml | --text
3 | new {folder}/new.yaml --text={absent} | absent
3 | new {folder}/new.yaml --text={binary} | binary.txt
2 | sing {run} | sing
4 | evaluate {absent} | absent
4 | evaluate {text} | text.txt
4 | evaluate {folder} | model.json
2 | evaluate {run} --split=dev | --split
3 | evaluate {run} --text={absent} | absent
3 | evaluate {run} --text={binary} | binary.txt
3 | evaluate {run} --text={empty} | empty.txt
2 | evaluate {run} --k=3 | --ranking
2 | evaluate {run} --mixture=0.5 | --arpa
3 | evaluate {run} --arpa={absent} | absent
3 | evaluate {run} --arpa={text} | text.txt
4 | evaluate {run} --compare={absent} | absent
2 | evaluate {run} --threads=0 | --threads
2 | evaluate {run} --device=tpu | tpu
3 | score {run} {absent} | absent
3 | score {run} {binary} | binary.txt
3 | score {run} {empty} | empty.txt
3 | score {run} {empty} --stream | empty.txt
2 | score {run} {text} --level=letter | --level
2 | score {run} {text} --unit=bytes | --unit
2 | generate {run} --tokens=0 | --tokens
2 | generate {run} --temperature=-1 | temperature
2 | generate {run} --top-k=0 | --top-k
2 | generate {run} --top-p=2 | top_p
2 | generate {run} --beams=2 --top-k=3 | --beams
2 | generate {run} --allow-unk --spell-unk | --spell-unk
3 | generate {run} --prompts={absent} | absent
3 | generate {run} --prompts={empty} | empty.txt
3 | rescore {run} {absent} --lm-weight=1 | absent
3 | rescore {run} {text} --lm-weight=1 | text.txt
3 | rescore {run} {binary} --lm-weight=1 | binary.txt
2 | rescore {run} {nbest} --lm-weight=x | --lm-weight
2 | rescore {run} {nbest} --mixture=0.5 | --lm-weight
2 | rescore {run} {nbest} --lm-weight=1 --beam=3 | --beam
2 | rescore {run} {nbest} --tune={nbest} --lm-weight=1 | --tune
3 | rescore {run} {nbest} --lm-weight=1 --references={absent} | absent
4 | rescore {run} {nbest} --lm-weight=1 --with={absent} | absent
2 | classes {run} --words=0 | --words
"""
"""The exit code, a command, and what its message names."""
FILES = {
    "binary": b"\xff\xfe\0",
    "empty": b"",
    "text": b"the cat\n",
    "list": b"- 1\n",
    "nbest": b"u1\t-1\tthe cat\n",
}


@pytest.fixture
def run(lstm_run: Path, tmp_path: Path) -> Path:
    return copytree(lstm_run, tmp_path / "run")


@pytest.fixture
def code_of(tiny: Path, prepared_dir: Path, run: Path) -> Callable[..., int]:
    """`code_of(*options)`: the exit code of continuing the run with options of the command."""
    options = [f"--run_dir={run}", f"--data.prepared_dir={prepared_dir}", "--no-progress"]
    length = ["--train.max_steps=26", "--resume=auto"]
    return lambda *more: main(["train", str(tiny), *options, *length, *more])


def fail(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def test_bad_inputs_end_with_one_line_that_names_them(
    tiny: Path, lstm_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"tiny": tiny, "run": lstm_run, "folder": tmp_path, "absent": tmp_path / "absent"}
    for name, content in FILES.items():
        places[name] = tmp_path / f"{name}.txt"
        places[name].write_bytes(content)
    rows = [(2, f"train {{tiny}} {o}", o[2:].split("=")[0]) for o in WRONG_VALUES.split()]
    for line in BAD_INPUTS.splitlines():
        code, command, named = line.split(" | ")
        rows.append((int(code), command, named))
    problems = []
    for expected, command, named in rows:
        arguments = shlex.split(command.format(**places))
        if "{tiny}" in command:
            arguments.append(f"--run_dir={tmp_path / 'new'}")
        found = main(arguments)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lm: ")]
        if found != expected or len(lines) != 1 or named not in lines[0]:
            problems.append(f"{command}: {found}, {lines}")
    print(f"{len(set(rows))} bad inputs")
    assert not problems, "\n".join(problems)
    assert len(set(rows)) > 100


@pytest.mark.parametrize(
    ("code", "options", "named"),
    [
        (2, ["--model.hidden=16"], "model.hidden: 12 → 16"),
        (4, ["--resume=no.ckpt"], "no.ckpt"),
        (5, ["--optim.lr=0.01"], "step 25"),
        (7, ["--train.batch_size=4"], "out of memory"),
    ],
)
def test_settings(
    code: int,
    options: list[str],
    named: str,
    code_of: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code == 5:
        norm = torch.tensor(float("nan"))
        monkeypatch.setattr("lm.training.loop.clip_gradients", lambda *_: norm)
    if code == 7:
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")
        monkeypatch.setattr("lm.training.loop.update", fail(error))
    assert code_of(*options) == code
    err = capsys.readouterr().err
    assert named in err.splitlines()[-1]
    assert err.count("lm: ") == 1


@pytest.mark.parametrize(
    ("code", "what"), [(3, "tokenizer.json"), (3, "metrics.csv"), (4, "checkpoints/*.ckpt")]
)
def test_files(code: int, what: str, run: Path, code_of: Callable[..., int]) -> None:
    for path in run.glob(what):
        path.write_bytes(b"step\n1\n")
    assert code_of() == code


def test_models(run: Path) -> None:
    (run / "model.safetensors").write_bytes(b"")
    assert main(["evaluate", str(run)]) == 4
    (run / "model.json").write_bytes(b"")
    assert main(["evaluate", str(run)]) == 4
    (run / "model.json").unlink()
    assert main(["evaluate", str(run)]) == 4


def test_full_disks(code_of: Callable[..., int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert code_of() == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_too_little_memory(code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.run.Run.available_bytes", 1000)
    assert code_of() == 7


def test_busy_folders(run: Path, code_of: Callable[..., int]) -> None:
    with locked(run / ".lock"):
        assert code_of() == 8


def test_mistakes_of_the_program_have_a_traceback(
    code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.training.loop.update", fail(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        code_of()
