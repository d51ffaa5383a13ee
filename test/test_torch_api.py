"""torch's private names, put to use."""

import subprocess
import sys


def test_stock_starts_no_thread_for_a_listener_that_hears_nothing():
    """In workers: run in a process of its own, since it changes stock."""
    code = (
        "from torchcontinuous import _torch_api as api\n"
        "api.silence_event_listener()\n"
        "import threading, sys\n"
        "stock = sys.modules[api.STOCK_MODULE]\n"
        "class T(api.stock_test_case()):\n"
        "    def test_it(self):\n"
        "        assert threading.active_count() == 1\n"
        "        seen.append(1)\n"
        "        worker = stock.threading.Thread(target=seen.append, args=(2,))\n"
        "        worker.start(); worker.join()\n"
        "seen = []\n"
        "class Pipe:\n"
        "    def close(self): pass\n"
        "T._run(0, 'test_it', '', Pipe())\n"
        "print(seen)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert told.stdout.endswith("[1, 2]\n"), told
