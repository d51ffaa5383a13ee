"""A worker's output: captured for each rank at descriptor level, replayed by the parent.

A pipe is read in the parent while it waits for the test, and once more after the rank's report:
what the test wrote lies in the pipe before its report is sent, so that what can be read then, and
no more, is the test's. (Children of the test may keep the pipe open: there is no end-of-file to
wait for.)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from typing import TextIO

if sys.platform != "win32":
    import array
    import fcntl
    import termios

#: Bytes kept of each stream of each rank, at its head and again at its tail.
KEPT_BYTES = 256 << 10

#: Wished size of a pipe: what a test may write while the parent is busy elsewhere (in setUp).
PIPE_BYTES = 1 << 20


class HeadAndTail:
    """Bytes of which only the first and the last ``limit`` are kept, and the rest counted."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._cut = 0

    def add(self, data: bytes) -> None:
        """Append ``data``."""
        room = self._limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data[-self._limit :])
        self._cut += max(0, len(data) - self._limit)
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= self._limit:
            dropped = len(self._tail.popleft())
            self._tail_bytes -= dropped
            self._cut += dropped

    def take(self) -> bytes:
        """What was kept, with a line that says how much was cut; and start anew."""
        if not self._head:
            return b""
        tail = b"".join(self._tail)
        cut = self._cut + max(0, len(tail) - self._limit)
        data = bytes(self._head)
        if cut:
            data += b"\n[... %d bytes cut ...]\n" % cut
        data += tail[-self._limit :]
        self.__init__(self._limit)  # type: ignore[misc]
        return data


class Capture:
    """The parent's end of one output pipe of one rank."""

    def __init__(self) -> None:
        self.descriptor, self.write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            # A user's share of pipe memory may be used up: the default size does, too.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._kept = HeadAndTail()

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.descriptor

    def drain(self) -> bool:
        """Read what lies in the pipe now; False at its end (every writer is gone)."""
        try:
            data = os.read(self.descriptor, max(self._available(), 1))
        except BlockingIOError:
            return True
        self._kept.add(data)
        return bool(data)

    def _available(self) -> int:
        available = array.array("i", [0])
        fcntl.ioctl(self.descriptor, termios.FIONREAD, available)
        return available[0]

    def take(self) -> bytes:
        """What was captured since the last time."""
        return self._kept.take()

    def close_write_end(self) -> None:
        """Close the parent's copy of the worker's end."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


#: The descriptor for what must not wait until a test has ended: a runner that captures what tests
#: write puts its own copy of the real one here.
terminal = 2


def redirect(stdout: int, stderr: int) -> None:
    """In a worker: let descriptors 1 and 2, to which Python's streams write, be these."""
    flush()
    for descriptor, target in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)


def flush() -> None:
    """Flush Python's standard streams, whatever a test has put there."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # Closed, or not a stream at all.
            stream.flush()


def replay(rank: int, data: bytes, stream: TextIO) -> None:
    """Write a rank's output to ``stream``, each line with its rank."""
    if not data:
        return
    lines = data.decode("utf-8", errors="backslashreplace").splitlines()
    text = "".join(f"[rank {rank}] {line}\n" for line in lines)
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
