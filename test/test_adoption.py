"""Classes that are given another parent where they stand."""

import sys
import types

import pytest

from torchcontinuous import ConfigurationError, ContinuousMixin, _adoption


@pytest.fixture
def copy(monkeypatch):
    """A class like stock's, whose subclasses are adopted."""

    made = []

    class Copy:
        def _start_processes(self, proc): ...
        def _join_processes(self, fn): ...
        def _run(self): ...
        def run_test(self): ...

        def __init_subclass__(cls, tag=None, **keywords):
            super().__init_subclass__(**keywords)
            made.append((cls.__name__, tag))

    monkeypatch.setitem(_adoption._adopted, Copy, (ContinuousMixin, Copy))
    Copy.made = made
    return Copy


def test_classes_made_before_and_after(copy):
    class Helper: ...

    class Before(Helper, copy): ...

    class Derived(Before): ...

    _adoption._follow(copy)

    class After(copy, tag="kept"): ...

    class Both(Derived, After): ...

    class Edited(ContinuousMixin, copy): ...

    assert Before.__bases__ == (Helper, ContinuousMixin, copy)
    assert Derived.__bases__ == (Before,)
    assert After.__bases__ == (ContinuousMixin, copy)
    assert Edited.__bases__ == (ContinuousMixin, copy)
    assert Both.__mro__.index(ContinuousMixin) < Both.__mro__.index(copy)
    assert copy.made[2:] == [("After", "kept"), ("Both", None), ("Edited", None)]
    assert all(map(_adoption.is_adopted, (Before, Derived, After, Both, Edited)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Copy", "Give package.module.Class"),
        ("nosuch_module.Copy", "ModuleNotFoundError"),
        ("copied_for_test.Nosuch", "AttributeError"),
        ("copied_for_test.Plain", "it lacks _start_processes, _join_processes, _run, run_test"),
    ],
)
def test_a_base_that_is_none(name, words, monkeypatch):
    module = types.ModuleType("copied_for_test")
    module.Plain = type("Plain", (), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigurationError, match=words):
        _adoption._find(name)
