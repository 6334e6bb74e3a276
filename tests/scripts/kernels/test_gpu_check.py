"""The check for a GPU runs its steps without one, says what is missing, and leaves no process."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.kernels.gpu_check import plan, preflight
from scripts.kernels.gpu_check.acceptance import acceptance
from scripts.kernels.gpu_check.plan import Step
from scripts.kernels.gpu_check.report import ARCHIVE_BYTES, Report
from scripts.kernels.gpu_check.run import Run

TOP = Path(__file__).resolve().parents[3]
STEPS = ["preflight", "compile", "correctness", "benchmark-97", "counters"]
COMMANDS = re.findall(
    r"^scripts/gpu_check --steps ([^#\n]+)", (TOP / "scripts/kernels/README.md").read_text(), re.M
)
UNSAFE = "Triton 3.6.0: timing only, unsafe"


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command in a new process, with this Python."""
    command = [str(TOP / "scripts" / "gpu_check"), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, env=environment, stdout=pipe, stderr=pipe)


def check(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    process = start(*arguments)
    out, err = process.communicate()
    return process.returncode, out, err


def processes_with(mark: str) -> list[int]:
    """The processes whose environment contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it ended, or is of another user
            continue
    return found


def ends(mark: str, seconds: float = 20) -> bool:
    """Whether all processes with a mark end within some seconds."""
    deadline = time.monotonic() + seconds
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_with(mark)


def test_the_check_for_a_gpu_runs_all_steps_without_one(tmp_path: Path) -> None:
    code, printed, errors = check("--dry-run", "--seconds", "3600", "--out", str(tmp_path))
    assert code == 0, printed + errors
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["step"] for step in report["steps"]] == STEPS
    assert {step["status"] for step in report["steps"]} == {"passed"}
    assert report["steps"][2]["last_lines"][0].startswith("3 passed")
    assert "launches for sm_90 compiled" in report["steps"][1]["last_lines"][0]
    rows = report["rows"]["output_layer"]
    lines = (tmp_path / "output_layer.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    kernels = {row["method"]: row["launches"] for row in rows if row["backend"] == "triton"}
    assert kernels["random"]["forward"] == ["_sort", "_merge", "_plan", "_forward"]
    assert kernels["random"]["backward"] == ["_errors", "_heavy", "_rows"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"gpu_check.json", "summary.txt", "logs.tar.gz", "output_layer.jsonl"}
    summary = (tmp_path / "summary.txt").read_text()
    assert len(summary) <= 10_000
    assert summary in printed[-12_000:]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert set(archive.getnames()) == {f"{name}.0.log" for name in STEPS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_fails_without_one(tmp_path: Path) -> None:
    code, printed, errors = check("--steps", "preflight", "--out", str(tmp_path))
    assert code == 2
    assert errors == ("gpu_check: torch finds no CUDA device; --dry-run runs without one\n"), (
        printed
    )


def test_chosen_steps_run_alone_and_unknown_ones_are_named(tmp_path: Path) -> None:
    work = tmp_path
    assert [step.name for step in plan.steps(work, 90, ["repeat", "compile"])] == [
        "compile",
        "repeat",
    ]
    code, _, errors = check("--steps", "nothing")
    assert code == 2
    assert "no step 'nothing', only preflight, compile, correctness, benchmark-33k," in errors


def test_kernels_of_the_chosen_benchmarks_are_compiled_first(tmp_path: Path) -> None:
    first, *_ = plan.steps(tmp_path, 90, ["compile", "benchmark-10m", "benchmark-800k"])
    assert first.commands[0][-2:] == ["800000:1024", "10000000:300"]
    first, *_ = plan.steps(tmp_path, 90, ["compile", "benchmark-mixed"])
    assert first.commands[0][-5:] == ["--rows", "33278:650", "--rows-dtypes", "bf16", "fp32"]


def test_the_commands_of_the_readme_take_less_than_ten_minutes(tmp_path: Path) -> None:
    assert len(COMMANDS) == 3
    everything = set(plan.names(dry=False)) - {"preflight"}
    assert everything == {name for command in COMMANDS for name in command.split()}
    for command in COMMANDS:
        planned = plan.steps(tmp_path, 90, command.split())
        assert {step.name for step in planned} == set(command.split())
        assert sum(step.expected for step in planned) <= 420
        assert all(step.expected < step.limit for step in planned)


@pytest.mark.parametrize("killed", ["the guard", "the check"])
def test_a_killed_check_leaves_no_process_and_a_readable_report(
    killed: str, tmp_path: Path
) -> None:
    mark, generator = f"gpu-check-{uuid.uuid4()}", random.Random()
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    variables = {"GPU_CHECK_MARK": mark, "TMPDIR": str(temporary)}
    guard = start("--dry-run", "--seconds", "3600", "--out", str(out), **variables)
    path = out / "gpu_check.json"
    while not (path.exists() and '"running"' in path.read_text()):
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 6))
    children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()
    victim = guard.pid if killed == "the guard" else int(children[0])
    assert len(processes_with(mark)) >= 3
    os.kill(victim, signal.SIGKILL)
    assert ends(mark)
    guard.communicate()
    report = json.loads(path.read_text())
    expected = "interrupted" if killed == "the guard" else "running"
    assert report["steps"][-1]["status"] in {expected, "passed"}
    assert len(list(out.iterdir())) <= 8
    assert not list(temporary.glob("gpu_check-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_processes_that_processes_started(
    number: signal.Signals, tmp_path: Path
) -> None:
    mark = f"gpu-check-{uuid.uuid4()}"
    program = f"""
import sys, time
from pathlib import Path
from scripts.kernels.gpu_check import processes
def work():
    shell = "(setsid setsid sleep 600 &) ; sleep 600 & touch {tmp_path}/ready; wait"
    command = ["bash", "-c", shell]
    running = processes.start(command, Path("{tmp_path}/log"))
    return processes.wait_all([running], time.monotonic() + 600, lambda: None)[0]
sys.exit(processes.guarded(work))
"""
    variables = os.environ | {"GPU_CHECK_MARK": mark, "PYTHONPATH": str(TOP)}
    guard = subprocess.Popen([sys.executable, "-c", program], env=variables)
    while not (tmp_path / "ready").exists() or len(processes_with(mark)) < 5:
        time.sleep(0.01)
    guard.send_signal(number)
    assert guard.wait(20) == 128 + number
    assert processes_with(mark) == []


def test_the_age_of_a_process_counts_its_imports() -> None:
    code = "import time; time.sleep(0.5); from scripts.kernels.gpu_check import processes"
    code += "; print(processes.age_seconds())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TOP)
    assert 0.5 <= float(done.stdout) < 30


def report_in(folder: Path, **facts: Any) -> Report:
    """A report with its logs in a folder next to it."""
    (folder / "work").mkdir()
    return Report(folder / "out", folder / "work", {"command": "scripts/gpu_check", **facts})


def test_a_step_that_takes_too_long_is_ended_and_the_report_is_written(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = [sys.executable, "-c", "print('done')"]
    report = report_in(tmp_path)
    run = Run(report, time.monotonic() + 60)
    short = run.step(Step("short", [done, done], 1, 60))
    assert (short["status"], short["exit_code"]) == ("passed", 0)
    assert short["last_lines"] == ["done", "done"]
    slow = run.step(Step("long", [done, sleep], 1, 6))
    assert (slow["status"], slow["exit_code"]) == ("timed out", 124)
    assert json.loads((tmp_path / "out/gpu_check.json").read_text())["steps"] == report.steps
    bad = [sys.executable, "-c", "print('bad'); raise SystemExit(3)"]
    failed = run.step(Step("failed", [done, bad], 1, 60))
    assert (failed["status"], failed["exit_code"]) == ("failed", 3)
    assert failed["last_lines"] == ["bad", "done"]
    assert "\n\nfailed:\nbad" in report.summary()
    late = Run(report, time.monotonic()).step(Step("late", [done], 1, 60))
    assert (late["status"], late["exit_code"]) == ("no time", 124)
    skipped = run.step(Step("none", [], 1, 60, skipped="not installed"))
    assert (skipped["status"], skipped["exit_code"]) == ("skipped", 0)


def test_the_report_says_running_while_a_step_runs(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    path = tmp_path / "out" / "gpu_check.json"
    code = f"import json; print(json.load(open({str(path)!r}))['steps'][0]['status'])"
    row = Run(report, time.monotonic() + 60).step(Step("one", [[sys.executable, "-c", code]], 1, 9))
    assert row["last_lines"] == ["running"]


def test_every_row_of_an_unsafe_version_of_triton_is_marked(tmp_path: Path) -> None:
    report = report_in(tmp_path, timing_only=UNSAFE)
    row = {"vocab_size": 800_000, "label": "random/triton", "seconds_median": 1.0}
    row |= {"ratio_to_floor": 1.25, "refused": None}
    lines = [json.dumps(row), json.dumps(row), json.dumps(row)[:20]]  # the last is being written
    (report.work / "output_layer.jsonl").write_text("\n".join(lines))
    summary = report.finish()
    logged = (report.out / "output_layer.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in logged] == [row | {"timing_only": UNSAFE}] * 2
    assert summary.count(UNSAFE) == 4
    assert "acceptance: met: forward + backward at 800,000 words ≤ 1.5 × floor: 1.25" in summary


def test_an_old_version_of_triton_is_refused_unless_for_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setenv("SQRTLM_UNSAFE_TRITON", "0")
    with pytest.raises(preflight.MissingError, match=r"requires Triton 3.7.1 .* --timing-only$"):
        preflight.support(90, dry=False, timing_only=False)
    assert preflight.support(80, dry=False, timing_only=False) == {"variables": {}}
    found = preflight.support(90, dry=False, timing_only=True)
    assert found["timing_only"] == UNSAFE
    assert found["variables"] == {"SQRTLM_UNSAFE_TRITON": "1"}
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert preflight.support(90, dry=False, timing_only=True) == {"variables": {}}


def test_numpy_that_an_old_interpreter_cannot_use_is_refused_for_a_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.5.2")
    expected = r"interpreter of Triton 3.6.0 requires numpy before 2.4, this is 2.5.2"
    with pytest.raises(preflight.MissingError, match=expected):
        preflight.packages(dry=True)
    assert preflight.packages()["numpy"] == "2.5.2"


def test_the_programs_of_the_check_import_only_what_it_requires() -> None:
    """Neither the packages of this project nor those of its other tests."""
    blocked = ["scipy", "numba", "yaml", "datasets", "lightning", "pydantic", "hypothesis"]
    blocked += ["wandb", "sentencepiece", "safetensors", "matplotlib", "pandas", "pyarrow"]
    names = ["benchmarks.output_layer", "kernels.compilation", "kernels.tile_tuning"]
    names += [f"kernels.gpu_check.{name}" for name in ("__main__", "preflight", "counters")]
    code = f"import sys, importlib\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "".join(f"importlib.import_module('scripts.{name}')\n" for name in names)
    collect = ["-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist"]
    collect += ["-m", "gpu", plan.GPU_TESTS]
    code += f"import pytest; sys.exit(pytest.main({collect}))"
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu.py::test_results_repeat_bit_for_bit[1]" in done.stdout


def test_kernels_that_differ_end_the_check_unless_it_is_for_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, facts in (("packages", {}), ("device", {"device": "G", "capability": 80})):
        monkeypatch.setattr(preflight, name, lambda facts=facts, **_: facts)
    monkeypatch.setattr(preflight, "comparison", lambda *_: {"fp16": None, "bf16": "nll is off"})
    expected = r"^the kernels differ from the reference: bf16: nll is off; --timing-only runs"
    with pytest.raises(preflight.MissingError, match=expected):
        preflight.examine(["bf16"], dry=False, timing_only=False)
    facts = preflight.examine(["bf16"], dry=False, timing_only=True)
    assert facts["timing_only"] == "wrong results: timing only, unsafe"
    assert facts["variables"] == {"SQRTLM_UNSAFE_TRITON": "1"}


def test_without_a_c_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(preflight.MissingError, match="no C compiler is found: install gcc"):
        preflight.tools(90)


def test_acceptance_is_computed_from_the_rows_of_the_benchmark() -> None:
    def row(size: int, label: str, seconds: float | None, floors: float | None) -> dict[str, Any]:
        found = {"vocab_size": size, "label": label, "seconds_median": seconds}
        return found | {"ratio_to_floor": floors, "refused": None if seconds else "not installed"}

    rows = [
        row(800_000, "random/triton", 1.0, 1.6),
        row(10_000_000, "random/triton", 1.0, 1.5),
        row(1_000_000, "random/triton", 0.5, 1.3),
    ]
    floors = "forward + backward at {} words ≤ 1.5 × floor: {} × floor"
    claim = "≥ 20 × faster than cut-cross-entropy at 1,000,000 words"
    assert acceptance([*rows, row(1_000_000, "cce", 10.0, None)]) == [
        f"missed: {floors.format('800,000', '1.60')}",
        f"met: {floors.format('10,000,000', '1.50')}",
        f"met: {claim}: 20.00 × faster",
    ]
    last = acceptance([*rows, row(1_000_000, "cce", None, None)])[-1]
    assert last == f"not measured: {claim} (not installed)"


def test_logs_and_the_summary_are_shortened(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    for i in range(12):
        (report.work / f"tests.{i}.log").write_bytes(random.Random(i).randbytes(3_000_000))
    long = {"step": "tests", "status": "failed", "exit_code": 1, "seconds": 1.0}
    long |= {"expected_seconds": 1, "last_lines": ["x" * 5000], "end_of_output": "y" * 3000}
    report.steps.extend([long] * 20)
    assert len(report.finish()) <= 10_000
    assert 1_000_000 < (report.out / "logs.tar.gz").stat().st_size <= ARCHIVE_BYTES
