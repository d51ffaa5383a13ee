"""Classes that are given another parent where they stand."""

import contextlib
import sys
import types

import pytest

from torchcontinuous import ConfigurationError, ContinuousMixin, _adoption

MIXIN = _adoption._AdoptedMixin


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

    monkeypatch.setitem(_adoption._adopted, Copy, (MIXIN, Copy))
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

    class EditedToo(ContinuousMixin, After): ...

    assert Before.__bases__ == (Helper, MIXIN, copy)
    assert Derived.__bases__ == (Before,)
    assert After.__bases__ == (MIXIN, copy)
    assert Edited.__bases__ == (ContinuousMixin, copy)
    assert EditedToo.__bases__ == (After,)
    assert Both.__mro__.index(MIXIN) < Both.__mro__.index(copy)
    made = [("After", "kept"), ("Both", None), ("Edited", None), ("EditedToo", None)]
    assert copy.made[2:] == made
    classes = (Before, Derived, After, Both, Edited, EditedToo)
    assert all(map(_adoption.is_adopted, classes))


def test_the_mixin_of_adopted_classes_has_a_super_of_its_own():
    class Base:
        def subTest(self, *arguments, **keywords):
            return contextlib.nullcontext()

    class Test(MIXIN, Base):
        rank = MAIN_PROCESS_RANK = -1

    with Test().subTest("of a decorated function"):
        pass


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
