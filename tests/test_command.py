"""The process of a command: what it imports, logs and writes to a terminal without Unicode."""

import ast
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest

import lm
from lm.cli import main
from tests.conftest import Printed, corpus_of, python

HEAVY = "torch torch._dynamo lightning matplotlib numba scipy sklearn pandas datasets pyarrow"
HEAVY += " sentencepiece wandb fsspec tqdm"
LOOPS = ("numba", "scipy")
"""What compiled loops import."""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("--help", set()),
        ("config", set()),
        ("generate RUN --tokens=3", {"torch", "tqdm", *LOOPS}),
        ("evaluate RUN", {"torch", "tqdm", *LOOPS}),
        ("evaluate RUN --text=TEXT", {"torch", "tqdm", *LOOPS}),
        ("info RUN", {"torch", "tqdm"}),
        ("classes RUN", {"torch", "tqdm"}),
        ("prepare RUN/config.yaml", {"tqdm"}),  # which has been done
    ],
)
def test_a_command_imports_only_the_libraries_that_it_uses(
    lstm_run: Path, corpus: Path, arguments: str, needed: set[str]
) -> None:
    code = (
        "import sys\nfrom lm.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY.split()} if name in sys.modules])"
    )
    given = arguments.replace("RUN", str(lstm_run)).replace("TEXT", str(corpus / "test.txt"))
    *printed, imported = python("-c", code, *given.split(), check=True).stdout.splitlines()
    assert set(ast.literal_eval(imported)) == needed
    keys = "model.hidden: int > 0, ≤ 1048576 = 200\n    H: size of the backbone's output"
    assert (keys in "\n".join(printed)) == (arguments == "config")


def test_characters_that_stdout_lacks_are_escaped_as_in_json(tiny: Path, tmp_path: Path) -> None:
    options = [str(tiny), *corpus_of(tmp_path, 40 * "é 😀\n")]
    assert main(["prepare", *options]) == 0
    for option in ([], ["--json"]):
        ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = python("-m", "lm", "classes", *options, *option, check=True, env=ascii_only)
        assert r"\u00e9" in done.stdout
        assert r"\ud83d\ude00" in done.stdout
    nodes = json.loads(done.stdout)["nodes"]
    assert {"é", "😀"} <= {word for node in nodes for word in node["top_words"]}


FULL = "lm: stdout cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("command", "code", "is_printed", "last_line"),
    [
        ("-m lm config seed > /dev/full", 6, False, FULL),
        ("-m lm config --help > /dev/full", 6, False, FULL),
        ("-u -m lm --help > /dev/full", 6, False, FULL),  # without a buffer
        ("-m lm config seed | true", 141, False, ""),
        ("-m lm config --help | true", 141, False, ""),
        ("-m lm config --help >&-", 0, False, ""),
        ("-m lm config seed 2>&-", 0, True, ""),
        ("-m lm score RUN <&-", 3, False, "lm: -: there is no line to score"),
    ],
)
def test_the_end_of_a_stream_is_no_traceback(
    command: str, code: int, is_printed: bool, last_line: str, lstm_run: Path
) -> None:
    line = f"set -o pipefail; {quote(sys.executable)} {command.replace('RUN', str(lstm_run))}"
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert (done.returncode, bool(done.stdout)) == (code, is_printed)
    assert "Traceback" not in done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == last_line


def test_sigterm_deletes_unfinished_files_and_is_one_line(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from data_prep.corpus import split\n"
        "def terminated(*_): os.kill(os.getpid(), signal.SIGTERM)\n"
        "split.write_splits = terminated\n"
        "from lm.__main__ import command\n"
        "command()\n"
    )
    (tmp_path / "my.txt").write_text("the cat sees a dog\n" * 40)
    here = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": os.getcwd()}}
    done = python("-c", code, "new", "my.yaml", "--text=my.txt", **here)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "lm: terminated\n")
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.parametrize(
    ("setting", "count"),
    [("", str(lm.SPIN_COUNT)), ("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "None")],
)
def test_idle_threads_spin_shortly_unless_the_user_has_chosen(setting: str, count: str) -> None:
    code = (
        "import os, sys\n"
        "from lm.__main__ import command\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "try: command()\n"
        "except SystemExit: print(os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    user = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in user}
    done = python("-c", code, "--version", env=environment | ({setting: "7"} if setting else {}))
    assert done.stdout.splitlines()[-1:] == [count], done.stderr


def test_nothing_is_imported_before_an_interruption_is_handled() -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.getcwd()!r}); before = set(sys.modules)\n"
        "import lm.__main__; print(*sorted(set(sys.modules) - before))"
    )
    done = python("-I", "-S", "-c", code, check=True)  # without site, which may import modules
    assert done.stdout == "__future__ lm lm.__main__\n"


@pytest.mark.parametrize("becomes", ["raise", "raise ImportError from None"])
def test_an_interruption_while_libraries_are_imported_is_no_traceback(becomes: str) -> None:
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "class Interrupting:\n"
        "    def find_spec(name, *_):\n"
        "        try:\n"
        "            if name == 'yaml': os.kill(os.getpid(), signal.SIGINT)\n"
        f"        except KeyboardInterrupt: {becomes}\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "from lm.__main__ import command\n"
        "command()\n"
    )
    done = python("-c", code, "--help")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lm: interrupted\n")


def test_the_end_of_a_training_run_names_its_model_and_the_next_command(
    tiny: Path, tmp_path: Path, printed: Printed, caplog: pytest.LogCaptureFixture
) -> None:
    options = corpus_of(tmp_path, 40 * "the cat sees a dog\n")
    options += ["--train.max_steps=6", "--log.every_steps=1"]
    caplog.set_level("INFO")
    run = tmp_path / "run"
    assert printed("train", tiny, *options) == f"{run}\n"
    steps = [re.sub(":.*", "", line) for line in caplog.messages if line.startswith("step ")]
    assert steps == ["step 1 of 6", "step 6 of 6"]  # the others follow within 30 seconds
    peak = re.fullmatch(r"most memory of the process: ([\d,]+) MB", caplog.messages[-3])
    assert peak
    assert 100 < int(peak[1].replace(",", "")) < 10_000
    trained = f"{run} has the model of step 6 of 6: no validation split"
    assert caplog.messages[-2:] == [trained, f"next: lm evaluate {run} --split train"]


def test_libraries_log_errors_only() -> None:
    assert main(["config", "seed"]) == 0
    for name in ("matplotlib.font_manager", "wandb", "fsspec"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)
    assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.WARNING)
    assert logging.getLogger("lm.training").isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("hiding", "name"),
    [
        ("data_prep/__init__.py", "data_prep"),
        ("data_prep.py", "data_prep.py"),
        ("data_prep/x", None),
    ],
)
def test_a_file_of_the_user_that_hides_a_package_is_named(
    tmp_path: Path, lstm_run: Path, hiding: str, name: str | None
) -> None:
    (tmp_path / hiding).parent.mkdir(exist_ok=True)
    (tmp_path / hiding).touch()
    here = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}}
    message = f"{tmp_path}/{name} hides the package data_prep of sqrtlm: rename it"
    load = f"import lm; lm.load({str(lstm_run)!r})"
    for command in (["-c", load], ["-c", "from lm import State"], ["-m", "lm", "config", "seed"]):
        done = python(*command, **here)
        last = (done.stderr.splitlines() or [""])[-1]
        if name is None:  # without a file, a folder is no package that hides another
            assert (done.returncode, last) == (0, "")
        elif command[0] == "-m":
            assert (done.returncode, done.stderr) == (2, f"lm: {message}\n")
        else:
            assert last == f"ImportError: {message}"


def test_another_checkout_here_is_not_to_be_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "__file__", "/site-packages/lm/__init__.py")
    with pytest.raises(ImportError, match=f": import lm from {os.getcwd()} too, or leave that fo"):
        lm.check_packages()
