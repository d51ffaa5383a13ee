"""The channel, both ends in memory of one process."""

import math
import os
import threading
import time
from multiprocessing import Pipe

import pytest

from torchcontinuous._channel import Channel
from torchcontinuous._messages import Exit
from torchcontinuous.errors import ChannelError


@pytest.fixture
def pair():
    ours, theirs = Pipe()
    channels = Channel(ours, 1.0), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def soon():
    return time.monotonic() + 5


def test_messages_arrive_in_order(pair):
    one, other = pair
    one.send(Exit(full=True))
    one.send("second")
    assert other.receive(soon()) == Exit(full=True)
    assert other.receive(math.inf) == "second"


def test_deadline(pair):
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        pair[0].receive(began + 0.1)
    assert 0.1 <= time.monotonic() - began < 5


def test_passed_deadline_still_takes_what_is_there(pair):
    pair[1].send(1)
    assert pair[0].receive(time.monotonic() - 1) == 1


def test_closed_peer_is_the_end(pair):
    pair[1].send("last")
    pair[1].close()
    assert pair[0].receive(soon()) == "last"
    with pytest.raises(EOFError):
        pair[0].receive(soon())
    with pytest.raises(ChannelError):
        pair[0].send("x")


def test_unreadable_message(pair):
    pair[1].send_bytes(b"no pickle")
    with pytest.raises(ChannelError, match="unreadable"):
        pair[0].receive(soon())


def test_absurd_length(pair):
    os.write(pair[1].fileno(), b"\x7f\xff\xff\xff")
    with pytest.raises(ChannelError):
        pair[0].receive(soon())


def test_peer_that_stalls_within_a_message(pair):
    os.write(pair[1].fileno(), b"\x00\x00\x00\x10half")
    began = time.monotonic()
    with pytest.raises(ChannelError):
        pair[0].receive(began + 60)
    assert time.monotonic() - began < 10


def test_peer_that_does_not_read(pair):
    with pytest.raises(ChannelError):
        pair[0].send_bytes(b"x" * 100_000_000)


def test_a_worker_waits_for_its_parent_to_read(pair):
    big = "x" * 3_000_000
    sender = threading.Thread(target=pair[1].send, args=(big,))
    sender.start()
    time.sleep(1.2)  # Longer than the other end's stall limit.
    assert pair[0].receive(soon()) == big
    sender.join(5)


def test_descriptor_that_became_another_file(pair, tmp_path):
    fd = pair[0].fileno()
    with open(tmp_path / "file", "w") as file:
        saved = os.dup(fd)
        os.dup2(file.fileno(), fd)
        with pytest.raises(ChannelError, match="another file"):
            pair[0].send("x")
        os.dup2(saved, fd)
        os.close(saved)
    assert (tmp_path / "file").read_bytes() == b""


def test_descriptors_are_handed_over(pair):
    read, write = os.pipe()
    pair[0].send("look")
    pair[0].send_descriptors([write])
    os.close(write)
    assert pair[1].receive(soon()) == "look"
    (copy,) = pair[1].receive_descriptors(1)
    os.write(copy, b"hello")
    os.close(copy)
    assert os.read(read, 10) == b"hello"
    os.close(read)
