"""Commands in forked processes, which start at once because everything is imported and compiled."""

import logging
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager

from lm.__main__ import command
from scripts.benchmarks.faults.work import Ended, prepared_to_fail

LONGEST_SECONDS = 120.0
"""A process that takes longer hangs."""
_saved = mmap.mmap(-1, 8)  # shared with the forked processes


def steps_saved() -> int:
    """Steps of the last checkpoint that the last process said it had saved."""
    return int(struct.unpack("q", _saved[:8])[0])


def run_forked(
    arguments: Sequence[str],
    during: AbstractContextManager[None] | None = None,
    *,
    number: int = 0,
    after_seconds: float = 0.0,
) -> Ended:
    """Run a command in a process of its own.

    Args:
        arguments: those of the command `lm`.
        during: what surrounds the command in that process.
        number: a signal that it gets, 0 for none.
        after_seconds: when it gets it.

    Returns:
        The exit code, of a process that a signal has ended as a shell reports it, and stderr.
    """
    _note(0)
    with tempfile.TemporaryFile() as err:
        process = os.fork()
        if process == 0:
            _be(arguments, during, err.fileno())
        start = time.monotonic()
        if number:
            time.sleep(after_seconds)
            os.kill(process, number)
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            time.sleep(0.002)
            if time.monotonic() > start + LONGEST_SECONDS:
                os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1])
        err.seek(0)
        return Ended(128 - code if code < 0 else code, err.read().decode(errors="replace"))


def _be(arguments: Sequence[str], during: AbstractContextManager[None] | None, err: int) -> None:
    """Be the command from now on."""
    code = 1
    try:
        os.dup2(err, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout = os.fdopen(2, "w"), os.fdopen(1, "w")
        logging.getLogger().handlers.clear()
        sys.argv = ["lm", *arguments]
        with prepared_to_fail(_note):
            if during is None:
                command()
            else:
                with during:
                    command()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _note(steps: int) -> None:
    _saved[:8] = struct.pack("q", steps)
