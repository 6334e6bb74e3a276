"""Standard input whose writer may wait for answers: a pipe or a terminal."""

import io
import os
import select
import sys
from typing import Any, Self

PAUSE_SECONDS = 0.02
"""A writer that is busy sends the next line within this time."""


class ArrivingLines(io.RawIOBase):
    """The bytes of a file descriptor, at most one line at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._begin, self._received, self._ended = descriptor, 0, b"", False

    @classmethod
    def of_stdin(cls) -> Self | None:
        """Make `sys.stdin` read from here; None if it is a file, which does not wait."""
        stdin: Any = sys.stdin
        if not isinstance(getattr(stdin, "buffer", None), io.BufferedReader) or stdin.seekable():
            return None
        found = cls(stdin.fileno())
        sys.stdin = io.TextIOWrapper(io.BufferedReader(found))
        return found

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, up to the end of a line; returns the number of bytes, 0 at the end."""
        while not self._has_line():
            self._receive()
        end = self._received.find(b"\n", self._begin) + 1 or len(self._received)
        line = self._received[self._begin : min(end, self._begin + len(buffer))]
        self._begin += len(line)
        buffer[: len(line)] = line
        return len(line)

    def is_waiting(self) -> bool:
        """Whether the next line is incomplete, and the writer sends nothing for a while."""
        while not self._has_line() and select.select([self._descriptor], [], [], PAUSE_SECONDS)[0]:
            self._receive()
        return not self._has_line()

    def _has_line(self) -> bool:
        return self._ended or self._received.find(b"\n", self._begin) >= 0

    def _receive(self) -> None:
        more = os.read(self._descriptor, 1 << 16)
        self._received, self._begin = self._received[self._begin :] + more, 0
        self._ended = not more
