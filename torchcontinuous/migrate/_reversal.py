"""The way back: from torchcontinuous's classes to torch's."""

from __future__ import annotations

from torchcontinuous.migrate import _table
from torchcontinuous.migrate._edit import ClassEdit
from torchcontinuous.migrate._imports import Reference, isolated_decorators
from torchcontinuous.migrate._module import ClassDef, Module
from torchcontinuous.migrate._plan import Plan, texts_after
from torchcontinuous.migrate._project import Ours, Project
from torchcontinuous.migrate._spawning import calls_self


class Reversal:
    """The way back: from torchcontinuous's classes to torch's."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def plan(self) -> Plan:
        """The changes."""
        edits: dict[Module, dict[ClassDef, ClassEdit]] = {}
        for found in self._project.tests():
            edit = self._edit(found)
            if edit:
                edits.setdefault(found.module, {})[found] = edit
        texts, bad = texts_after(self._project, edits)
        return Plan([], texts, bad)

    def _edit(self, found: ClassDef) -> ClassEdit:
        edit = ClassEdit()
        bases = self._project.targets(found)
        for position, targets in enumerate(bases):
            for target in targets:
                if not isinstance(target, Ours):
                    continue
                if target.name == _table.MIXIN:
                    edit.dropped.add(position)
                    continue
                stock = _table.stands_for(target.name, self._spawned(found))
                if stock is not None:
                    edit.replaced[position] = Reference(stock.module, stock.name)
        if self._is_ours(found):
            if "isolation" in found.bound:
                edit.removed.add("isolation")
            edit.undecorated = {n for n in found.methods if isolated_decorators(found, n)}
        return edit

    def _is_ours(self, found: ClassDef) -> bool:
        return any(
            isinstance(target, Ours)
            for one in self._project.ancestry(found)
            for targets in self._project.targets(one)
            for target in targets
        )

    def _spawned(self, found: ClassDef) -> bool:
        """Whether a class, or one that derives from it, is of stock style."""
        return any(
            calls_self(method, "_spawn_processes")
            for one in [
                found,
                *(c for c in self._project.tests() if found in self._project.ancestry(c)),
            ]
            for other in self._project.ancestry(one)
            for method in other.methods.values()
        )
