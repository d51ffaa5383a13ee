"""The classes of a project, and what they derive from, across its files."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from torchcontinuous.migrate import _files
from torchcontinuous.migrate._files import BadInputError, Text
from torchcontinuous.migrate._module import ClassDef, Module, Names, dotted
from torchcontinuous.migrate._table import OURS, Stock, Table


@dataclass(frozen=True)
class Ours:
    """A class of torchcontinuous."""

    name: str


@dataclass(frozen=True)
class Unclear:
    """A base that could be one of those looked for, but cannot be followed."""

    reason: str


#: The package whose classes are in the table, and not looked into.
_TORCH = "torch"

Target = ClassDef | Stock | Ours | Unclear


class Project:
    """What is known of the files given, and of those that they import.

    Attributes:
        bad: files that could not be worked on.
        given: the files that may be changed.

    Args:
        texts: of files that are not to be read, since they have been changed.
    """

    def __init__(
        self, paths: Sequence[Path], table: Table, texts: Mapping[Path, Text] | None = None
    ) -> None:
        self.given = list(paths)
        self._texts = texts or {}
        self.bad: list[BadInputError] = []
        self._table = table
        self._modules: dict[Path, Module | None] = {}
        self._targets: dict[int, list[Target]] = {}
        self._busy: set[tuple[Path, str]] = set()
        self._used_from: dict[Path, set[str]] = {}
        self._parse_relevant()

    # Files

    def module(self, path: Path) -> Module | None:
        """A parsed file; None if that could not be done."""
        if path not in self._modules:
            self._modules[path] = None
            try:
                self._modules[path] = Module(path, self._read(path))
            except BadInputError as error:
                self.bad.append(error)
        return self._modules[path]

    def _read(self, path: Path) -> Text:
        return self._texts[path] if path in self._texts else _files.read(path)

    @property
    def modules(self) -> list[Module]:
        return [module for module in self._modules.values() if module is not None]

    def _parse_relevant(self) -> None:
        """Parse the files that mention a class that is looked for, or one derived from it."""
        texts = self._texts_reached()
        wanted = self._table.names()
        known: set[str] = set()
        while wanted - known:
            pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(wanted - known)))})\b")
            known |= wanted
            for path in [path for path, text in texts.items() if pattern.search(text)]:
                del texts[path]
                module = self.module(path)
                if module is not None:
                    wanted |= _names_made(module, known)

    def _texts_reached(self) -> dict[Path, str]:
        """The texts of the files given, and of those of the project that they import."""
        texts: dict[Path, str] = {}
        looked_up: set[tuple[Path, str]] = set()
        pending = list(self.given)
        while pending:
            path = pending.pop()
            if path in texts:
                continue
            try:
                texts[path] = self._read(path).text
            except BadInputError as error:
                texts[path] = ""
                if path in self.given:
                    self.bad.append(error)
            imported = {(path.parent, name) for name in _imported_modules(texts[path])}
            for folder, name in imported - looked_up:
                found = find_module(folder / path.name, name)
                pending += [found] if found is not None else []
            looked_up |= imported
        return texts

    # Names

    def targets(self, found: ClassDef) -> list[list[Target]]:
        """What each base of a class may be."""
        return [self._of_base(found, arg.value) for arg in found.bases]

    def _of_base(self, found: ClassDef, base: cst.BaseExpression) -> list[Target]:
        key = id(base)
        if key not in self._targets:
            self._targets[key] = []  # A class may not be its own base, but a file may say so.
            targets = [t for t in self.meant(found.module, base, found) if t is not found]
            if self._is_doubtful(found, base, targets):
                code = found.module.tree.code_for_node(base)
                targets = [Unclear(f"the name {code} is bound more than once")]
            self._targets[key] = targets[:1]
        return self._targets[key]

    def _is_doubtful(
        self, found: ClassDef, base: cst.BaseExpression, targets: Sequence[Target]
    ) -> bool:
        """Whether a base may be a class that is looked for, and may be something else."""
        if not any(self.is_test(target) for target in targets):
            return False
        if len({_replacement(target) for target in targets}) > 1:
            return True
        names = found.module.names(base, found.scope)
        each = [Names(imported={name}) for name in names.imported]
        each += [Names(local={name}) for name in names.local if name != found.name]
        return not all(list(self._of_names(found.module, name)) for name in each)

    def meant(
        self, module: Module, expression: cst.BaseExpression, found: ClassDef | None = None
    ) -> list[Target]:
        """What an expression may be: classes that are looked for, or of the project's own."""
        if isinstance(expression, cst.Subscript):
            expression = expression.value
        text = dotted(expression)
        if text is None:
            return self._made(module, expression, found)
        names = module.names(expression, found.scope if found else module.scope)
        if not names.imported and not names.local:
            return self._through_stars(module, text)
        return _once(self._of_names(module, names))

    def _of_names(self, module: Module, names: Names) -> Iterator[Target]:
        for name in sorted(names.imported):
            yield from self._of_dotted(module.path, name)
        for name in sorted(names.local):
            yield from self._of_local(module, name)

    def _of_dotted(self, importer: Path, name: str) -> list[Target]:
        if name.split(".")[0] == OURS:
            return [Ours(name.rpartition(".")[2])]
        stock = self._table.find(name)
        if stock is not None or name.startswith(f"{_TORCH}."):
            # Also in a checkout of torch's.
            return [stock] if stock is not None else []
        parts = name.split(".")
        leading = len(name) - len(name.lstrip("."))
        if leading:
            parts = ["." * leading + parts[leading], *parts[leading + 1 :]]
        for end in range(len(parts) - 1, 0, -1):
            path = find_module(importer, ".".join(parts[:end]))
            if path is None:
                continue
            module = self.module(path)
            if module is None:
                return []
            self._used_from.setdefault(path, set()).add(parts[end])
            return self._member(module, ".".join(parts[end:]))
        return []

    def _member(self, module: Module, name: str) -> list[Target]:
        """What a name is in another module, however it came there."""
        if (module.path, name) in self._busy:
            return []
        self._busy.add((module.path, name))
        try:
            head, _, rest = name.partition(".")
            names = module.names(cst.Name(head), module.scope)
            if not names.imported and not names.local:
                return self._through_stars(module, name)
            rest = f".{rest}" if rest else ""
            whole = Names({n + rest for n in names.imported}, {n + rest for n in names.local})
            return _once(self._of_names(module, whole))
        finally:
            self._busy.discard((module.path, name))

    def _of_local(self, module: Module, name: str) -> list[Target]:
        classes = module.class_named(name)
        if classes:
            return list(classes)
        head, _, rest = name.partition(".")
        targets: list[Target] = []
        if (module.path, f"={name}") in self._busy:
            return []
        self._busy.add((module.path, f"={name}"))
        try:
            for value in module.aliases.get(head, ()):
                if rest and (text := dotted(value)):
                    names = module.names(value, module.scope)
                    whole = Names(
                        {f"{n}.{rest}" for n in names.imported},
                        {f"{n}.{rest}" for n in names.local if f"{n}.{rest}" != f"{text}.{head}"},
                    )
                    targets += self._of_names(module, whole)
                elif not rest:
                    targets += self.meant(module, value)
        finally:
            self._busy.discard((module.path, f"={name}"))
        return _once(targets)

    def _through_stars(self, module: Module, name: str) -> list[Target]:
        targets: list[Target] = []
        for star in module.stars:
            path = find_module(module.path, star)
            other = self.module(path) if path is not None else None
            head = name.partition(".")[0]
            if other is not None and (head in other.exported or not head.startswith("_")):
                targets += self._member(other, name)
            elif other is None:
                stock = self._table.find(f"{star}.{name}")
                targets += [stock] if stock is not None else []
        return _once(targets[-1:])  # The last one counts.

    def _made(
        self, module: Module, expression: cst.BaseExpression, found: ClassDef | None
    ) -> list[Target]:
        """For a base that is made by an expression: whether a class looked for goes into it."""
        collector = _References()
        expression.visit(collector)
        code = module.tree.code_for_node(expression)
        for part in collector.found:
            if any(self.is_test(target) for target in self.meant(module, part, found)):
                return [Unclear(f"the base {code} is made when the file is run")]
        if isinstance(expression, cst.Call) and (text := dotted(expression.func)):
            function = module.functions.get(text)
            if function is not None and self._function_mentions(module, function):
                return [Unclear(f"the base {code} is made when the file is run")]
        return []

    def _function_mentions(self, module: Module, function: ast.FunctionDef) -> bool:
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        return any(
            self.is_test(target)
            for name in names
            if module.is_bound(name)
            for target in self._member(module, name)
        )

    def imported_from(self, module: Module) -> set[str]:
        """The names that other files import from one; of an __init__.py, all."""
        names = self._used_from.get(module.path, set()) | self._imported.get(module.path, set())
        everything = "*" in names or module.path.name == "__init__.py"
        return names | (set(module.words) if everything else set())

    @functools.cached_property
    def _imported(self) -> dict[Path, set[str]]:
        """By file, the names that others import from it."""
        found: dict[Path, set[str]] = {}
        for module in self.modules:
            for node in ast.walk(module.code):
                if isinstance(node, ast.ImportFrom):
                    source = "." * node.level + (node.module or "")
                    path = find_module(module.path, source)
                    if path is not None and path != module.path:
                        found.setdefault(path, set()).update(alias.name for alias in node.names)
        return found

    # Classes

    def is_test(self, target: Target) -> bool:
        """Whether a target is a class that is looked for, or derives from one."""
        if isinstance(target, ClassDef):
            return any(self.is_test(base) for bases in self.targets(target) for base in bases)
        return True

    def parents(self, found: ClassDef) -> list[ClassDef]:
        """The project's own classes that a class derives from directly."""
        return [
            base for bases in self.targets(found) for base in bases if isinstance(base, ClassDef)
        ]

    def ancestry(self, found: ClassDef) -> list[ClassDef]:
        """A class and the project's own that it derives from: about in Python's order."""
        order: list[ClassDef] = []

        def add(one: ClassDef) -> None:
            if one in order:
                order.remove(one)  # As the method resolution order has it: after all its children.
            order.append(one)
            for parent in self.parents(one):
                add(parent)

        add(found)
        return order

    def tests(self) -> list[ClassDef]:
        """Every class that is looked for, in the order of files and lines."""
        return [
            found
            for module in sorted(self.modules, key=lambda module: module.path)
            if not f"{module_name(module.path)}.".startswith(f"{_TORCH}.testing.")
            for found in module.classes
            if self.is_test(found)
        ]


class _References(cst.CSTVisitor):
    """Names and dotted names in an expression."""

    def __init__(self) -> None:
        self.found: list[cst.BaseExpression] = []

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if dotted(node) is not None:
            self.found.append(node)
            return False
        return True

    def visit_Name(self, node: cst.Name) -> None:
        self.found.append(node)


def _replacement(target: Target) -> object:
    return target.replacement if isinstance(target, Stock) else id(target)


def _once(targets: Iterable[Target]) -> list[Target]:
    found: list[Target] = []
    for target in targets:
        if target not in found:
            found.append(target)
    return found


_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import\b|import[ \t]+([\w.]+))", re.MULTILINE
)

#: Packages that are never the project's.
_FOREIGN = frozenset({_TORCH, *sys.stdlib_module_names})


def _imported_modules(text: str) -> set[str]:
    """The modules that a text imports from, as far as they may be the project's."""
    names = {found[1] or found[2] for found in _IMPORT.finditer(text)}
    return {n for n in names if n.partition(".")[0] not in _FOREIGN}


def _names_made(module: Module, known: set[str]) -> set[str]:
    """Names by which others may know what this module derives from names already known, or
    renames."""
    made: set[str] = set()
    for found in module.classes:
        if found.bases and {
            word
            for arg in found.bases
            for word in re.findall(r"\w+", module.tree.code_for_node(arg.value))
        } & (known | made):
            made.add(found.name.rpartition(".")[2])
    for name, values in module.aliases.items():
        words = {w for v in values for w in re.findall(r"\w+", module.tree.code_for_node(v))}
        if words & (known | made):
            made.add(name)
    made |= {
        new
        for old, new in re.findall(r"\b(\w+)\s+as\s+(\w+)\b", module.text.text)
        if old in known | made
    }
    return made


def find_module(importer: Path, name: str) -> Path | None:
    """The file of the project that ``importer`` gets by importing ``name``."""
    leading = len(name) - len(name.lstrip("."))
    parts = [part for part in name[leading:].split(".") if part]
    if leading:
        folder = importer.parent
        for _ in range(leading - 1):
            folder = folder.parent
        return _module_in(folder, parts)
    top = project_top(importer)
    for folder in importer.parents:
        found = _module_in(folder, parts) or _module_in(folder / "src", parts)
        if found is not None:
            return found
        if folder == top:
            break
    return None


def project_top(path: Path) -> Path:
    """The folder that a file's project is in: of its work tree, or else the outermost one that
    files of its package are imported from."""
    for folder in path.parents:
        if (folder / ".git").exists():
            return folder
    cwd = Path(os.getcwd())
    if cwd in path.parents:
        return cwd
    return import_folder(path)


def import_folder(path: Path) -> Path:
    """The folder from which a file's module is imported: the first without ``__init__.py``."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def module_name(path: Path) -> str:
    """A file's module, as seen from the folder that it is imported from."""
    parts = list(path.relative_to(import_folder(path)).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def _module_in(folder: Path, parts: Sequence[str]) -> Path | None:
    path = folder.joinpath(*parts)
    for candidate in (path / "__init__.py", path.parent / f"{path.name}.py" if parts else path):
        if candidate.is_file():
            return candidate.resolve()
    return None
