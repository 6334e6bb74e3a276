"""Exit codes: each kind of failure has its own, and a single line that names what failed."""

import gzip
import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
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
--train.strategy=fsdp --train.threads=0 --train.threads=100000
--train.keep_checkpoints=-1 --train.cuda_graph=maybe
--train.skip_nonfinite_steps=-1 --train.checkpoint_every_steps=0 --train.val_every_steps=0
--log.every_steps=0 --log.wandb=yes --seed=-1 --seed=x --data.format=xml --data.sequences=tree
--data.split=random --tokenizer.kind=bytes --tokenizer.vocab_size=0 --tokenizer.min_count=0
--tokenizer.character_coverage=2 --classes.method=magic --classes.num_word_classes=0
--classes.depth=1 --classes.seed=-1 --classes.dimensions=0 --classes.shortlist=-1
"""
"""Each is a usage error, code 2, whose message names the key."""
BAD_INPUTS = """\
2 |  | the following arguments are required: COMMAND
2 | fly | unknown command fly: the commands are new, prepare, train, evaluate,
2 | sing {run} | unknown command sing
2 | new {folder}/new.yaml | --text
3 | new {folder}/new.yaml --text={absent} | absent
3 | new {folder}/new.yaml --text={binary} | binary.txt
2 | config model.hiden | unknown key model.hiden; did you mean model.hidden?
2 | train {tiny} --frob | --frob
2 | train {tiny} --model.hiden=3 | tiny.yaml: unknown key model.hiden; did you mean model.hidden?
2 | train {tiny} more | expected an override --section.key=value, got 'more'
2 | train {tiny} --model.layers=3 -- | expected an override --section.key=value, got '--'
2 | train {tiny} --train.max_steps 300 | --train.max_steps: write --train.max_steps=300
2 | train {tiny} --train.max_steps | --train.max_steps: write --train.max_steps=VALUE
2 | train {tiny} --device cpu | --device: write --train.accelerator=cpu
2 | train {tiny} --threads=2 | --threads=2: write --train.threads=2
2 | train r --no-progres | unknown option --no-progres; did you mean --no-progress?
2 | train {tiny} --resume | argument --resume: expected one argument
4 | train {tiny} {data} --resume=absent.ckpt | --resume absent.ckpt: no such checkpoint
2 | train {tiny} --optim.table_lr=1 | unknown key optim.table_lr; it is now word_table.lr
2 | classes {run} --plot p.png | unknown option --plot; it is no longer available
2 | train {list} | list.txt
2 | train {absent} | absent.txt: cannot read the configuration: No such file or directory
2 | train {run} --model.hidden=16 | already contains a run
2 | train {tiny} --run_dir={run} | contains a run: continue it with --resume auto, or choose another
2 | train {tiny} {data} --train.batch_size=9999 | train.seq_len = 8 require at least 9999
2 | train {tiny} {data} --output.tree=oak | output.tree: oak is neither a tree (full, two_
2 | train {tiny} {data} --output.tree={tree} | tree.txt:1: 'thé' is not in the vocabulary
2 | train {tiny} {data} --output.tree={utf16} | utf16.txt is in UTF-16: convert it, iconv -f UTF-16
2 | train {tiny} {data} --output.tree={latin1} | latin1.txt: invalid UTF-8: if it is Latin-1 or Win
2 | train {tiny} {data} --output.tree={gzip} | gzip.txt is compressed,
2 | train {tiny} {data} --output.tree=adaptive --output.cutoffs=[5,5] | must increase within 1 …
3 | prepare {tiny} --data.files.train=null | data.files.train
3 | prepare {tiny} --data.files.train={binary} | binary.txt
3 | prepare {tiny} --data.files.train={text} --data.format=json | text.txt
3 | prepare {tiny} --classes.method=file --classes.file={absent} | absent
3 | classes {tiny} | data is not a prepared folder: it has no meta.json
2 | classes {folder} | no run here (config.yaml is missing): lm train CONFIG begins
4 | extend {tiny} | tiny.yaml is a file, not the folder of a run
2 | extend {pieces} --run_dir=x --text={text} | lm extend requires tokenizer.kind: words
2 | extend {run} --run_dir=x --text={text} --min-count=2 | text.txt (--min-count 2)
2 | extend {run} --run_dir=x --text={text} --min-count=0 | --min-count: must be at least 1
2 | extend {run} --run_dir=x --text={text} --tokenizer.min_count=2 | tokenizer.min_count: 1 → 2
2 | extend {run} --text={text} | lm extend writes another run: name its folder, --run_dir=FOLDER
2 | extend {run} --run_dir={folder} --text={text} | empty already exists
3 | extend {run} --run_dir=x --text={absent} | absent
3 | extend {run} --run_dir=x --text={binary} | binary.txt
2 | train {run} --resume=auto --data.keep_empty_lines=false | in another folder, with --init-from
2 | train {tiny} --init-from | argument --init-from: expected one argument
4 | train {tiny} {data} --init-from={absent} | no trained model here
4 | train {tiny} {data} --init-from={tiny} | tiny.yaml is a file, not the folder of a run
2 | train {tiny} --init-from={run} --model.hidden=16 | has another model (model.hidden: 12 → 16)
2 | train {tiny} --init-from={run} --model.layers=1 | has another model (model.layers: 2 → 1)
2 | train {tiny} --init-from={run} --output.tree=full | (output.tree: two_level → full)
2 | train {tiny} --init-from={run} --word_table.tied=true | (word_table.tied: False → True)
2 | train {tiny} --init-from={run} --classes.shortlist=2 | (classes.shortlist: 0 → 2)
2 | train {tiny} --init-from={run} --tokenizer.lowercase=true | (tokenizer.lowercase: False → True
2 | train {tiny} --init-from={run} --model.backbone=transformer | model.backbone: lstm → transformer
2 | train {tiny} --init-from={run} --train.precision=64-true | train.precision: 32-true → 64-true
2 | train {tiny} --init-from={run} --data.sequences=independent | data.sequences: stream → indep
2 | train {tiny} --init-from={pieces} | tokenizer.kind: sentencepiece → words
3 | train {tiny} {data} --init-from={run} | has data already, and --init-from prepares others
2 | evaluate | the following arguments are required: RUN
4 | evaluate {absent} | no trained model here (model.json is missing); there is no such folder
4 | evaluate {folder} | no trained model here (model.json is missing); `lm train CONFIG` trains one
2 | evaluate {run} --split=dev | argument --split: invalid choice: 'dev'
2 | evaluate r --splitt=test | unknown option --splitt=test; did you mean --split?
2 | evaluate r --split=test --text=t | argument --text: not allowed with
3 | evaluate {run} --text={absent} | absent
3 | evaluate {run} --text={binary} | binary.txt
3 | evaluate {run} --text={empty} | empty.txt
2 | evaluate {run} --k=3 | --k, --exclude, --users and --ranks require --ranking
2 | evaluate {run} --ranking --ranks=r.csv | --ranks r.csv: expected FILE.parquet in a folder
4 | evaluate {run} --checkpoint=absent.ckpt | absent.ckpt: cannot read the checkpoint: No such
4 | score {run} {text} --checkpoint={text} | text.txt is damaged, or not a checkpoint of sqrtlm
2 | evaluate {run} --ranking | --ranking requires data.sequences: independent
2 | evaluate {run} --ranking --by-frequency | --ranking excludes --text, --arpa, --compare
2 | evaluate {run} --mixture=0.5 | --mixture requires --arpa
2 | evaluate {run} --mixture=1.5 --arpa={absent} | --mixture must be within 0 … 1
2 | evaluate {run} --arpa=x --open-vocabulary | --arpa excludes --open-vocabulary
3 | evaluate {run} --arpa={text} | text.txt
2 | evaluate {run} --compare={run} --arpa=x | --compare excludes --arpa
2 | evaluate {run} --threads=9999 | argument --threads: must be at most 1024, got 9999
3 | score {run} {empty} | empty.txt
3 | score {run} 'no  such.txt' | no  such.txt cannot be read
3 | score {run} {empty} --stream | empty.txt
2 | score {run} --ids {text} more | unknown argument more
2 | new {folder}/new.yaml --text={text} --train.max_steps=9 | --train.max_steps=9: keys are set in
3 | score {run} --ids {ids} --level=summary | ids.txt, line 2: expected an id, a tab or space, and
2 | score {run} {text} --details --format=kenlm | --details requires
2 | score {run} {text} --details --level=sentence | --details requires
2 | score {run} {text} --stream --stream-by-id | --stream and --stream-by-id exclude each other
2 | score {run} {text} --level=token | --level token requires --format tsv or json
2 | score {run} {text} --open-vocabulary --vocabulary-size=99 | not allowed with argument
2 | score {run} {text} --vocabulary-size=3 | vocabulary size 3: expected at least 2
2 | score {run} {text} --vocabulary-size=2305843009213693952 | and at most 1152921504606846976
2 | score {pieces} {text} --vocabulary-size=99 | a vocabulary size applies to models of words, not
2 | recommend {run} | lm recommend requires --history or --events
2 | recommend {run} --history=- | recommending requires data.sequences: independent
2 | generate {run} --model.hidden=3 | unknown option --model.hidden=3
2 | generate {run} --tokens=0 | argument --tokens: must be at least 1, got 0
2 | generate {run} --tokens=1.5 | argument --tokens: must be an integer, got '1.5'
2 | generate {run} --top-p=2 | generate: top_p must be
2 | generate {run} --stop= | a stop string must not be empty
2 | generate {run} --samples=1000000000 | the texts need 6,400 GB of memory
2 | generate {run} --beams=1000000000 | the beams need
2 | generate {run} --beams=2 --top-k=3 | --top-k cannot be combined with --beams
2 | generate {run} --beams=2 --spell-unk | --spell-unk cannot be combined with --beams
2 | generate {run} --beams=2 --samples=3 | --samples 3 requires as many --beams
2 | generate {run} --length-penalty=1 | --length-penalty requires --beams
2 | generate {run} --allow-unk --spell-unk | --allow-unk and --spell-unk exclude each other
2 | generate {run} --prompt=a --prompts=b | not allowed with argument --prompt
3 | generate {run} --prompts={empty} | empty.txt: no prompts
3 | generate {run} --prompts={empty} --line-buffered | empty.txt: no prompts
2 | generate {run} --prompt=- --line-buffered | --line-buffered requires --prompts
3 | rescore {run} {text} --lm-weight=1 | text.txt
2 | rescore {run} {nbest} | give --tune LIST REFERENCES, or --lm-weight
2 | rescore {run} {nbest} --lm-weight=-1 | --lm-weight must be at least 0, and
2 | rescore {run} {nbest} --lm-weight=1e308 | a weighted sum of scores overflows: choose smaller
2 | rescore {run} {nbest} --lm-weight=1 --first-pass-share=2 | must be within 0 … 1
2 | rescore {run} {nbest} --lm-weight=1 --first-pass-share=0.5 | has no scores of the first pass
2 | rescore {run} {nbest} --lm-weight=1 --mixture=0.5 | --mixture requires a second model
4 | rescore {folder} {nbest} --lm-weight=1 | no trained model here
2 | rescore {run} {nbest} --lm-weight=1 --beam=3 | --beam applies to lattices
3 | rescore {run} {nbest} --lm-weight=1 '--non-words=(' | --non-words '(': no regular expression
3 | rescore {run} {nbest} --lm-weight=1 --references={twice} | line 3: u1 has a reference already
2 | rescore {run} {nbest} --lm-weight=1 --references={wordless} | the references have no words
2 | rescore {run} {nbest} --lm-weight=1 --references={other_said} | no reference for utterance u1 of
3 | rescore {run} {nbest} --lm-weight=1 --acoustic-costs={costs} | this one has tabs
2 | rescore {run} {nbest} --lm-weight=1 --lm-costs={costs} | requires --acoustic-costs
2 | rescore {run} {nbest} --tune {nbest} {said} --lm-weight=1 | --tune finds the weights
2 | rescore {run} {nbest} --tune {nbest} - --references=- | stdin (-) can be only one of the files
2 | rescore {run} {nbest} --tune {nbest} {said} | u1 is in {nbest} and in {nbest}: weights
2 | rescore {run} {nbest} --tune {other} {other_said} | other.txt has 0 scores per hypothesis and
"""
"""The exit code, a command, and what its message has."""
TREE = "thé 0 0\ncat 0 1\n"
FILES = {
    "binary": b"\xff\xfe\0",
    "empty": b"",
    "text": b"the cat\n",
    "list": b"- 1\n",
    "tree": TREE.encode(),
    "utf16": TREE.encode("utf-16"),
    "latin1": TREE.encode("latin-1"),
    "gzip": gzip.compress(TREE.encode()),
    "ids": b"a\tthe cat\n\tthe dog\n",
    "nbest": b"u1\t-1\tthe cat\n",
    "said": b"u1 the cat\n",
    "twice": b"u1 the\n\nu1 cat\n",
    "other": b"u2\tthe\n",
    "other_said": b"u2 the\n",
    "costs": b"u1 1\n",
    "wordless": b"u1\n",
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


NAN = torch.tensor(float("nan"))
NO_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")


def test_bad_inputs_end_with_one_line_that_names_them_and_change_nothing(
    tiny: Path,
    lstm_run: Path,
    pieces_run: Path,
    prepared_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    contents: Callable[[Path], dict[str, str]],
) -> None:
    places = {"tiny": tiny, "run": lstm_run, "pieces": pieces_run, "folder": tmp_path / "empty"}
    places |= {"absent": tmp_path / "absent.txt"}
    places["folder"].mkdir()
    for name, content in FILES.items():
        places[name] = tmp_path / f"{name}.txt"
        places[name].write_bytes(content)
    data = f"--data.prepared_dir={prepared_dir}"
    rows = [(2, f"train {{tiny}} {o}", o[2:].split("=")[0]) for o in WRONG_VALUES.split()]
    for line in BAD_INPUTS.splitlines():
        code, command, named = line.split(" | ")
        rows.append((int(code), command, named))
    folder, problems = tmp_path / "new", list[str]()
    before = [contents(each) for each in (tmp_path, lstm_run)]
    for expected, command, named in rows:
        arguments = shlex.split(command.format(data=data, **places))
        if "{tiny}" in command and "--run_dir" not in command:
            arguments.insert(2, f"--run_dir={folder}")
        found = main(arguments)
        if arguments[:1] == ["prepare"]:  # part of which may be done
            rmtree(folder, ignore_errors=True)
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("lm: ")]
        message = named.format(**places) if "{nbest}" in named else named
        if out or found != expected or len(lines) != 1 or message not in lines[0]:
            problems.append(f"{command}: {found}, {lines}, {out}")
    print(f"{len(set(rows))} bad inputs")
    assert not problems, "\n".join(problems)
    assert len(set(rows)) > 100
    assert [contents(each) for each in (tmp_path, lstm_run)] == before


@pytest.mark.parametrize(
    ("code", "option", "what", "value", "named"),
    [
        (2, "--model.hidden=16", "", b"", "model.hidden: 12 → 16"),
        (3, "--train.max_steps=26", "tokenizer.json", b"step\n1\n", "tokenizer.json"),
        (3, "--train.max_steps=26", "metrics.csv", b"step\n1\n", "metrics.csv"),
        (4, "--train.max_steps=26", "checkpoints/*.ckpt", b"step\n1\n", ".ckpt"),
        (5, "--optim.lr=0.01", "lm.training.loop.clip_gradients", lambda *_: NAN, "step 25"),
        (7, "--train.batch_size=4", "lm.training.loop.update", fail(NO_MEMORY), "out of memory"),
        (7, "--train.max_steps=26", "lm.run.Run.available_bytes", 1000, ""),
    ],
)
def test_a_run_that_cannot_continue_says_why(
    code: int,
    option: str,
    what: str,
    value: Any,
    named: str,
    run: Path,
    code_of: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`what` is a name that is patched, or files that are overwritten."""
    if what.startswith("lm."):
        monkeypatch.setattr(what, value)
    for path in run.glob(what or "-"):
        path.write_bytes(value)
    assert code_of(option) == code
    err = capsys.readouterr().err
    assert named in err.splitlines()[-1]
    assert err.count("lm: ") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_models(name: str, run: Path) -> None:
    (run / name).write_bytes(b"")
    assert main(["evaluate", str(run)]) == 4


def test_full_disks(code_of: Callable[..., int]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert code_of() == 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_busy_folders(run: Path, code_of: Callable[..., int]) -> None:
    with locked(run / ".lock"):
        assert code_of() == 8


def test_mistakes_of_the_program_have_a_traceback(
    code_of: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.training.loop.update", fail(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        code_of()
