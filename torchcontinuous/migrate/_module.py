"""One file, parsed: its classes, and what names mean in it."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    Assignment,
    ImportAssignment,
    MetadataWrapper,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from torchcontinuous.migrate._files import BadInputError, Text


@dataclass(eq=False)
class ClassDef:
    """A class as one file defines it.

    Attributes:
        name: its qualified name within the module.
        node: in LibCST's tree, which is what is changed.
        code: in the standard library's, which is what is judged.
        scope: that in which its bases are looked up.
    """

    module: Module
    name: str
    node: cst.ClassDef
    code: ast.ClassDef
    scope: Scope

    @property
    def line(self) -> int:
        return self.code.lineno

    @functools.cached_property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.code.body if isinstance(n, ast.FunctionDef)}

    @functools.cached_property
    def bound(self) -> set[str]:
        """Every name that its body binds."""
        return set(_bound(self.code.body))

    @property
    def tests(self) -> list[str]:
        return [name for name in self.methods if name.startswith("test")]

    @property
    def bases(self) -> list[cst.Arg]:
        return [arg for arg in self.node.bases if arg.keyword is None and not arg.star]


@dataclass
class Names:
    """What an expression may mean.

    Attributes:
        imported: dotted names, of other modules; leading dots for relative ones.
        local: qualified names within the file.
    """

    imported: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)


class Module:
    """A parsed file.

    Raises:
        BadInputError: it is no Python, or LibCST would not keep it as it is.
    """

    def __init__(self, path: Path, text: Text) -> None:
        self.path = path
        self.text = text
        self.code = _parsed(path, text.text)
        try:
            tree = cst.parse_module(text.text)
        except cst.ParserSyntaxError as error:
            raise BadInputError(
                path, f"LibCST cannot parse it: {error.message}", error.raw_line
            ) from error
        except RecursionError as error:
            raise BadInputError(path, "nested too deeply to be parsed") from error
        if tree.code != text.text:
            raise BadInputError(path, "its formatting would not be kept: not changed")
        self.tree = tree

    @functools.cached_property
    def _outline(self) -> MetadataWrapper:
        """The tree without what is in functions: the bodies of tests are most of a file, and what
        they mean is of no interest. What is left is the same nodes."""
        without = _WithoutBodies(self._has_local_classes)
        return MetadataWrapper(self.tree.visit(without), unsafe_skip_copy=True)

    @functools.cached_property
    def _codes(self) -> list[tuple[str, ast.ClassDef]]:
        return list(_class_codes(self.code, ""))

    @property
    def _has_local_classes(self) -> bool:
        return any("<locals>" in name for name, _ in self._codes)

    @functools.cached_property
    def _scopes(self) -> Any:
        return self._outline.resolve(ScopeProvider)

    @property
    def scope(self) -> Scope:
        """The module's own scope."""
        scope: Scope = self._scopes[self._outline.module]
        return scope

    @functools.cached_property
    def classes(self) -> list[ClassDef]:
        """All classes, in the order of the file."""
        nodes = _classes_in(self.tree, self._has_local_classes)
        outlined = _classes_in(self._outline.module, self._has_local_classes)
        return [
            ClassDef(self, name, node, code, self._scopes[outline])
            for node, outline, (name, code) in zip(nodes, outlined, self._codes, strict=True)
        ]

    def class_named(self, name: str) -> list[ClassDef]:
        return [found for found in self.classes if found.name == name]

    @functools.cached_property
    def aliases(self) -> dict[str, list[cst.BaseExpression]]:
        """What module-level names are assigned, simple assignments only."""
        collector = _Aliases()
        self._outline.module.visit(collector)
        return collector.found

    @functools.cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.code.body if isinstance(n, ast.FunctionDef)}

    @functools.cached_property
    def stars(self) -> list[str]:
        """The modules of which everything is imported, relative ones with leading dots."""
        return [
            "." * node.level + (node.module or "")
            for node in ast.walk(self.code)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]

    @functools.cached_property
    def words(self) -> set[str]:
        """Every identifier in it."""
        return set(re.findall(r"[^\W\d]\w*", self.text.text))

    @functools.cached_property
    def exported(self) -> set[str]:
        """The strings in ``__all__``."""
        return {
            item.value
            for node in ast.walk(self.code)
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
            and any(isinstance(n, ast.Name) and n.id == "__all__" for n in ast.walk(node))
            for item in ast.walk(node)
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
        }

    def names(self, expression: cst.CSTNode, scope: Scope) -> Names:
        """What an expression means, as far as this file tells."""
        names = Names()
        for qualified in scope.get_qualified_names_for(expression):
            if qualified.source is QualifiedNameSource.IMPORT:
                names.imported.add(qualified.name)
            elif qualified.source is QualifiedNameSource.LOCAL:
                names.local.add(qualified.name)
        return names

    def imports_of(self, name: str, scope: Scope) -> list[cst.Import | cst.ImportFrom]:
        """The statements that bind a name by importing it."""
        return [
            found.node
            for found in scope[name]
            if isinstance(found, ImportAssignment)
            and isinstance(found.node, (cst.Import, cst.ImportFrom))
        ]

    def is_bound(self, name: str) -> bool:
        """Whether the module's scope has such a name."""
        return any(isinstance(found, Assignment) for found in self.scope[name])


def _parsed(path: Path, text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        hint = ""
        if re.search(r"^\s*(print\s+[\"'\w]|except\s+[\w.]+\s*,\s*\w+\s*:)", text, re.MULTILINE):
            hint = " (Python 2? Only Python 3 can be migrated)"
        raise BadInputError(path, f"a syntax error: {error.msg}{hint}", error.lineno) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadInputError(path, f"cannot be parsed: {error}") from error


#: What statements can be in: to go further down takes most of the time of a visit.
STATEMENTS = (
    cst.Module,
    cst.BaseSuite,
    cst.BaseCompoundStatement,
    cst.Else,
    cst.Finally,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.MatchCase,
)


def _classes_in(tree: cst.CSTNode, in_functions: bool) -> list[cst.ClassDef]:
    collector = _Classes(in_functions)
    tree.visit(collector)
    return collector.found


class _Classes(cst.CSTVisitor):
    def __init__(self, in_functions: bool) -> None:
        self.found: list[cst.ClassDef] = []
        self._in_functions = in_functions

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.ClassDef):
            self.found.append(node)
        if isinstance(node, cst.FunctionDef):
            return self._in_functions
        return isinstance(node, STATEMENTS)


class _WithoutBodies(cst.CSTTransformer):
    def __init__(self, in_functions: bool) -> None:
        super().__init__()
        self._in_functions = in_functions

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.FunctionDef) and isinstance(node, STATEMENTS)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        if self._in_functions and _classes_in(original_node, True):
            return updated_node
        return cst.FunctionDef(
            original_node.name, cst.Parameters(), cst.SimpleStatementSuite([cst.Pass()])
        )


class _Aliases(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: dict[str, list[cst.BaseExpression]] = {}

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                self.found.setdefault(target.target.value, []).append(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if isinstance(node.target, cst.Name) and node.value is not None:
            self.found.setdefault(node.target.value, []).append(node.value)


def _class_codes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            yield from _class_codes(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _class_codes(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _class_codes(child, prefix)


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


def dotted(expression: cst.CSTNode) -> str | None:
    """``a.b.c`` as text; None for what is no such thing."""
    if isinstance(expression, (cst.Name, cst.Attribute)):
        head: cst.CSTNode = expression
        while isinstance(head, cst.Attribute):
            head = head.value
        return get_full_name_for_node(expression) if isinstance(head, cst.Name) else None
    return None
