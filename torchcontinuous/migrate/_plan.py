"""What is to be changed in a project: which classes, in which file, to what level; or back."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchcontinuous.migrate import _files, _judge, _table
from torchcontinuous.migrate._edit import ClassEdit, edited
from torchcontinuous.migrate._files import BadInputError
from torchcontinuous.migrate._imports import ImpossibleError, Reference, isolated_decorators
from torchcontinuous.migrate._judge import Judgement, Sign, strictest
from torchcontinuous.migrate._module import ClassDef, Module
from torchcontinuous.migrate._project import Ours, Project, Unclear
from torchcontinuous.migrate._spawning import calls_super, starts_nothing, surely
from torchcontinuous.migrate._table import OURS, Stock

#: Names that mean something to torchcontinuous on any test class.
_TAKEN = ("isolation", "guard", "compile_cache_per_rank")

#: How torch's own continuous class goes about it: ours goes about it otherwise.
_WORKINGS = frozenset(
    {"_ensure_processes_spawned", "_processes_spawned", "_spawn_processes", "_worker_loop"}
    | {"_run_test_given_id", "_worker_run_main_wait", "_get_world_size"}
    | {"poison_pill", "task_queues", "completion_queues"}
)

_FUNCTION = "<locals>"


@dataclass
class Verdict:
    """What becomes of one class.

    Attributes:
        level: ``"none"``, ``"group"``, ``"process"``: how its workers are shared; None if it is
            not migrated.
        refusals: why it is not.
        judgement: what its own text says.
        roots: the classes of the project that it gets torch's class from; itself, maybe.
        signs: what the level rests on, of its own and of what it derives from.
    """

    found: ClassDef
    level: str | None
    refusals: list[Sign]
    judgement: Judgement
    roots: list[ClassDef]
    signs: list[Sign] = field(default_factory=list)


@dataclass
class Plan:
    """The changes to a project.

    Attributes:
        verdicts: of each class, in the order of files and lines.
        texts: by file, its text afterwards.
        bad: files and classes that could not be worked on.
    """

    verdicts: list[Verdict]
    texts: dict[Path, str]
    bad: list[BadInputError]


class Migration:
    """Decides on a project's classes.

    Args:
        levels: by class (file and name), a level that running it has shown to be needed.
        reverted: classes that running them has shown to be better left alone.
    """

    def __init__(
        self,
        project: Project,
        levels: Mapping[tuple[Path, str], str] | None = None,
        reverted: Iterable[tuple[Path, str]] = (),
    ) -> None:
        self._project = project
        self._levels = dict(levels or {})
        self._reverted = set(reverted)
        self._tests = project.tests()
        self._judgements = {found: _judge.judge(found) for found in self._tests}
        self._locked = {
            module.path: error
            for module in {found.module for found in self._tests if self._stock(found)}
            for error in [_locked(module.path)]
            if error is not None
        }

    def plan(self) -> Plan:
        """The changes."""
        refusals = self._refusals()
        edits: dict[Module, dict[ClassDef, ClassEdit]] = {}
        for found in self._tests:
            edit = self._edit(found, refusals)
            if edit:
                edits.setdefault(found.module, {})[found] = edit
        texts, bad = texts_after(self._project, edits)
        bad += [e for path, e in self._locked.items() if path in self._project.given]
        verdicts = [self._verdict(found, refusals) for found in self._tests]
        return Plan([v for v in verdicts if v.roots or v.refusals], texts, bad)

    # Which classes

    @functools.cached_property
    def _roots(self) -> dict[ClassDef, list[ClassDef]]:
        """By class, those of its ancestry that derive from a class of torch's directly."""
        direct = {found for found in self._tests if self._stock(found)}
        return {
            found: [one for one in self._project.ancestry(found) if one in direct]
            for found in self._tests
        }

    def _stock(self, found: ClassDef) -> dict[int, Stock]:
        """The classes of torch's among a class's bases, by position."""
        return {
            position: target
            for position, targets in enumerate(self._project.targets(found))
            for target in targets
            if isinstance(target, Stock)
        }

    def _refusals(self) -> dict[ClassDef, list[Sign]]:
        """Why classes are not migrated: for reasons of their own, and with them what they derive
        from and what derives from them. Their siblings get the mixin each, where there is one."""
        own = {found: list(self._own_refusals(found)) for found in self._tests}
        refusals = {found: list(signs) for found, signs in own.items()}
        for found in self._tests:
            for one in self._project.ancestry(found)[1:]:
                if own.get(one) and not refusals[found]:
                    refusals[found] = [_because(own[one][0], "derives from", one)]
                if own[found] and one in refusals:
                    why = f"{found.name} derives from it, and cannot be migrated"
                    refusals[one] = refusals[one] or [dataclasses.replace(own[found][0], text=why)]
        for found in self._tests:
            for root in self._roots[found]:
                has_mixin = all(stock.style == "stock" for stock in self._stock(root).values())
                if refusals[root] and not refusals[found] and not has_mixin:
                    refusals[found] = [_because(refusals[root][0], "derives from", root)]
        return refusals

    def _own_refusals(self, found: ClassDef) -> Iterator[Sign]:
        def sign(text: str, line: int | None = None) -> Sign:
            return Sign(found.module.path, line or found.line, text)

        for targets in self._project.targets(found):
            for target in targets:
                if isinstance(target, Unclear):
                    yield sign(target.reason)
                elif isinstance(target, Stock) and target.refused:
                    yield sign(target.refused)
        if (found.module.path, found.name) in self._reverted:
            yield sign("its tests differ from stock at every level")
        if not self._roots[found]:
            return
        if self._stock(found):
            if found.module.path not in self._project.given:
                yield sign("its file is not among those given")
            elif found.module.path in self._locked:
                yield sign("its file is read-only")
        if _FUNCTION in found.name:
            yield sign("it is defined in a function, where workers cannot find it")
        for name in _TAKEN:
            if name in found.bound and not _is_meant(found, name):
                yield sign(f"it has a name of torchcontinuous's for something else: {name}")
        for name in ("_start_processes", "_fork_processes"):
            method = found.methods.get(name)
            if method is not None and not calls_super(method, name):
                yield sign(f"it starts processes its own way ({name})", method.lineno)
        if starts_nothing(found) is False:
            line = found.methods["_spawn_processes"].lineno
            yield sign("it starts processes its own way (_spawn_processes)", line)
        yield from self._class_style_refusals(found)

    def _class_style_refusals(self, found: ClassDef) -> Iterator[Sign]:
        path = found.module.path
        stocks = [stock for root in self._roots[found] for stock in self._stock(root).values()]
        if any(stock.style == "class" for stock in stocks):
            for node in ast.walk(found.code):
                name = getattr(node, "attr", None) or getattr(node, "name", None)
                if name in _WORKINGS and isinstance(node, (ast.expr, ast.stmt)):
                    text = f"it changes how torch's own continuous class works ({name})"
                    yield Sign(path, node.lineno, text)
                    break
        if any(stock.world_size for stock in stocks):
            for node in ast.walk(found.module.code):
                if isinstance(node, ast.Attribute) and node.attr == "run_rank":
                    text = "the file starts its ranks itself (run_rank): use run_tests()"
                    yield Sign(path, node.lineno, text)
                    break

    # How each is changed

    def _edit(self, found: ClassDef, refusals: Mapping[ClassDef, list[Sign]]) -> ClassEdit:
        edit = ClassEdit()
        if refusals[found] or not self._roots[found]:
            return edit
        for position, stock in self._stock(found).items():
            if self._is_covered(found, position, stock):
                continue
            if stock.replacement is None or (
                stock.name == "MultiProcessTestCase" and not self._all_spawn(found)
            ):
                edit.mixin = edit.mixin or (position, Reference(OURS, _table.MIXIN))
            else:
                edit.replaced[position] = Reference(OURS, stock.replacement)
            if stock.world_size is not None and not self._says(found, "world_size"):
                edit.attributes["world_size"] = str(stock.world_size)
        parent = self._parent_on_stock(found, refusals)
        if parent is not None and not edit.replaced and not edit.mixin:
            edit.mixin = (parent, Reference(OURS, _table.MIXIN))
        level = self._own_level(found, refusals)
        inherited = self._inherited_level(found, refusals)
        if level not in ("none", inherited, _level_said(found)):
            edit.attributes["isolation"] = f'"{level}"'
            edit.removed.update({"isolation"} & found.bound)
        for name, wanted in self._judgements[found].test_levels.items():
            above = strictest([level, inherited])
            is_higher = strictest([wanted, above]) != above
            if is_higher and name in found.methods and not isolated_decorators(found, name):
                edit.decorated[name] = wanted
        return edit

    def _is_covered(self, found: ClassDef, position: int, stock: Stock) -> bool:
        """Whether another base brings what this one would be replaced by, or has done so."""
        ours = {
            target.name
            for targets in self._project.targets(found)
            for target in targets
            if isinstance(target, Ours)
        }
        if stock.name != "MultiProcessTestCase":
            return _table.MIXIN in ours
        others = [other for other in self._stock(found) if other != position]
        parents = [one for one in self._project.parents(found) if self._project.is_test(one)]
        return bool(ours or others or parents)

    def _parent_on_stock(
        self, found: ClassDef, refusals: Mapping[ClassDef, list[Sign]]
    ) -> int | None:
        """The position of a base of the project's that stays on stock, if none of the others
        brings the mixin: then this class has to."""
        position = None
        for number, targets in enumerate(self._project.targets(found)):
            for target in targets:
                if isinstance(target, Ours):
                    return None
                if isinstance(target, ClassDef) and self._roots.get(target):
                    if not refusals[target]:
                        return None
                    position = number if position is None else position
        return position

    def _own_level(self, found: ClassDef, refusals: Mapping[ClassDef, list[Sign]]) -> str:
        """The level that a class has to say itself: also for what it has of classes on stock."""
        raised = self._levels.get((found.module.path, found.name), "none")
        own = self._judgements[found].level
        if any(stock.rpc for stock in self._stock(found).values()):
            own = "none"  # What replaces it is at that level.
        above = []
        for one in self._lineage(found)[1:] if not refusals[found] else ():
            if refusals[one]:
                judgement = self._judgements[one]
                above += [judgement.level, *judgement.test_levels.values()]
        return strictest([own, raised, *above])

    def _inherited_level(self, found: ClassDef, refusals: Mapping[ClassDef, list[Sign]]) -> str:
        lineage = self._lineage(found)
        levels = [self._own_level(one, refusals) for one in lineage[1:] if not refusals[one]]
        rpc = any(stock.rpc for one in lineage for stock in self._stock(one).values())
        return strictest([*levels, "process" if rpc else "none"])

    def _lineage(self, found: ClassDef) -> list[ClassDef]:
        """A class and those that it derives from, as far as they are looked at here."""
        return [one for one in self._project.ancestry(found) if one in self._judgements]

    def _says(self, found: ClassDef, name: str) -> bool:
        return any(name in one.bound for one in self._project.ancestry(found))

    # Whether the processes start in setUp

    def _all_spawn(self, root: ClassDef) -> bool:
        """Whether all classes with tests under a root start their processes: if they do not, stock
        runs no rank at all, but our class would be of class style and run them."""
        with_tests = [
            found
            for found in self._tests
            if root in self._roots[found]
            and (
                any(one.tests for one in self._project.ancestry(found))
                or starts_nothing(found) is not None
            )
        ]
        return all(self._spawns(found) for found in with_tests)

    def _spawns(self, found: ClassDef) -> bool:
        ancestry = self._project.ancestry(found)
        if any(starts_nothing(one) for one in ancestry):
            return False
        for one in ancestry:
            method = one.methods.get("setUp")
            if method is not None:
                if surely(method, "_spawn_processes", ancestry):
                    return True
                if not calls_super(method, "setUp"):
                    return False
        return any(
            stock.spawns
            for one in ancestry
            if one in self._judgements
            for stock in self._stock(one).values()
        )

    # What is told

    def _verdict(self, found: ClassDef, refusals: Mapping[ClassDef, list[Sign]]) -> Verdict:
        judgement = self._judgements[found]
        signs = [sign for one in self._lineage(found) for sign in self._judgements[one].signs]
        level: str | None = strictest(
            [self._own_level(found, refusals), self._inherited_level(found, refusals)]
        )
        if refusals[found]:
            level = None
        signs = list(dict.fromkeys(signs))
        return Verdict(found, level, refusals[found], judgement, self._roots[found], signs)


def _locked(path: Path) -> BadInputError | None:
    try:
        _files.check_writable(path)
    except BadInputError as error:
        return error
    return None


def texts_after(
    project: Project, edits: Mapping[Module, Mapping[ClassDef, ClassEdit]]
) -> tuple[dict[Path, str], list[BadInputError]]:
    """The texts of the files given, afterwards; and what could not be worked on."""
    bad = list(project.bad)
    texts: dict[Path, str] = {}
    for module, changes in edits.items():
        if module.path not in project.given:
            continue
        error = _locked(module.path)
        if error is not None:
            bad.append(error)
            continue
        try:
            texts[module.path] = edited(module, changes, project.imported_from(module))
        except ImpossibleError as impossible:
            bad.append(BadInputError(module.path, str(impossible), next(iter(changes)).line))
    return texts, bad


def _because(sign: Sign, how: str, other: ClassDef) -> Sign:
    if sign.text.startswith("it derives from"):
        return sign
    return dataclasses.replace(sign, text=f"it {how} {other.name}: {sign.text}")


def _level_said(found: ClassDef) -> str | None:
    """The isolation level that a class says already."""
    for node in found.code.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "isolation":
            value = getattr(node.value, "value", None)
            return value if isinstance(value, str) else None
    return None


def _is_meant(found: ClassDef, name: str) -> bool:
    """Whether an attribute with a name of torchcontinuous's has a value of the kind it is for."""
    for node in found.code.body:
        is_it = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        if isinstance(node, ast.Assign) and is_it:
            value = getattr(node.value, "value", None)
            if name == "isolation":
                return value in _judge.LEVELS
            return isinstance(value, bool) or (
                name == "guard" and isinstance(node.value, (ast.Dict, ast.Call, ast.Name))
            )
    return False
