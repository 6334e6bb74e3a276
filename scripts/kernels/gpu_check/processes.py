"""Processes that end with the check, however it ends.

The check runs in a child process of a guard. The kernel gives both every descendant whose parent
has ended (`PR_SET_CHILD_SUBREAPER`), so each of them finds all processes below itself and kills
them: the guard when the check ends, the check when the guard ends (`PR_SET_PDEATHSIG`). Linux only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 0.1
TIMED_OUT = 124
"""The exit code of a command that was ended at its limit."""
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`, run in a child process; nothing that it started remains.

    A signal to this process makes `work` raise SystemExit, and so does the end of this process.
    """
    sys.stdout.flush()
    guard = os.getpid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        os._exit(_run(work, guard))
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _send(child, number))
    _, status = os.waitpid(child, 0)
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run(work: Callable[[], int], guard: int) -> int:
    """The exit code of `work` in the child process of the guard."""

    def stop(number: int, _: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        os.setsid()  # signals to the group of the guard reach the check through the guard only
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:
            return 1
        return work()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        end_descendants()
        with suppress(OSError):
            sys.stdout.flush()


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, its output appended to a log."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
            env=env,
        )


def wait_all(
    running: Sequence[subprocess.Popen[bytes]],
    deadline: float,
    tick: Callable[[], None],
    others: Collection[int] = (),
) -> list[int]:
    """The exit codes of commands; at the deadline (`time.monotonic`) all of them are ended.

    Args:
        running: the commands.
        deadline: when those that still run are ended.
        tick: called now and then while they run.
        others: processes below this one that remain; all further ones are ended.
    """
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        tick()
    codes = [TIMED_OUT if process.poll() is None else process.returncode for process in running]
    for process in running:
        if process.returncode is None:
            _send(process.pid, signal.SIGKILL)
            process.wait()
    end_descendants(others)
    return codes


def end_descendants(others: Collection[int] = ()) -> None:
    """Kill all processes below this one except `others`, within five seconds."""
    deadline = time.monotonic() + 5
    while remaining := set(descendants()) - set(others):
        for pid in remaining:
            _send(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # not a child of this process yet
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def descendants() -> list[int]:
    """The processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError):  # it may have ended
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, generation = [], [os.getpid()]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, [])]
        found += generation
    return found


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
