"""Where a model computes, with how many threads, and what is refused."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lm
from lm import device as module
from lm.run import TrainedRun
from tests.conftest import python


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(free, …)`: from now on there are GPUs with this much free memory."""

    def pretend(*free: int) -> None:
        def free_and_total(gpu: Any) -> tuple[int, int]:
            return free[gpu.index if isinstance(gpu, torch.device) else gpu], 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)

    return pretend


def test_auto_is_the_gpu_with_most_free_memory_if_the_model_fits(gpus: Callable[..., None]) -> None:
    assert module.choose_device("auto", 1) == torch.device("cpu")
    gpus(100, 1000)
    assert module.choose_device("auto", 800) == torch.device("cuda", 1)
    assert module.choose_device("auto", 801) == torch.device("cpu")
    assert module.choose_device("cpu", 1) == torch.device("cpu")
    assert module.choose_device("cuda:01", 10**9) == torch.device("cuda:1")
    assert module.available_bytes(torch.device("cuda", 1)) == 1000


def test_a_run_on_a_gpu_moves_the_model_there(
    lstm_run: Path, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(10**9)
    moved = list[torch.device]()

    def move(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        moved.append(device)
        return model

    monkeypatch.setattr(torch.nn.Module, "to", move)
    assert TrainedRun.open(lstm_run).model.training is False
    assert moved[-1] == torch.device("cuda", 0)


V1, V2 = "7:x:/a\n4:cpuacct,cpu:/a/b\n3:memory:/a/b\n", "0::/a/b\n"
LIMIT, USAGE = "memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes"
STAT = "anon 700\ninactive_file 5\ntotal_inactive_file 7\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "processors", "limit"),
    [
        (None, {}, 8, None),
        (V2, {"a/b/cpu.max": "max 100000"}, 8, None),
        (V2, {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1, None),
        (V2, {"cpu.max": "50000 100000"}, 1, None),
        (V2, {"a/b/cpu.max": "150000 100000", "a/cpu.max": "400000 50000"}, 2, None),
        (V2, {"other/cpu.max": "1000 100000", "other/memory.max": "10"}, 8, None),
        ("0::/../../x\n", {"cpu.max": "300000 100000"}, 3, None),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 8, None),
        (V1, {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3, None),
        (V2, {"a/memory.max": "3000", "a/memory.current": "900", "a/memory.stat": STAT}, 8, 2105),
        (V2, {"memory.high": "4000", "memory.current": "900", "memory.max": "max"}, 8, 3100),
        (V2, {"a/b/memory.max": "100000"}, 8, 100000 - 10),  # what the process has
        (V2, {"a/b/memory.max": "3000", "a/b/memory.current": "4"}, 8, 3000 - 10),
        (V2, {"memory.max": "3000", "memory.current": "12", "memory.stat": STAT}, 8, 3000 - 10),
        (V1, {LIMIT: "3000", USAGE: "900", "memory/a/memory.stat": STAT}, 8, 3000 - 900 + 7),
    ],
)
def test_processors_and_memory_are_those_that_the_cgroups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str | None,
    files: dict[str, str],
    processors: int,
    limit: int | None,
) -> None:
    """Both versions count, of the process and of what contains it, as a container sees them."""
    files = {f"cgroup/{name}": text for name, text in files.items()}
    files |= {"meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB", "self/statm": "900 10 3 1"}
    for name, text in (files | ({} if cgroup is None else {"self/cgroup": cgroup})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(module, "PROC", tmp_path)
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sysconf", lambda _: 1)  # the size of a page
    assert module.num_processors() == processors
    free = 5000 * 1024 if limit is None else limit
    assert module.available_bytes(torch.device("cpu")) == free + 10


THREADS: Any = [(None, 1, 8, 3), (None, 1, 2, 2), (None, 2, 8, 1), (None, 9, 8, 1)]
THREADS += [(2, 2, 8, 2), (8, 1, 8, 3)]


@pytest.mark.parametrize(("asked", "processes", "torchs", "expected"), THREADS)
def test_threads_are_at_most_as_many_as_the_processors_of_a_process(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int | None,
    processes: int,
    torchs: int,
    expected: int,
) -> None:
    """More of them spin for each other: 1,024 threads on two processors did not end."""
    counts = list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(module, "num_processors", lambda: 3)
    module.set_num_threads(asked, processes)
    assert counts == [expected]
    assert caplog.messages == ["8 threads on 3 processors: using 3"] * (asked == 8)


def test_a_loaded_model_changes_the_number_of_threads_only_if_asked(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    lm.load(lstm_run)
    assert counts == []
    lm.load(lstm_run, threads=1)
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match=f"^threads: expected a positive .*, got {wrong!r}$"):
            lm.load(lstm_run, threads=wrong)  # type: ignore[arg-type]
    assert counts == [1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep memory")
def test_memory_that_training_frees_is_not_mapped_again() -> None:
    code = """
import resource, torch
from lm.device import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    large, small = torch.ones(20_000_000), torch.ones(2_000_000)
    del large, small
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""
    names = [name for name in os.environ if name.startswith("MALLOC_")]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    first, *_, last = map(int, python("-c", code, env=environment, check=True).stdout.split())
    assert last < first / 20


def test_freed_memory_is_kept_unless_the_user_sets_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call), gnu_get_libc_version=str)
    monkeypatch.setattr("lm.device.ctypes.CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_ARENA_MAX_", "4")
    module.keep_freed_memory()
    assert calls == []
    monkeypatch.delenv("MALLOC_ARENA_MAX_")
    module.keep_freed_memory()
    module.return_freed_memory()
    assert calls == [(-4, 0), (-1, 1 << 30), (-3, 6 << 20)]
    del library.gnu_get_libc_version
    module.keep_freed_memory()
    assert len(calls) == 3
