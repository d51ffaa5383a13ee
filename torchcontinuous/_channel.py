"""Send and receive messages on one connection, every wait with a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from torchcontinuous.errors import ChannelError

#: No message is near this; a corrupt length is.
MAX_MESSAGE_BYTES = 256 << 20

#: A peer that stops in the middle of a message, or does not read its commands, is given up.
STALL_SECONDS = 5.0

#: Descriptors that go with one message, at most.
_MAX_DESCRIPTORS = 8


class Channel:
    """Messages over one duplex connection.

    It remembers which file its descriptor is: a test that closes every descriptor lets the number
    be used again, and a reply written there would go into somebody's file.

    Args:
        stall: seconds after which a peer that stops within a message, or does not read, is given
            up. None (in a worker) waits: its parent may be busy in a test's setUp.
    """

    def __init__(self, connection: Connection[Any, Any], stall: float | None = None) -> None:
        self._connection = connection
        self._identity = self._stat()
        if stall is not None and sys.platform != "win32":
            limit = struct.pack("ll", int(stall), 0)
            with socket.socket(fileno=os.dup(connection.fileno())) as view:
                view.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _stat(self) -> tuple[int, int]:
        if sys.platform == "win32":
            return (0, 0)
        status = os.fstat(self._connection.fileno())
        return status.st_dev, status.st_ino

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._connection.fileno()

    @property
    def connection(self) -> Connection[Any, Any]:
        """The connection itself, to wait on together with others."""
        return self._connection

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._connection.closed

    def send(self, message: object) -> None:
        """Send; ChannelError if the peer is gone or has not read for STALL_SECONDS."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that is pickled already (to several ranks)."""
        try:
            if self._stat() != self._identity:
                raise ChannelError("the descriptor now belongs to another file")
            self._connection.send_bytes(data)
        except (OSError, ValueError) as error:
            raise ChannelError(f"cannot send: {error}") from error

    def receive(self, deadline: float) -> Any:
        """The next message; EOFError if the peer has closed.

        Args:
            deadline: on ``time.monotonic()``'s clock, seconds; ``math.inf`` waits for ever (within
                a message no longer than the stall limit), or takes what is known to be there.

        Raises:
            TimeoutError: nothing came in time.
            ChannelError: what came cannot be read, or the peer stalled within a message.
        """
        try:
            if deadline < math.inf:
                left = max(0.0, deadline - time.monotonic())
                # wait(), not poll(): it takes a long time-out on every platform.
                if not wait([self._connection], left):
                    raise TimeoutError("no message came in time")
            data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, TimeoutError):
            raise
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        except OSError as error:
            raise ChannelError(f"cannot receive: {error}") from error
        try:
            return pickle.loads(data)
        except Exception as error:
            raise ChannelError(f"unreadable message of {len(data)} bytes: {error}") from error

    def send_descriptors(self, descriptors: list[int]) -> None:
        """Hand open descriptors over (one machine only); the peer gets copies."""
        with socket.socket(fileno=os.dup(self.fileno())) as view:
            try:
                socket.send_fds(view, [b"d"], descriptors)
            except OSError as error:
                raise ChannelError(f"cannot hand over descriptors: {error}") from error

    def receive_descriptors(self, count: int) -> list[int]:
        """Take ``count`` descriptors that the peer hands over next."""
        with socket.socket(fileno=os.dup(self.fileno())) as view:
            try:
                _, descriptors, _, _ = socket.recv_fds(view, 1, _MAX_DESCRIPTORS)
            except OSError as error:
                raise ChannelError(f"no descriptors came: {error}") from error
        if len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelError(f"{len(descriptors)} descriptors came instead of {count}")
        return list(descriptors)

    def close(self) -> None:
        """Close this end; harmless when repeated."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):  # A test closed the descriptor under us.
            self._connection.close()
