"""No network unless it is asked for: the commands work where no socket can be connected."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.cli import main


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
