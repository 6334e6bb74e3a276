"""The command: results on stdout; a mistake is one line, exit code 2, and changes nothing."""

import gzip
import io
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm import __version__
from lm.cli import main
from lm.config.reference import USUAL_KEYS, describe_keys
from tests.conftest import corpus_of

Complaint = Callable[..., str]
TREE_FILES = {
    "tree.txt": ":1: 'thé' is not in the vocabulary",
    "utf-16.txt": " is in UTF-16: convert it, iconv -f UTF-16 -t UTF-8 FOLDER/utf-16.txt >",
    "latin-1.txt": ": invalid UTF-8: if it is Latin-1 or Windows text, convert it, iconv",
    "tree.txt.gz": " is compressed, .*: decompress it",
}


@pytest.mark.parametrize(
    ("verb", "option"),
    {
        "prepare": "CONFIG",
        "train": "--resume",
        "evaluate": "--split",
        "generate": "--top-p",
        "classes": "--nodes NODES",
        "info": "CONFIG|RUN",
        "config": "KEY|SECTION",
    }.items(),
)
def test_every_command_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str, option: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a narrower page divides words
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    help_text = capsys.readouterr().out
    assert option in help_text
    assert ("--section.key=value" in help_text) == (verb in {"prepare", "train", "classes", "info"})
    assert len(help_text.splitlines()) < 60
    assert all(f"  {key}: " in help_text for key in USUAL_KEYS if verb in {"prepare", "train"})


def test_version_and_keys_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sqrtlm {__version__}\n"
    for arguments in ([], ["word_table"]):
        assert main(["config", *arguments]) == 0
        assert capsys.readouterr().out == describe_keys(*arguments) + "\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.hiden=3", r"TINY: unknown key model.hiden; did you mean model.hidden\?"),
        ("more", "expected an override --section.key=value, got 'more'"),
        ("--train.max_steps 300", "--train.max_steps: write --train.max_steps=300"),
        ("--train.max_steps", "--train.max_steps: write --train.max_steps=VALUE"),
        ("--device cpu", "--device: write --train.accelerator=cpu"),
        ("--threads=2", "--threads=2: write --train.threads=2"),
        ("--model.layers=3 --", "expected an override --section.key=value, got '--'"),
        ("--resume", "argument --resume: expected one argument"),
        ("--resume=absent.ckpt", "--resume absent.ckpt: no such checkpoint"),
        (
            "--train.batch_size=9999",
            r"the training split has \d+ tokens; train.batch_size = 9999 and train.seq_len = 8"
            " require at least 9999",
        ),
        (
            "--train.max_epochs=1 --train.accumulate=9999",
            "train.max_epochs = 1 has fewer batches than train.accumulate = 9999",
        ),
        (
            "--output.tree=oak",
            r"output.tree: oak is neither a tree \(full, two_level, multi_level, balanced, huffman,"
            r" adaptive\) nor a file",
        ),
        *(
            (f"--output.tree=FOLDER/{name}", f"output.tree: FOLDER/{name}{problem}.*")
            for name, problem in TREE_FILES.items()
        ),
        (
            "--output.tree=adaptive --output.cutoffs=[5,5]",
            r"output.cutoffs: cutoffs must increase within 1 … \d+, got \[5, 5\]",
        ),
    ],
)
def test_what_cannot_be_trained_is_named_before_the_run_begins(
    tiny: Path, prepared_dir: Path, tmp_path: Path, untouched: Complaint, option: str, message: str
) -> None:
    for name in TREE_FILES:
        content = "thé 0 0\ncat 0 1\n".encode(name[:-4] if "-" in name else "utf-8")
        (tmp_path / name).write_bytes(gzip.compress(content) if ".gz" in name else content)
    folders = [f"--data.prepared_dir={prepared_dir}", f"--run_dir={tmp_path / 'run'}"]
    options = [part.replace("FOLDER", str(tmp_path)) for part in option.split()]
    expected = message.replace("FOLDER", str(tmp_path)).replace("TINY", str(tiny))
    assert re.fullmatch(expected, untouched("train", tiny, *folders, *options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "unknown command fly: the commands are new, prepare, train, evaluate, "),
        (["evaluate"], "the following arguments are required: RUN"),
        (["evaluate", "r", "--split", "all"], "argument --split: invalid choice: 'all'"),
        (["evaluate", "r", "--splitt=test"], "unknown option --splitt=test; did you mean --split?"),
        (
            ["train", "r", "--no-progres"],
            "unknown option --no-progres; did you mean --no-progress?",
        ),
        (["evaluate", "r", "--split=test", "--text=t"], "argument --text: not allowed with"),
        (["generate", "r", "--tokens=0"], "argument --tokens: must be at least 1, got 0"),
        (["evaluate", "r", "--threads=9999"], "argument --threads: must be at most 1024, got 9999"),
        (["generate", "r", "--model.hidden=3"], "unknown option --model.hidden=3"),
        (["config", "model.hiden"], "unknown key model.hiden; did you mean model.hidden?"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(
    untouched: Complaint, arguments: list[str], message: str
) -> None:
    assert untouched(*arguments).startswith(message)


@pytest.mark.parametrize("verb", ["evaluate", "generate", "classes", "info"])
def test_a_folder_without_a_model_or_prepared_data_is_named(
    tiny: Path, tmp_path: Path, untouched: Complaint, verb: str
) -> None:
    (tmp_path / "empty").mkdir()
    remedies = {"empty": "`lm train CONFIG` trains one", "absent": "there is no such folder"}
    for name, remedy in remedies.items():
        folder = tmp_path / name
        if verb in ("evaluate", "generate"):
            expected = f"{folder}: no trained model here (model.json is missing); {remedy}"
            assert untouched(verb, folder) == expected
            continue
        expected = f"{folder}/data is not a prepared folder: it has no meta.json"
        assert untouched(verb, tiny, f"--run_dir={folder}").startswith(expected)
    if verb in ("classes", "info"):
        expected = f"{tmp_path}/empty: no run here (config.yaml is missing): lm train CONFIG begins"
        assert untouched(verb, tmp_path / "empty").startswith(expected)


def test_a_folder_with_a_run_is_unchanged(
    tiny: Path, lstm_run: Path, complaint: Complaint, contents: Callable[[Path], dict[str, str]]
) -> None:
    before = contents(lstm_run)
    message = complaint("train", tiny, f"--run_dir={lstm_run}")
    assert message == (
        f"{lstm_run} already contains a run: continue it with --resume auto, or choose another"
        " --name or --run_dir"
    )
    assert contents(lstm_run) == before


@pytest.mark.parametrize(
    "command", ["evaluate RUN", "generate RUN", "score RUN TEXT", "rescore RUN TEXT --lm-weight=1"]
)
def test_verbs_that_compute_take_a_device_and_by_default_the_threads_of_the_run(
    command: str,
    lstm_run: Path,
    tmp_path: Path,
    complaint: Complaint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, counts = tmp_path / "text", list[int]()
    text.write_text("u\t-1\tthe cat\n")
    arguments = command.replace("RUN", str(lstm_run)).replace("TEXT", str(text)).split()
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for option in ([], ["--threads=2"]):
        assert main([*arguments, *option]) == 0
    assert counts == [1, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, problem in (
        ("cuda", "cuda does not exist, there are 0 CUDA devices"),
        ("cuda:3", "cuda:3 does not exist, there are 0 CUDA devices"),
        ("gpu", "expected auto, cpu or cuda[:N], got 'gpu'"),
    ):
        assert complaint(*arguments, "--device", device) == f"device: {problem}"


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("evaluate RUN --text", "text"),
        ("score RUN", "text"),
        ("rescore RUN --lm-weight=1 --non-words=", "hypotheses"),
    ],
)
def test_special_words_of_a_text_are_reported(
    lstm_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, what: str
) -> None:
    counted = f"{what}: the text contains <eos> (1) and <unk> (3), counted as special words"
    for text, is_reported in (("the <unk> cat <eos>", True), ("the cat", False)):
        (tmp_path / "list").write_text(f"u\t-1\t{text}\nu\t-2\t{text.replace('eos', 'unk')}\n")
        caplog.clear()
        caplog.set_level("INFO")
        assert main([*command.replace("RUN", str(lstm_run)).split(), f"{tmp_path}/list"]) == 0
        assert ("special words" in caplog.text) == is_reported
        assert (counted in caplog.messages) == is_reported


def test_evaluating_a_split_that_was_not_prepared_says_which_there_are(
    tiny: Path, tmp_path: Path, complaint: Complaint
) -> None:
    options = corpus_of(tmp_path, "the cat sees a dog\n" * 40)
    assert main(["train", str(tiny), "--no-progress", "--train.max_steps=1", *options]) == 0
    message = complaint("evaluate", tmp_path / "run", "--split=valid")
    assert message == (
        f"{tmp_path}/run/data has no valid split: give its files as data.files.valid"
        " (prepared: train)"
    )
    message = complaint("evaluate", tmp_path / "run", "--split=train", "--arpa=x")
    assert message == f"{tmp_path}/run has no validation split to tune on: give --mixture"


@pytest.mark.parametrize("in_terminal", [True, False])
def test_a_terminal_shows_progress_bars_unless_they_are_switched_off(
    in_terminal: bool,
    tiny: Path,
    lstm_run: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: in_terminal)
    for option in ([], ["--no-progress"]):
        for shown, *command in (
            ("lines", "prepare", tiny, f"--data.prepared_dir={tmp_path / str(option)}"),
            ("evaluate", "evaluate", lstm_run, "--split=valid"),
            ("evaluate", "evaluate", lstm_run, "--text", corpus / "valid.txt"),
        ):
            assert main([*map(str, command), *option]) == 0
            assert (shown in capsys.readouterr().err) == (in_terminal and not option)
    (lstm_run / "evaluate-valid.json").unlink()


@pytest.mark.parametrize("tree", ["full", "balanced", "huffman", "adaptive"])
def test_a_tree_without_classes_neither_prepares_nor_reports_them(
    tiny: Path, tmp_path: Path, complaint: Complaint, printed: Callable[..., str], tree: str
) -> None:
    options = [f"--output.tree={tree}", f"--run_dir={tmp_path / 'run'}"]
    assert main(["prepare", str(tiny), *options]) == 0
    assert not (tmp_path / "run" / "data" / "classes.npy").exists()
    if tree in ("full", "adaptive"):
        assert complaint("classes", tiny, *options) == (
            f"output.tree: {tree} has no word classes to report on"
        )
    else:
        assert "columns per token" in printed("classes", tiny, *options)


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return spare.fileno()

    with open(lstm_run / "env.json", "rb") as spare:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["info", str(lstm_run), "--json"]) == 141
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


class Refused(BaseException):
    """Not an error that a library may catch and hide."""


def test_commands_make_no_connection(
    train: Callable[..., Path], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: socket.socket, address: Any, *__: object) -> None:
        raise Refused(address)

    def refuse_name(name: Any, *_: object, **__: object) -> None:
        raise Refused(name)

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_name)
    for offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(offline)
    with pytest.raises(Refused), socket.socket() as one:
        one.connect(("127.0.0.1", 9))
    run = tmp_path / "run"
    assert main(["prepare", str(tiny), f"--run_dir={run}", "--no-progress"]) == 0
    train(run, f"--data.prepared_dir={run / 'data'}", "--train.max_steps=2")
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog today\n")
    for arguments in (["evaluate", run], ["score", run, text], ["generate", run, "--tokens=3"]):
        assert main([str(argument) for argument in arguments]) == 0
    assert main(["info", str(run)]) == 0
