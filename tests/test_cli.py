"""The command: help, what all verbs share, and that nothing needs a network."""

import socket
import sys
from pathlib import Path

import pytest
import torch

from lm import __version__
from lm.cli import _VERBS, main
from lm.config.reference import USUAL_KEYS, describe_keys
from tests.conftest import Printed, Train


@pytest.mark.parametrize("verb", _VERBS)
def test_every_command_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a narrower page divides words
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    help_text, options = capsys.readouterr().out, _VERBS[verb].OPTIONS
    assert [option for option in options if option[0] == "-" and option not in help_text] == []
    assert _VERBS[verb].HELP[1:] in " ".join(help_text.split())
    assert ("--section.key=value" in help_text) == (verb in {"prepare", "train", "classes", "info"})
    assert len(help_text.splitlines()) < 60
    assert all(f"  {key}: " in help_text for key in USUAL_KEYS if verb in {"prepare", "train"})


def test_version_and_keys_are_printed(capsys: pytest.CaptureFixture[str], printed: Printed) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sqrtlm {__version__}\n"
    for arguments in ([], ["word_table"]):
        assert printed("config", *arguments) == describe_keys(*arguments) + "\n"


@pytest.mark.parametrize(
    "verb", ["evaluate RUN", "generate RUN", "score RUN TEXT", "rescore RUN TEXT --lm-weight=1"]
)
def test_verbs_that_compute_take_a_device_and_by_default_the_threads_of_the_run(
    verb: str, lstm_run: Path, tmp_path: Path, complaint: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, counts = tmp_path / "text", list[int]()
    text.write_text("u\t-1\tthe cat\n")
    arguments = verb.replace("RUN", str(lstm_run)).replace("TEXT", str(text)).split()
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
    "command", ["evaluate RUN --text", "score RUN", "rescore RUN --lm-weight=1 --non-words="]
)
def test_special_words_of_a_text_are_reported(
    lstm_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    what = "hypotheses" if command.startswith("rescore") else "text"
    counted = f"{what}: the text contains <eos> (1) and <unk> (3), counted as special words"
    for text, is_reported in (("the <unk> cat <eos>", True), ("the cat", False)):
        (tmp_path / "list").write_text(f"u\t-1\t{text}\nu\t-2\t{text.replace('eos', 'unk')}\n")
        caplog.clear()
        caplog.set_level("INFO")
        assert main([*command.replace("RUN", str(lstm_run)).split(), f"{tmp_path}/list"]) == 0
        assert ("special words" in caplog.text) == is_reported
        assert (counted in caplog.messages) == is_reported


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
    tiny: Path, tmp_path: Path, printed: Printed, tree: str
) -> None:
    options = [f"--output.tree={tree}", f"--run_dir={tmp_path / 'run'}"]
    assert main(["prepare", str(tiny), *options]) == 0
    assert not (tmp_path / "run" / "data" / "classes.npy").exists()
    if tree not in ("full", "adaptive"):
        assert "columns per token" in printed("classes", tiny, *options)


class Refused(BaseException):
    """Not an error that a library may catch and hide."""


def test_commands_make_no_connection(
    train: Train, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*address: object, **_: object) -> None:
        raise Refused(address)

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(offline)
    with pytest.raises(Refused), socket.socket() as one:
        one.connect(("127.0.0.1", 9))
    run = tmp_path / "run"
    assert main(["prepare", str(tiny), f"--run_dir={run}", "--no-progress"]) == 0
    train(run, f"--data.prepared_dir={run / 'data'}", "--train.max_steps=2")
    text = tmp_path / "text.txt"
    text.write_text("the cat sees a dog today\n")
    for command in (f"evaluate {run}", f"score {run} {text}", f"generate {run} --tokens=3"):
        assert main(command.split()) == 0
    assert main(["info", str(run)]) == 0
