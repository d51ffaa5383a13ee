"""The imports of one file: how what is needed is named in it, and what is needed no more."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import Scope

from torchcontinuous.migrate._module import STATEMENTS, ClassDef, Module, dotted


class ImpossibleError(Exception):
    """The change cannot be made in this file; the reason."""


@dataclass(frozen=True)
class Reference:
    """A class or function by where it is imported from."""

    module: str
    name: str


@dataclass
class ImportChanges:
    """By import statement, the names that go and the statements that follow."""

    removed: dict[cst.CSTNode, set[str]] = field(default_factory=dict)
    added: dict[cst.CSTNode | None, list[str]] = field(default_factory=dict)
    extended: dict[cst.CSTNode, list[str]] = field(default_factory=dict)


class Imports:
    """How what is needed is named in a file, and which imports that takes and spares.

    Args:
        gone: dotted names that are used once less each.
        anchors: names, by whose imports new ones are put; and the scopes that they are of.
        kept: names that other files import from this one.
    """

    def __init__(
        self,
        module: Module,
        gone: Sequence[str],
        anchors: Sequence[tuple[str, Scope]],
        kept: set[str],
    ) -> None:
        self._module = module
        self._kept = kept | module.exported
        self._gone = list(gone)
        self._anchors = [node for name, scope in anchors for node in module.imports_of(name, scope)]
        self._identifiers = _identifiers(module.code)
        self._spelled: dict[Reference, str] = {}
        self._wanted: dict[str, list[str]] = {}

    def spell(self, reference: Reference) -> str:
        """How the file names something; its import is taken care of."""
        if reference not in self._spelled:
            self._spelled[reference] = self._spelling(reference)
        return self._spelled[reference]

    def _spelling(self, reference: Reference) -> str:
        module, name = reference.module, reference.name
        for node in self._module.code.body:
            if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                for alias in node.names:
                    bound = alias.asname or alias.name
                    if alias.name == name and len(list(self._module.scope[bound])) == 1:
                        return bound
        free = name not in self._identifiers and name not in self._kept
        if not self._module.stars and (free or self._is_given_up(name)):
            self._wanted.setdefault(module, []).append(name)
            return name
        head = module.partition(".")[0]
        imported = any(
            isinstance(node, ast.Import)
            and any(a.name == module and not a.asname for a in node.names)
            for node in self._module.code.body
        )
        if not imported:
            if head in self._identifiers and not _only_imported(self._module.code, head):
                raise ImpossibleError(f"the name {head} means something else here")
            self._wanted.setdefault(module, [])
        return f"{module}.{name}"

    def _is_given_up(self, name: str) -> bool:
        """Whether a name is bound by imports only, for the sake of what is replaced."""
        bound = list(self._module.scope[name])
        imports = self._module.imports_of(name, self._module.scope)
        return (
            len(bound) == len(imports) > 0
            and self._uses(name) == self._gone.count(name) > 0
            and name not in self._kept
            and not any(self._is_marked(node) for node in imports)
        )

    def _uses(self, name: str) -> int:
        uses = 0
        for node in ast.walk(self._module.code):
            if isinstance(node, ast.Name) and node.id == name:
                uses += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # An annotation in quotes; no sentence that mentions it.
                in_quotes = re.search(rf"\b{name}\b", node.value)
                uses += bool(in_quotes and not re.search(r"[^\w.\[\], |]|\w \w", node.value))
        return uses

    def _is_marked(self, node: cst.CSTNode) -> bool:
        """Whether a comment says that an import is there for others."""
        finder = _LineOf(node)
        self._module.tree.visit(finder)
        return finder.line is not None and "noqa" in self._module.tree.code_for_node(finder.line)

    def changes(self) -> ImportChanges:
        """The changes to the import statements, once all is spelled."""
        changes = ImportChanges()
        for text in dict.fromkeys(self._gone):
            self._remove(text, changes)
        statements = [_statement(module, names) for module, names in self._wanted.items()]
        if not statements:
            return changes
        existing = self._existing()
        anchor = self._anchor(changes)
        for module, names in self._wanted.items():
            if names and module in existing:
                changes.extended[existing[module]] = sorted(names)
            else:
                changes.added.setdefault(anchor, []).append(_statement(module, names))
        return changes

    def _existing(self) -> dict[str, cst.CSTNode]:
        """Statements at the module's top level that names can be added to."""
        found: dict[str, cst.CSTNode] = {}
        for line in self._module.tree.body:
            for node in line.body if isinstance(line, cst.SimpleStatementLine) else ():
                if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
                    name = dotted(node.module) if node.module and not node.relative else None
                    if name and node not in self._anchors:
                        found.setdefault(name, node)
        return found

    def _anchor(self, changes: ImportChanges) -> cst.CSTNode | None:
        """The import statement after which new ones go; None: after the first ones of the file."""
        on_lines = _on_lines(self._module.tree)
        at_top = {
            node
            for line in self._module.tree.body
            if isinstance(line, cst.SimpleStatementLine)
            for node in line.body
        }
        candidates = [node for node in self._anchors if node in on_lines]
        if len(dict.fromkeys(candidates)) != 1 and any(n not in at_top for n in candidates):
            return self._last_of_top(candidates)
        if candidates:
            first = min(candidates, key=on_lines.index)
            stars = [n for n in on_lines if isinstance(n, cst.ImportFrom) and _is_star(n)]
            return max([first, *(s for s in stars if s in at_top)], key=on_lines.index)
        return self._last_of_top([])

    def _last_of_top(self, after: Sequence[cst.CSTNode]) -> cst.CSTNode | None:
        """The last statement among the imports that a file begins with."""
        last: cst.CSTNode | None = None
        for line in self._module.tree.body:
            if isinstance(line, (cst.ClassDef, cst.FunctionDef)):
                break
            if isinstance(line, cst.SimpleStatementLine):
                for node in line.body:
                    if isinstance(node, (cst.Import, cst.ImportFrom)):
                        last = node
            elif any(_contains(line, node) for node in after):
                last = line
        return last

    def _remove(self, text: str, changes: ImportChanges) -> None:
        head = text.partition(".")[0]
        uses = self._uses(head)
        gone = sum(1 for other in self._gone if other.partition(".")[0] == head)
        for node in self._module.imports_of(head, self._module.scope):
            if (
                self._is_marked(node)
                or head in self._kept
                or isinstance(node.names, cst.ImportStar)
            ):
                continue
            for alias in node.names:
                name = dotted(alias.name) or ""
                bound = alias.asname.name.value if alias.asname else name.partition(".")[0]  # type: ignore[union-attr]
                if bound != head:
                    continue
                by_name = alias.asname is not None or "." not in name
                is_meant = by_name or text.startswith(f"{name}.")
                unused = uses == gone or (not by_name and self._spared(name, head))
                if is_meant and unused:
                    changes.removed.setdefault(node, set()).add(name)

    def _spared(self, module: str, head: str) -> bool:
        """Whether ``import a.b.c`` is needed no more, though ``a`` is."""
        others = [
            alias.name
            for node in self._module.code.body
            if isinstance(node, ast.Import)
            for alias in node.names
            if not alias.asname and alias.name != module
        ]
        if not any(name == head or name.startswith(f"{head}.") for name in others):
            return False
        uses = [
            text
            for node in ast.walk(self._module.code)
            if isinstance(node, ast.Attribute) and (text := _dotted(node))
        ]
        uses = [
            text
            for text in uses
            if text.startswith(f"{module}.") and text.count(".") == module.count(".") + 1
        ]
        return len(uses) == sum(1 for text in self._gone if text.startswith(f"{module}."))


def isolated_decorators(found: ClassDef, method: str) -> list[str]:
    """The dotted names of a method's decorators that isolate it."""
    function = found.methods.get(method)
    names = []
    for decorator in function.decorator_list if function else ():
        name = _dotted(decorator.func) if isinstance(decorator, ast.Call) else None
        if name and _is_isolated(found.module, name):
            names.append(name)
    return names


def _is_isolated(module: Module, name: str) -> bool:
    node = cst.parse_expression(name)
    if isinstance(node, cst.Name):
        return "torchcontinuous.isolated" in module.names(node, module.scope).imported
    return name == "torchcontinuous.isolated"


def _statement(module: str, names: Sequence[str]) -> str:
    return f"from {module} import {', '.join(sorted(set(names)))}" if names else f"import {module}"


def _dotted(node: ast.AST) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _identifiers(code: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
    return found


def _only_imported(code: ast.Module, head: str) -> bool:
    """Whether a name is bound by plain imports of the module of that name alone."""
    return any(
        isinstance(node, ast.Import)
        and any(alias.name.partition(".")[0] == head and not alias.asname for alias in node.names)
        for node in code.body
    )


def _is_star(node: cst.ImportFrom) -> bool:
    return isinstance(node.names, cst.ImportStar)


class _LineOf(cst.CSTVisitor):
    def __init__(self, node: cst.CSTNode) -> None:
        self._node = node
        self.line: cst.SimpleStatementLine | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine) and any(n is self._node for n in node.body):
            self.line = node
        return isinstance(node, STATEMENTS) and not isinstance(node, cst.FunctionDef)


def _on_lines(tree: cst.Module) -> list[cst.CSTNode]:
    """All import statements that stand on a line, in order."""
    collector = _ImportLines()
    tree.visit(collector)
    return collector.found


class _ImportLines(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine):
            self.found += [n for n in node.body if isinstance(n, (cst.Import, cst.ImportFrom))]
        return isinstance(node, STATEMENTS) and not isinstance(node, cst.FunctionDef)


def _contains(tree: cst.CSTNode, node: cst.CSTNode) -> bool:
    return tree is node or any(_contains(child, node) for child in tree.children)
