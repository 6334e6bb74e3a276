"""Signals that stop training: recorded, so that the loop writes a checkpoint first."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import torch

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,  # Ctrl-C
    signal.SIGHUP,  # a closed terminal; ignored under `nohup`
    signal.SIGUSR1,  # these, before the end of a job's time, are sent by batch systems
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGALRM,
)


class Interrupted(SystemExit):
    """A signal ended the run; the exit code is 128 + the number of the signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)


class Stopped(Exception):
    """A signal ends what is being computed, but not yet the run."""


class StopSignals:
    """Records the first of `SIGNALS` inside a `with` block; a second one raises `Interrupted`.

    Ignored signals stay so, except SIGINT, which shells ignore in the background. Python delivers
    none outside the main thread.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._processes: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._record)
                for number in SIGNALS
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self) -> int | None:
        """The signal that any process has received, so that all stop at the same step, or None."""
        if not torch.distributed.is_initialized():
            return self._received
        if self._processes is None:  # on the CPU, which receives the signals, whatever the devices
            self._processes = torch.distributed.new_group(backend="gloo")
        number = torch.tensor(self._received or 0)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self._processes)
        return int(number) or None

    def check(self) -> None:
        """Raises `Stopped` if any process has received a signal."""
        if self.agreed() is not None:
            raise Stopped

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise Interrupted(number)
        self._received = number
