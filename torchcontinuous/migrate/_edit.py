"""Changing one file: parents, their imports, isolation; and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import Scope

from torchcontinuous.migrate._imports import (
    ImportChanges,
    Imports,
    ImpossibleError,
    Reference,
    isolated_decorators,
)
from torchcontinuous.migrate._module import STATEMENTS, ClassDef, Module, dotted


@dataclass
class ClassEdit:
    """What is to be changed in one class.

    Attributes:
        replaced: by position among its bases, what comes instead.
        mixin: what is put before one of the bases, and that one's position.
        dropped: positions of bases that go.
        attributes: what is put at the top of its body, by name, as source text.
        removed: attributes that go.
        decorated: by method, the level that it is isolated at.
        undecorated: methods from which such a decorator goes.
    """

    replaced: dict[int, Reference] = field(default_factory=dict)
    mixin: tuple[int, Reference] | None = None
    dropped: set[int] = field(default_factory=set)
    attributes: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    decorated: dict[str, str] = field(default_factory=dict)
    undecorated: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return any(vars(self).values())


ISOLATED = Reference("torchcontinuous", "isolated")


def edited(module: Module, edits: Mapping[ClassDef, ClassEdit], kept: set[str]) -> str:
    """A file's text after the changes.

    Args:
        kept: names that other files import from this one.

    Raises:
        ImpossibleError: a name that is needed means something else here.
    """
    imports = Imports(module, *_names(edits), kept)
    classes = {
        found.node: _Class(edit, {r: imports.spell(r) for r in _references(edit)})
        for found, edit in edits.items()
    }
    in_functions = any("<locals>" in found.name for found in edits)
    text = module.tree.visit(_Edit(classes, imports.changes(), in_functions)).code
    try:
        compile(text, str(module.path), "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        raise ImpossibleError(f"the result would be no Python: {error}") from error
    return text


def _names(
    edits: Mapping[ClassDef, ClassEdit],
) -> tuple[list[str], list[tuple[str, Scope]]]:
    """The names that are used less, and those by whose imports new ones are put."""
    gone: list[str] = []
    anchors: list[tuple[str, Scope]] = []
    for found, edit in edits.items():
        changed = [*edit.replaced, *edit.dropped]
        texts = {position: dotted(arg.value) for position, arg in enumerate(found.bases)}
        gone += [text for position in changed if (text := texts[position])]
        beside = [*changed, edit.mixin[0]] if edit.mixin else changed
        named = [text for position in beside if (text := texts[position])]
        anchors += [(text.partition(".")[0], found.scope) for text in named]
        for method in edit.undecorated:
            gone += isolated_decorators(found, method)
    return gone, anchors


def _references(edit: ClassEdit) -> list[Reference]:
    mixin = [edit.mixin[1]] if edit.mixin else []
    isolated = [ISOLATED] if edit.decorated else []
    return [*edit.replaced.values(), *mixin, *isolated]


class _SmallStatements(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.BaseSmallStatement):
            self.found.append(node)
            return False
        return True


# The tree


@dataclass(frozen=True)
class _Class:
    edit: ClassEdit
    spelled: Mapping[Reference, str]


class _Edit(cst.CSTTransformer):
    def __init__(
        self,
        classes: Mapping[cst.ClassDef, _Class],
        imports: ImportChanges,
        in_functions: bool,
    ) -> None:
        super().__init__()
        self._classes = classes
        self._imports = imports
        self._in_functions = in_functions

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return self._in_functions
        return isinstance(node, STATEMENTS)

    # Imports

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        left = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, cst.BaseCompoundStatement):
            return left
        added = [_line(text) for text in self._imports.added.get(original_node, ())]
        if isinstance(original_node, (cst.Try, cst.If)) and self._is_emptied(original_node):
            lines = original_node.leading_lines
            gone: list[cst.BaseStatement] = [
                _line("pass").with_changes(body=[], leading_lines=lines)
            ]
            return cst.FlattenSentinel([*gone, *added])
        return cst.FlattenSentinel([left, *added]) if added else left  # type: ignore[list-item]

    def _is_emptied(self, statement: cst.CSTNode) -> bool:
        """Whether nothing but imports was in it that are all removed."""
        finder = _SmallStatements()
        statement.visit(finder)
        return bool(finder.found) and all(
            isinstance(node, (cst.Import, cst.ImportFrom)) and self._goes(node)
            for node in finder.found
        )

    def _goes(self, node: cst.Import | cst.ImportFrom) -> bool:
        if isinstance(node.names, cst.ImportStar) or self._imports.added.get(node):
            return False
        removed = self._imports.removed.get(node, set())
        return all(dotted(alias.name) in removed for alias in node.names)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        added = [
            _line(text) for node in original_node.body for text in self._imports.added.get(node, ())
        ]
        body = []
        for before, after in zip(original_node.body, updated_node.body, strict=True):
            kept = self._import(before, after)
            if kept is not None:
                body.append(kept)
        if len(body) < len(updated_node.body) and body:
            body[-1] = body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        line = updated_node.with_changes(body=body)
        if not body and added:
            # In its place, with its comments.
            added[0] = line.with_changes(body=added[0].body)
            return cst.FlattenSentinel(added)
        return cst.FlattenSentinel([line, *added]) if added else line

    def _import(
        self, before: cst.CSTNode, after: cst.BaseSmallStatement
    ) -> cst.BaseSmallStatement | None:
        removed = self._imports.removed.get(before, set())
        if removed and isinstance(after, (cst.Import, cst.ImportFrom)):
            assert not isinstance(after.names, cst.ImportStar)
            names = [alias for alias in after.names if dotted(alias.name) not in removed]
            if not names:
                return None
            if names[-1] is not after.names[-1]:
                names[-1], after = _as_last(names[-1], after)
            after = after.with_changes(names=names)
        extended = self._imports.extended.get(before)
        if extended and isinstance(after, cst.ImportFrom):
            assert not isinstance(after.names, cst.ImportStar)
            after = after.with_changes(names=_extended(list(after.names), extended))
        return after

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=_without_empty(updated_node.body, needed=True))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body = _without_empty(updated_node.body, needed=False)
        for node, texts in self._imports.added.items():
            if node is None:
                position = _after_header(body)
                body[position:position] = [_line(text) for text in texts]
        return updated_node.with_changes(body=body)

    # Classes

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        change = self._classes.get(original_node)
        if change is None:
            return updated_node
        node = updated_node.with_changes(bases=_bases(updated_node.bases, change))
        return node.with_changes(body=_body(node.body, change))


def _line(text: str) -> cst.SimpleStatementLine:
    statement = cst.parse_statement(text)
    assert isinstance(statement, cst.SimpleStatementLine)
    return statement


def _as_last(
    alias: cst.ImportAlias, statement: cst.Import | cst.ImportFrom
) -> tuple[cst.ImportAlias, cst.Import | cst.ImportFrom]:
    """A name as the last one of its statement, with the comment that is on its line."""
    assert not isinstance(statement.names, cst.ImportStar)
    last, own = statement.names[-1].comma, alias.comma
    if not isinstance(own, cst.Comma) or not isinstance(
        own.whitespace_after, cst.ParenthesizedWhitespace
    ):
        return alias.with_changes(comma=last), statement
    closing = own.whitespace_after.with_changes(
        indent=False, last_line=cst.SimpleWhitespace(""), empty_lines=[]
    )
    rpar = statement.rpar if isinstance(statement, cst.ImportFrom) else None
    if isinstance(last, cst.Comma):
        return alias.with_changes(comma=last.with_changes(whitespace_after=closing)), statement
    assert rpar is not None
    return (
        alias.with_changes(comma=cst.MaybeSentinel.DEFAULT),
        statement.with_changes(rpar=rpar.with_changes(whitespace_before=closing)),
    )


def _extended(names: list[cst.ImportAlias], new: Sequence[str]) -> list[cst.ImportAlias]:
    """With new names among those of a statement, in order where they were in order."""
    separator = names[-1].comma if isinstance(names[-1].comma, cst.Comma) else None
    between = next((a.comma for a in names[:-1]), separator) or cst.Comma(
        whitespace_after=cst.SimpleWhitespace(" ")
    )
    commas = [*(alias.comma for alias in names[:-1]), *(between for _ in new), names[-1].comma]
    aliases = [*names, *(cst.ImportAlias(cst.Name(name)) for name in new)]
    if _are_sorted(names):
        aliases.sort(key=_import_order)
    return [alias.with_changes(comma=comma) for alias, comma in zip(aliases, commas, strict=True)]


def _are_sorted(names: Sequence[cst.ImportAlias]) -> bool:
    return [*names] == sorted(names, key=_import_order)


def _import_order(alias: cst.ImportAlias) -> tuple[int, str]:
    """Constants, classes, functions: as the usual sorters of imports have it."""
    name = dotted(alias.name) or ""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


def _without_empty(body: Sequence[cst.BaseStatement], needed: bool) -> list[cst.BaseStatement]:
    """Statements without the lines that lost their imports; their comments go to the next one."""
    kept: list[cst.BaseStatement] = []
    pending: list[cst.EmptyLine] = []
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine) and not statement.body:
            pending += statement.leading_lines
            continue
        if pending and hasattr(statement, "leading_lines"):
            comments = pending if any(line.comment for line in pending) else []
            lines = [*comments, *statement.leading_lines] or pending
            statement = statement.with_changes(leading_lines=lines)
        pending = []
        kept.append(statement)
    if not kept and needed and len(body):
        kept.append(_line("pass").with_changes(leading_lines=pending))
    return kept


def _after_header(body: Sequence[cst.BaseStatement]) -> int:
    """Behind the docstring and imports from ``__future__``."""
    position = 0
    for number, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        part = statement.body[0]
        is_text = isinstance(part, cst.Expr) and isinstance(part.value, cst.SimpleString)
        is_future = (
            isinstance(part, cst.ImportFrom) and part.module and dotted(part.module) == "__future__"
        )
        if not is_text and not is_future:
            break
        position = number + 1
    return position


def _bases(bases: Sequence[cst.Arg], change: _Class) -> list[cst.Arg]:
    edit = change.edit
    made: list[cst.Arg] = []
    position = -1
    for arg in bases:
        if arg.keyword is not None or arg.star:
            made.append(arg)
            continue
        position += 1
        if position in edit.dropped:
            if arg is bases[-1] and made:
                made[-1] = made[-1].with_changes(comma=arg.comma)
            continue
        if edit.mixin and edit.mixin[0] == position:
            earlier = [
                a.comma for a in bases if isinstance(a.comma, cst.Comma) and a is not bases[-1]
            ]
            comma = earlier[0] if earlier else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            name = change.spelled[edit.mixin[1]]
            made.append(cst.Arg(cst.parse_expression(name), comma=comma))
        if position in edit.replaced:
            name = change.spelled[edit.replaced[position]]
            arg = arg.with_changes(value=cst.parse_expression(name))
        made.append(arg)
    return made


def _body(body: cst.BaseSuite, change: _Class) -> cst.BaseSuite:
    edit = change.edit
    if not (edit.attributes or edit.removed or edit.decorated or edit.undecorated):
        return body
    if isinstance(body, cst.SimpleStatementSuite):
        statements: list[cst.BaseStatement] = [cst.SimpleStatementLine(body=body.body)]
        header = body.trailing_whitespace
        block = cst.IndentedBlock(body=statements, header=header)
    else:
        assert isinstance(body, cst.IndentedBlock)
        block = body
    made = [_member(statement, change) for statement in block.body]
    made = _without_attributes(made, edit.removed)
    if edit.attributes:
        made = _with_attributes(made, edit.attributes)
    return block.with_changes(body=made)


def _member(statement: cst.BaseStatement, change: _Class) -> cst.BaseStatement:
    if not isinstance(statement, cst.FunctionDef):
        return statement
    name = statement.name.value
    decorators = list(statement.decorators)
    if name in change.edit.undecorated:
        decorators = [d for d in decorators if not _isolates(d)]
    if name in change.edit.decorated:
        level = change.edit.decorated[name]
        call = f'{change.spelled[ISOLATED]}("{level}")'
        decorators.insert(0, cst.Decorator(cst.parse_expression(call)))
    return statement.with_changes(decorators=decorators)


def _isolates(decorator: cst.Decorator) -> bool:
    call = decorator.decorator
    if not isinstance(call, cst.Call) or len(call.args) != 1:
        return False
    value = call.args[0].value
    is_level = isinstance(value, cst.SimpleString) and value.evaluated_value in (
        "none",
        "group",
        "process",
    )
    return is_level and (dotted(call.func) or "").rpartition(".")[2].startswith("isolat")


def _without_attributes(
    body: list[cst.BaseStatement], removed: set[str]
) -> list[cst.BaseStatement]:
    kept: list[cst.BaseStatement] = []
    first_gone = False
    for statement in body:
        if _assigns(statement) & removed:
            first_gone = first_gone or not kept
            continue
        if first_gone and len(kept) == 0 and hasattr(statement, "leading_lines"):
            lines = list(statement.leading_lines)
            while lines and lines[0].comment is None:
                lines.pop(0)
            statement = statement.with_changes(leading_lines=lines)
        kept.append(statement)
    return kept or [_line("pass")]


def _assigns(statement: cst.BaseStatement) -> set[str]:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return set()
    part = statement.body[0]
    if isinstance(part, cst.Assign):
        return {t.target.value for t in part.targets if isinstance(t.target, cst.Name)}
    if isinstance(part, cst.AnnAssign) and isinstance(part.target, cst.Name):
        return {part.target.value}
    return set()


def _with_attributes(
    body: list[cst.BaseStatement], attributes: Mapping[str, str]
) -> list[cst.BaseStatement]:
    new: list[cst.BaseStatement] = [_line(f"{name} = {text}") for name, text in attributes.items()]
    documented = bool(body) and _is_docstring(body[0])
    head, rest = (body[:1], body[1:]) if documented else ([], body)
    if len(rest) == 1 and _is_pass(rest[0]):
        rest = []
    if documented:
        new[0] = new[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    if rest and hasattr(rest[0], "leading_lines"):
        lines = list(rest[0].leading_lines)
        is_blank = bool(lines) and lines[0].comment is None
        if not is_blank and isinstance(rest[0], (cst.FunctionDef, cst.ClassDef)):
            lines.insert(0, cst.EmptyLine(indent=False))
            rest[0] = rest[0].with_changes(leading_lines=lines)
        elif is_blank and not isinstance(rest[0], (cst.FunctionDef, cst.ClassDef)):
            rest[0] = rest[0].with_changes(leading_lines=lines[1:])
    return [*head, *new, *rest]


def _is_docstring(statement: cst.BaseStatement) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
    )


def _is_pass(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return False
    part = statement.body[0]
    is_dots = isinstance(part, cst.Expr) and isinstance(part.value, cst.Ellipsis)
    return (isinstance(part, cst.Pass) or is_dots) and statement.trailing_whitespace.comment is None
