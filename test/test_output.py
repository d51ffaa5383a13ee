"""Captured output: head and tail, what belongs to whom, replay with ranks."""

import io
import os
import threading

import pytest

from torchcontinuous import _output
from torchcontinuous._output import Capture, HeadAndTail, replay


def test_short_output_is_kept_whole():
    kept = HeadAndTail(10)
    kept.add(b"12345")
    kept.add(b"67890")
    assert kept.take() == b"1234567890"
    assert kept.take() == b""


@pytest.mark.parametrize("chunk", [1, 3, 7, 10, 1000])
def test_long_output_keeps_head_and_tail_and_counts_the_rest(chunk):
    data = bytes(i % 251 for i in range(1000))
    kept = HeadAndTail(10)
    for start in range(0, len(data), chunk):
        kept.add(data[start : start + chunk])
    assert kept.take() == data[:10] + b"\n[... 980 bytes cut ...]\n" + data[-10:]


def test_memory_is_bounded():
    kept = HeadAndTail(1000)
    for _ in range(10_000):
        kept.add(b"x" * 1000)
    assert len(kept._head) + sum(map(len, kept._tail)) <= 4000


def test_drain_takes_what_is_there_and_no_more():
    capture = Capture()
    try:
        assert capture.drain()
        os.write(capture.write_end, b"one\n")
        assert capture.drain()
        os.write(capture.write_end, b"two\n")
        assert capture.take() == b"one\n"
        capture.drain()
        assert capture.take() == b"two\n"
        capture.close_write_end()
        assert not capture.drain()
    finally:
        capture.close()


def test_a_writer_without_end_does_not_hold_drain_up():
    capture = Capture()
    stop = threading.Event()

    def write():
        try:
            while not stop.is_set():
                os.write(capture.write_end, b"x" * 65536)
        except OSError:
            return

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        for _ in range(50):
            capture.drain()
    finally:
        stop.set()
        capture.drain()
        writer.join(5)
        capture.close()
    assert not writer.is_alive()
    assert len(capture.take()) <= 2 * _output.KEPT_BYTES + 100


def test_replay_prefixes_each_line():
    stream = io.StringIO()
    replay(2, b"one\ntwo", stream)
    assert stream.getvalue() == "[rank 2] one\n[rank 2] two\n"
    replay(2, b"", stream)
    assert stream.getvalue().count("\n") == 2


def test_replay_of_what_is_no_text():
    stream = io.StringIO()
    replay(0, b"\xff\x00ok\n", stream)
    assert "ok" in stream.getvalue()
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="ascii")
    replay(0, "é\n".encode(), narrow)
    narrow.flush()
    assert raw.getvalue() == b"[rank 0] \\xe9\n"
