"""Whether and how a class starts its processes, as far as its text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchcontinuous.migrate._module import ClassDef


def starts_nothing(found: ClassDef) -> bool | None:
    """Whether a _spawn_processes of a class's own leaves it to run without processes, or starts
    its own; None if it has none, or one that comes down to stock's."""
    method = found.methods.get("_spawn_processes")
    if method is None or calls_super(method, "_spawn_processes"):
        return None
    if calls_self(method, "_start_processes"):
        return None
    return not any(isinstance(node, ast.Call) for node in ast.walk(method))


def _calls(function: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func


def calls_super(function: ast.FunctionDef, name: str) -> bool:
    """Whether a method calls that of a parent: by super(), or by the parent's name."""
    return any(
        call.attr == name
        and not (isinstance(call.value, ast.Name) and call.value.id in ("self", "cls"))
        for call in _calls(function)
    )


def calls_self(function: ast.AST, name: str) -> bool:
    return any(
        call.attr == name and isinstance(call.value, ast.Name) and call.value.id == "self"
        for call in _calls(function)
    )


def surely(function: ast.FunctionDef, name: str, ancestry: list[ClassDef]) -> bool:
    """Whether a method calls another one whenever it runs to its end."""
    pending: list[ast.stmt] = list(function.body)
    seen = {function.name}
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, (ast.With, ast.Try)):
            pending += statement.body
        elif isinstance(statement, ast.If) and statement.orelse:
            if all(
                calls_self(ast.Module(part, []), name)
                for part in (statement.body, statement.orelse)
            ):
                return True
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value.func
            if not isinstance(call, ast.Attribute):
                continue
            if isinstance(call.value, ast.Name) and call.value.id == "self":
                if call.attr == name:
                    return True
                helper = next(
                    (c.methods[call.attr] for c in ancestry if call.attr in c.methods), None
                )
                if helper is not None and helper.name not in seen:
                    seen.add(helper.name)
                    pending += helper.body
    return False
