"""Source files of the user's program as trees, and what can be read from an expression in them."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradtracer.records import SourceLocation

_MAX_LINES = 20_000
_WHAT_LENGTH = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class SourceFile:
    """A file and its tree."""

    name: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]

    def up(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node stands in, from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """The innermost function, class or module that the node stands in."""
        return next(n for n in self.up(node) if isinstance(n, Scope))

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that the node belongs to; the body of a lambda counts as one."""
        while not isinstance(node, ast.stmt) and not isinstance(self.parents[node], ast.Lambda):
            node = self.parents[node]
        return node

    def own(self, scope: Scope) -> Iterator[ast.AST]:
        """Nodes of a scope without those of scopes inside it (these themselves are included), in source order."""
        waiting = list(reversed(list(ast.iter_child_nodes(scope))))
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, Scope):
                waiting.extend(reversed(list(ast.iter_child_nodes(node))))

    def arms(self, node: ast.AST) -> dict[ast.AST, str]:
        """The conditional statements that the node stands in, and in which arm of each."""
        found: dict[ast.AST, str] = {}
        for parent in self.up(node):
            if isinstance(parent, Scope):
                break
            if isinstance(parent, (ast.If, ast.Try, ast.Match)):
                arms = [(n, v) for n, v in ast.iter_fields(parent) if isinstance(v, list)]
                found[parent] = next(
                    (f"{n}{i if n in ('cases', 'handlers') else ''}" for n, v in arms for i, x in enumerate(v)
                     if x is node), "test",
                )  # fmt: skip
            node = parent
        return found

    def location(self, node: Any) -> SourceLocation:
        """A statement or expression as a record."""
        is_block = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        what = f"def {node.name}" if is_block else " ".join(ast.unparse(node).split())
        return SourceLocation(file=os.path.abspath(self.name), line=node.lineno, what=what[:_WHAT_LENGTH])


@functools.lru_cache(maxsize=64)
def read(file: str) -> SourceFile | None:
    """The source of a file as a tree; None where there is none or it cannot be parsed."""
    lines = linecache.getlines(file)
    if not 0 < len(lines) <= _MAX_LINES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return SourceFile(file, tree, {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)})


@dataclass(frozen=True)
class Assignment:
    """What is assigned to a name, and where."""

    statement: ast.AST
    value: ast.expr
    index: int | None
    """Which element of the value, where a tuple is taken apart."""


def starts(node: Any) -> int:
    """First line."""
    return node.lineno


def ends(node: Any) -> int:
    """Last line."""
    return node.end_lineno


def last_name(expression: ast.expr) -> str:
    """`step` of `trainer.step`, of `step` and of `parts["step"]`; empty for anything else."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return expression.attr
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        return str(expression.slice.value)
    return ""


def call_at(file: SourceFile, line: int, name: str) -> ast.Call | None:
    """The call of a function of this name that covers a line; None where there are several."""
    found = [
        n
        for n in ast.walk(file.tree)
        if isinstance(n, ast.Call) and n.lineno <= line <= ends(n) and last_name(n.func) == name
    ]
    return found[0] if len(found) == 1 else None


def subject(call: ast.Call) -> ast.expr | None:
    """`x` of `x.backward()`, `scaler.scale(x).backward()` and `accelerator.backward(x)`."""
    if call.args:
        return call.args[0]
    if not isinstance(call.func, ast.Attribute):
        return None
    receiver = call.func.value
    if isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale" and receiver.args:
        return receiver.args[0]
    return receiver


def without_factor(expression: ast.expr) -> ast.expr:
    """The loss in an expression that only multiplies, divides or reduces it."""
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Div):
        return without_factor(expression.left)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult):
        for factor, other in ((expression.left, expression.right), (expression.right, expression.left)):
            if isinstance(factor, ast.Constant):
                return without_factor(other)
    if isinstance(expression, ast.IfExp):
        body, orelse = without_factor(expression.body), without_factor(expression.orelse)
        if ast.unparse(body) == ast.unparse(orelse):
            return body
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and not expression.args:
        receiver = expression.func.value
        if expression.func.attr in ("mean", "sum", "float") and isinstance(receiver, ast.Name):
            return receiver
    return expression


def is_rescaled(assignment: Assignment, name: str) -> bool:
    """Whether it only gives the name its own value times a factor, reduced or cast."""
    if isinstance(assignment.statement, ast.AugAssign):
        return isinstance(assignment.statement.op, (ast.Mult, ast.Div))
    return ast.unparse(without_factor(assignment.value)) == name


def element(value: ast.expr, index: int | None) -> ast.expr:
    """An element of a tuple that is written out; the value itself otherwise."""
    if index is not None and isinstance(value, (ast.Tuple, ast.List)) and index < len(value.elts):
        return value.elts[index]
    return value


def assignments(file: SourceFile, scope: Scope, name: str) -> list[Assignment]:
    """What a scope itself assigns to a name, in source order."""
    found: list[Assignment] = []
    for node in file.own(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if ast.unparse(target) == name:
                    found.append(Assignment(node, node.value, None))
                elif isinstance(target, (ast.Tuple, ast.List)):
                    for i, element in enumerate(target.elts):
                        if ast.unparse(element) == name:
                            found.append(Assignment(node, node.value, i))
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            value = node.value if ast.unparse(node.target) == name else None
            if value is not None:
                found.append(Assignment(file.statement(node), value, None))
    return found


def constructions(file: SourceFile, kind: str) -> list[ast.Call]:
    """Calls of a class, under its name or another that the file gives it."""
    names = {kind}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname for a in node.names if a.name == kind and a.asname}
        elif isinstance(node, ast.Assign) and last_name(node.value) == kind:
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return [n for n in ast.walk(file.tree) if isinstance(n, ast.Call) and last_name(n.func) in names]


def targets(file: SourceFile, call: ast.Call) -> list[str]:
    """What the value of a call is assigned to."""
    statement = file.statement(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [ast.unparse(t) for t in targets if isinstance(t, ast.expr)]


def function_at(file: SourceFile, line: int, function: str) -> Function | None:
    """The function of this name that begins on a line, decorators included; None where there are several."""
    found: list[Function] = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Lambda):
            if function == "<lambda>" and node.lineno == line:
                found.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if (node.name, first) == (function, line):
                found.append(node)
    return found[0] if len(found) == 1 else None
