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
from scripts.kernels.gpu_check.report import LOG_BYTES, Report
from scripts.kernels.gpu_check.run import Run

TOP = Path(__file__).resolve().parents[3]
STEPS = ["preflight", "compile", "tests", "benchmark-97", "training", "row-wise", "commands"]
PAGE = (TOP / "scripts/kernels/README.md").read_text()
CALLS = re.findall(r"^scripts/gpu_check(| --continue) +# (\d+) s: (.*)", PAGE, re.M)
"""Options, seconds and steps of the commands of the page."""
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


@pytest.mark.long
def test_the_check_for_a_gpu_runs_all_steps_without_one(tmp_path: Path) -> None:
    code, printed, errors = check("--dry-run", "--seconds", "3600", "--out", str(tmp_path))
    assert code == 0, printed + errors
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["step"] for step in report["steps"]] == STEPS
    assert {step["status"] for step in report["steps"]} == {"passed"}
    assert report["steps"][2]["last_lines"][0].startswith("3 passed")
    assert "launches for sm_90 compiled" in report["steps"][1]["last_lines"][0]
    rows = report["rows"]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    logged = [{"what": name, **row} for name, found in rows.items() for row in found]
    assert [json.loads(line) for line in lines] == logged
    (random_tree,) = (row for row in rows["layer"] if row["backend"] == "triton")
    launches = random_tree["launches"]
    assert launches["forward"] == ["_sort", "_merge", "_plan", "_forward"]
    assert launches["backward"] == ["_errors", "_heavy", "_rows"]
    kernels = {row["kernel"]: row["launches"] for row in random_tree["kernels"]}
    assert kernels == dict.fromkeys([*launches["forward"], *launches["backward"]], 1)
    assert len(rows["training"]) == 2 * len(plan.LAYERS)
    assert [row["method"] for row in rows["scale"] if row["outcome"] == "done"] == ["layer", "step"]
    verbs = [row["command"].split()[0] for row in rows["commands"]]
    assert verbs == ["train", "train", "evaluate", "score", *3 * ["generate"]]
    assert all(row["same"] in (True, "") for row in rows["decode"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"gpu_check.json", "summary.txt", "logs.tar.gz", "rows.jsonl"}
    summary = (tmp_path / "summary.txt").read_text()
    assert len(summary) <= 11_500
    assert summary in printed[-12_000:]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert {f"{name}.0.log" for name in STEPS} <= set(archive.getnames())
    steps = report["steps"]
    steps[-1]["status"] = "no time"  # a further call runs it, and keeps the others
    (tmp_path / "gpu_check.json").write_text(json.dumps(report))
    code, printed, errors = check("--dry-run", "--continue", "--out", str(tmp_path))
    assert code == 0, printed + errors
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["steps"][:-2] == steps[1:-1]
    assert [(step["step"], step["status"]) for step in report["steps"][-2:]] == [
        ("preflight", "passed"),
        ("commands", "passed"),
    ]
    assert report["rows"]["layer"] == rows["layer"]
    assert len(report["rows"]["commands"]) == 2 * len(rows["commands"])
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert {f"{name}.0.log" for name in STEPS} <= set(archive.getnames())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_fails_without_one(tmp_path: Path) -> None:
    code, printed, errors = check("--steps", "preflight", "--out", str(tmp_path))
    assert code == 2
    assert errors == ("gpu_check: torch finds no CUDA device; --dry-run runs without one\n"), (
        printed
    )


def test_chosen_steps_run_alone_and_unknown_ones_are_named(tmp_path: Path) -> None:
    chosen = plan.steps(tmp_path, 90, ["tests", "compile"])
    assert [step.name for step in chosen] == ["compile", "tests"]
    code, _, errors = check("--steps", "nothing")
    assert code == 2
    assert "no step 'nothing', only preflight, compile, tests, training, benchmark-33k," in errors


def test_kernels_of_the_chosen_benchmarks_are_compiled_first(tmp_path: Path) -> None:
    first, *_ = plan.steps(tmp_path, 90, ["compile", "benchmark-10m", "benchmark-800k"])
    assert first.commands[0][-2:] == ["800000:1024", "10000000:300"]


def test_two_calls_of_the_readme_run_everything_within_five_minutes_each() -> None:
    calls = plan.calls()
    assert [options for options, _, _ in CALLS] == ["", " --continue"]
    assert [steps.split(", ") for _, _, steps in CALLS] == [
        [step.name for step in call if step.name != "preflight"] for call in calls
    ]
    names = {step.name for call in calls for step in call}
    assert names == set(plan.names(dry=False))
    sums = [sum(step.expected for step in call) for call in calls]
    assert max(sums) <= 297
    assert all(step.expected < step.limit for call in calls for step in call)
    code, printed, _ = check("--list")
    assert code == 0
    assert re.findall(r"^  all +(\d+)$", printed, re.M) == [*map(str, sums)]
    assert [seconds for _, seconds, _ in CALLS] == [*map(str, sums)]


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


def report_in(folder: Path, **facts: Any) -> Report:
    """A report with its logs in a folder next to it."""
    (folder / "work").mkdir()
    return Report(folder / "out", folder / "work", {"command": "scripts/gpu_check", **facts})


def test_a_step_that_takes_too_long_is_ended_and_the_report_is_written(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = [sys.executable, "-c", "print('done')"]
    report = report_in(tmp_path)
    run = Run(report, time.monotonic() + 600)
    short = run.step(Step("short", [done, done], 1, 60, parallel=True))
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
    wait = "import pathlib, time; time.sleep(0.5); pathlib.Path({!r}).touch()"
    first = [sys.executable, "-c", wait.format(str(tmp_path / "first"))]
    second = [sys.executable, "-c", f"open({str(tmp_path / 'first')!r})"]
    assert run.step(Step("in turn", [first, second], 1, 60))["exit_code"] == 0
    late = Run(report, time.monotonic() + 9).step(Step("late", [done], 10, 60))
    assert (late["status"], late["exit_code"]) == ("no time", 124)
    skipped = run.step(Step("none", [], 1, 60, skipped="not installed"))
    assert (skipped["status"], skipped["exit_code"]) == ("skipped", 0)


def test_every_row_of_an_unsafe_version_of_triton_is_marked(tmp_path: Path) -> None:
    report = report_in(tmp_path, timing_only=UNSAFE)
    row = {"vocab_size": 800_000, "label": "graph/triton", "seconds_median": 1.0}
    row |= {"ratio_to_floor": 1.25, "refused": None}
    lines = [json.dumps(row), json.dumps(row), json.dumps(row)[:20]]  # the last is being written
    (report.work / "layer.jsonl").write_text("\n".join(lines))
    summary = report.finish()
    logged = (report.out / "rows.jsonl").read_text().splitlines()
    expected = {"what": "layer", **row, "timing_only": UNSAFE}
    assert [json.loads(line) for line in logged] == [expected] * 2
    assert summary.count(UNSAFE) == 1 + len(report.content["acceptance"])
    claim = "forward + backward at 800,000 words, captured ≤ 1.5 × floor"
    assert f"acceptance: met: {claim}: 1.25 × floor ({UNSAFE})" in summary


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


@pytest.mark.parametrize("programs", ["kernels", "commands"])
def test_the_programs_of_the_check_import_only_what_it_requires(programs: str) -> None:
    """Kernels and their tests none of the project's packages, commands few of them."""
    blocked = ["datasets", "hypothesis", "sentencepiece", "uv", "wandb", "zstandard"]
    collect = ["-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu"]
    if programs == "kernels":
        blocked += ["scipy", "numba", "yaml", "lightning", "pydantic", "safetensors", "matplotlib"]
        blocked += ["pandas", "pyarrow"]
        names = ["benchmarks.output_layer", "benchmarks.scale", "kernels.compilation"]
        names += [f"kernels.gpu_check.{name}" for name in ("__main__", "preflight")]
        collect.append(plan.GPU_TESTS[0])
    else:
        names = ["benchmarks.commands", "benchmarks.decode", "benchmarks.training_speed"]
        names += ["synthetic_corpus"]
        collect += plan.GPU_TESTS
    code = f"import sys, importlib\nfor name in {blocked}: sys.modules[name] = None\n"
    code += "".join(f"importlib.import_module('scripts.{name}')\n" for name in names)
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
        monkeypatch.setattr(preflight, name, lambda facts=facts: facts)
    monkeypatch.setattr(
        preflight, "comparison", lambda _: {"bf16*fp32": None, "bf16": "nll is off"}
    )
    expected = r"^the kernels differ from the reference: bf16: nll is off; --timing-only runs"
    with pytest.raises(preflight.MissingError, match=expected):
        preflight.examine(dry=False, timing_only=False)
    facts = preflight.examine(dry=False, timing_only=True)
    assert facts["timing_only"] == "wrong results: timing only, unsafe"
    assert facts["variables"] == {"SQRTLM_UNSAFE_TRITON": "1"}


def test_without_a_c_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(preflight.MissingError, match="no C compiler is found: install gcc"):
        preflight.tools(90)


def test_acceptance_is_computed_from_the_rows_of_the_benchmarks() -> None:
    def layer(size: int, label: str, floors: float | None, seconds: float = 1.0) -> dict[str, Any]:
        found = {"vocab_size": size, "label": label, "seconds_median": seconds}
        return found | {"ratio_to_floor": floors}

    layers = [layer(800_000, "graph/triton", 1.6), layer(800_000, "graph/triton", None)]
    layers += [layer(10_000_000, "graph/triton", 1.5), layer(800_000, "cce", None, 19.0)]
    layers.append(layer(267_735, "random/triton", 1.0))
    speeds = (("two_level", 7e5, 35), ("two_level", 1, 32), ("two_level,x=off", 1, 35))
    rows: dict[str, list[dict[str, Any]]] = {"layer": layers}
    rows["training"] = [
        {"tree": tree, "tokens_per_second_median": rate, "batch_size": 20, "seq_len": length}
        for tree, rate, length in (*speeds, ("torch", 5e5, 35))
    ]
    step = {"method": "layer", "dtype": "bf16", "outcome": "done", "seconds": 0.5}
    rows["scale"] = [{"vocab_size": 10_000_000, "graph_seconds": 0.0125, **step}]
    rows["scale"].append({"vocab_size": 100_000_000, **step, "outcome": "memory"})
    *unknown, first, second, third, fourth, fifth, sixth, last = acceptance(rows)
    assert all(line.startswith("not measured: ") for line in (*unknown, last))
    assert [first, second, third, fourth, fifth, sixth] == [
        "missed: forward + backward at 800,000 words, captured ≤ 1.5 × floor: 1.60 × floor",
        "met: forward + backward at 10,000,000 words, captured ≤ 1.5 × floor: 1.50 × floor",
        "missed: cut-cross-entropy at 800,000 words ≥ 20 × ours: 19.00 × ours",
        "met: training with classes, 20 × 35 ≥ 600,000 tokens/s: 700,000.00 tokens/s",
        "met: training with classes ≥ 1 × torch's full: 1.40 × torch's full",
        "missed: a row-wise step at 10,000,000 × 300, captured ≤ 11 ms: 12.50 ms",
    ]


def test_logs_and_the_summary_are_shortened(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    for i in range(12):
        (report.work / f"tests.{i}.log").write_bytes(random.Random(i).randbytes(3_000_000))
    long = {"step": "tests", "status": "failed", "exit_code": 1, "seconds": 1.0}
    long |= {"expected_seconds": 1, "last_lines": ["x" * 5000], "end_of_output": "y" * 3000}
    report.steps.extend([long] * 20)
    assert len(report.finish()) <= 11_500
    size = (report.out / "logs.tar.gz").stat().st_size
    assert 12 * 1.9 * LOG_BYTES < size < 12 * 2.1 * LOG_BYTES
