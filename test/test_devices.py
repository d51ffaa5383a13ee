"""Accelerators: kinds of device are named in one module; ranks are bound to devices in turn."""

import re
from pathlib import Path

import pytest
import torch

import torchcontinuous
from torchcontinuous import _devices

PACKAGE = Path(torchcontinuous.__file__).parent


def test_kinds_are_named_in_one_module():
    named = re.compile(r"cuda|\bxpu\b|\bhpu\b|\bmtia\b|HIP_|ROCR_", re.IGNORECASE)
    found = {p.name for p in PACKAGE.rglob("*.py") if named.search(p.read_text())}
    assert found - {"_devices.py"} == set()


class Devices:
    """Stands for a kind of device, of which there are some."""

    def __init__(self, monkeypatch, number, kind="cuda"):
        self.bound = []
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.bound.append)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self)
        self.device_count = lambda: number


def test_ranks_share_the_devices_there_are(monkeypatch):
    devices = Devices(monkeypatch, 3)
    for rank in range(5):
        _devices.bind(rank, "cuda")
    assert devices.bound == [0, 1, 2, 0, 1]
    assert [_devices.local_index(rank, "cuda") for rank in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("number", "present", "wanted"), [(3, "cuda", "cpu"), (0, "cuda", "cuda"), (1, None, "cpu")]
)
def test_nothing_is_bound_without_a_device(monkeypatch, number, present, wanted):
    devices = Devices(monkeypatch, number, present)
    _devices.bind(1, wanted)
    assert devices.bound == []
    assert _devices.local_index(5, wanted) == 5


def test_seeds_for_absent_devices_are_passed_over_for_the_time_of_a_test():
    absent = _devices._absent()
    before = [module.manual_seed_all for module in absent]
    with _devices.absent_skipped():
        assert all(module.manual_seed_all is _devices._seed_nothing for module in absent)
        torch.manual_seed(1)
    assert [module.manual_seed_all for module in absent] == before
    if not torch.cuda._is_compiled():
        assert torch.cuda in absent


def test_a_device_that_is_not_initialised_is_not_touched(monkeypatch):
    class Kind:
        default_generators = (object(), object())
        initialized = False

        @classmethod
        def is_initialized(cls):
            return cls.initialized

        @classmethod
        def memory_allocated(cls):
            assert cls.initialized
            return 10

    monkeypatch.setattr(torch, "xpu", Kind)
    assert (_devices.generators(), _devices.allocated_memory()) == ((), 0)
    Kind.initialized = True
    assert (_devices.generators(), _devices.allocated_memory()) == (Kind.default_generators, 10)
