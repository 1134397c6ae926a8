"""The user's program as text: which expression computes a loss, and which call builds an optimizer.

Python tells the line of a call while it runs. From there the source is read, once: the last assignment to what
`backward` was called on, the function of the user's that it comes from, and what that returns. Where the source leaves
more than one answer there is none.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from gradtracer.records import SourceLocation
from gradtracer.training.source import (
    Assignment,
    Function,
    Scope,
    SourceFile,
    assignments,
    call_at,
    constructions,
    element,
    ends,
    function_at,
    is_rescaled,
    last_name,
    read,
    starts,
    subject,
    targets,
    without_factor,
)
from gradtracer.training.stack import Call, Place, is_users, user_calls, user_places

log = logging.getLogger("gradtracer")

_MAX_DEPTH = 8
_MAX_CALLS = 64
T = TypeVar("T")


class Program:
    """What is known of the program that trains a model.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: set[Call] = set()
        self._updates: dict[int, tuple[Place, ...]] = {}
        self._built: dict[int, SourceLocation | None] = {}
        self._losses: dict[tuple[Any, ...], SourceLocation | None] = {}
        self._is_off = False

    def note_forward(self) -> None:
        """A module runs: remember which functions of the user's led to it."""
        if len(self._calls) < _MAX_CALLS:
            self._calls |= user_calls()

    def note_update(self, optimizer: Optimizer) -> None:
        """The user's program calls `optimizer.step()`: remember from where it first did."""
        if id(optimizer) not in self._updates:
            self._updates[id(optimizer)] = user_places()

    def loss_line(self, *, factors: bool = False) -> SourceLocation | None:
        """Where the loss is computed that the user's program calls backward on; to be asked for while it does.

        Args:
            factors: Stop at an expression that only multiplies or divides the loss; else see through it.
        """
        places = user_places()
        key = (places, len(self._calls), factors)
        if key not in self._losses:
            self._losses[key] = self._harmless(lambda: _Search(places, self._calls, factors).loss())
        return self._losses[key]

    def optimizer_line(self, optimizer: Optimizer) -> SourceLocation | None:
        """Where an optimizer is built."""
        if id(optimizer) not in self._updates:
            return None
        if id(optimizer) not in self._built:
            self._built[id(optimizer)] = self._harmless(lambda: self._construction(optimizer))
        return self._built[id(optimizer)]

    def _construction(self, optimizer: Optimizer) -> SourceLocation | None:
        places = self._updates[id(optimizer)]
        files = [p.file for p in places] + [f for c in self._calls for f in (c.file, c.callee_file)]
        for module in (sys.modules.get("__main__"), sys.modules.get(type(self._model).__module__)):
            if file := _namespace(module).get("__file__"):
                files.append(os.path.abspath(file))
        chosen = {os.path.abspath(f): f for f in reversed(files) if is_users(f)}
        return _optimizer_line(type(optimizer).__name__, places, list(chosen.values()))

    def _harmless(self, search: Callable[[], T]) -> T | None:
        """Odd code costs its location, no more."""
        if self._is_off:
            return None
        try:
            return search()
        except Exception:
            self._is_off = True
            log.warning("gradtracer gives no source locations: reading the program's source failed", exc_info=True)
            return None


class _Search:
    """One search for the expression that computed a loss.

    Args:
        places: Where backward was called, innermost first.
        calls: Calls from the user's program to itself that were seen.
        factors: Whether to stop at a factor of the loss.
    """

    def __init__(self, places: Sequence[Place], calls: Iterable[Call], factors: bool) -> None:
        self._places, self._calls, self._factors = places, tuple(calls), factors
        self._depth = 0

    def loss(self) -> SourceLocation | None:
        file = read(self._places[0].file) if self._places else None
        call = call_at(file, self._places[0].line, "backward") if file else None
        if file is None or call is None:
            return None
        loss = subject(call)
        return self._origin(loss, file, 0) if loss is not None else None

    def _origin(self, expression: ast.expr, file: SourceFile, frame: int | None) -> SourceLocation | None:
        """Where the value of an expression is computed; None where that is not known.

        Args:
            expression: The expression.
            file: Where it stands.
            frame: Which of the running functions it stands in; None for one that has returned.
        """
        expression = expression if self._factors else without_factor(expression)
        if isinstance(expression, (ast.Name, ast.Attribute, ast.Subscript)):
            return self._assigned(expression, file, frame)
        return self._deeper(expression, file, None) or file.location(file.statement(expression))

    def _deeper(self, expression: ast.expr, file: SourceFile, index: int | None) -> SourceLocation | None:
        """Where a function of the user's that the expression calls computes what it returns."""
        if not isinstance(expression, ast.Call) or self._depth >= _MAX_DEPTH:
            return None
        found = self._callee(expression, file)
        if found is None:
            return None
        self._depth += 1
        return self._returned(*found, index)

    def _returned(self, file: SourceFile, function: Function, index: int | None) -> SourceLocation:
        if isinstance(function, ast.Lambda):
            values = [function.body]
        else:
            values = [n.value for n in file.own(function) if isinstance(n, ast.Return) and n.value is not None]
            values = [v for v in values if not isinstance(v, ast.Constant)]
        if len(values) != 1:
            return file.location(function)
        return self._origin(element(values[0], index), file, None) or file.location(function)

    def _assigned(self, target: ast.expr, file: SourceFile, frame: int | None) -> SourceLocation | None:
        """Where what was last assigned to a name, attribute or item before its use is computed."""
        name, scope = ast.unparse(target), file.scope(target)
        found = [a for a in assignments(file, scope, name) if ends(a.statement) <= starts(target)]
        found = [a for a in found if not isinstance(a.value, ast.Constant)] or found
        while len(found) > 1 and not self._factors and is_rescaled(found[-1], name):
            found.pop()
        if not found:
            return self._argument(name, scope, frame)
        last = found[-1]
        around = file.arms(target)
        if any(around.get(block) != arm for block, arm in file.arms(last.statement).items()) and len(found) > 1:
            return None  # it depends on a condition which of them it was
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            return None
        value = element(last.value, last.index)
        if value is last.value and last.index is not None:
            return self._deeper(value, file, last.index) or file.location(last.statement)
        if not isinstance(last.statement, ast.AugAssign) and (deeper := self._origin(value, file, frame)) is not None:
            return deeper
        return file.location(last.statement)

    def _argument(self, name: str, scope: Scope, frame: int | None) -> SourceLocation | None:
        """Where what the caller passed under this name is computed."""
        if frame is None or frame + 1 >= len(self._places) or not isinstance(scope, ast.FunctionDef):
            return None
        place = self._places[frame + 1]
        file = read(place.file)
        call = call_at(file, place.line, self._places[frame].function) if file else None
        if file is None or call is None:
            return None
        names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        given = {k.arg: k.value for k in call.keywords} | dict(zip(names, call.args, strict=False))
        value = given.get(name)
        return self._origin(value, file, frame + 1) if value is not None else None

    # ------------------------------------------------------------------ which function a call calls

    def _callee(self, call: ast.Call, file: SourceFile) -> tuple[SourceFile, Function] | None:
        return self._seen_callee(call, file) or self._written_callee(call.func, file)

    def _seen_callee(self, call: ast.Call, file: SourceFile) -> tuple[SourceFile, Function] | None:
        """The function that was seen to be called from there."""
        name = last_name(call.func)
        is_only_call = sum(isinstance(n, ast.Call) for n in ast.walk(call)) == 1
        seen = {
            (c.callee_file, c.callee_line, c.callee)
            for c in self._calls
            if c.file == file.name and starts(call) <= c.line <= ends(call) and (is_only_call or c.callee == name)
        }
        return _function_at(*seen.pop()) if len(seen) == 1 else None

    def _written_callee(self, function: ast.expr, file: SourceFile) -> tuple[SourceFile, Function] | None:
        """The function that the source says is called there."""
        name = ast.unparse(function)
        for scope in file.up(function):
            if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in file.own(scope):
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                        return file, node
                if found := self._held(file, assignments(file, scope, name)):
                    return found
            elif isinstance(scope, ast.ClassDef) and name.startswith("self."):
                methods = [n for n in scope.body if isinstance(n, ast.FunctionDef)]
                if (method := next((m for m in methods if f"self.{m.name}" == name), None)) is not None:
                    return file, method
                return self._held(file, [a for m in methods for a in assignments(file, m, name)])
        return _function_of(_value(function, file))

    def _held(self, file: SourceFile, found: Sequence[Assignment]) -> tuple[SourceFile, Function] | None:
        """The function that a name stands for to which this was assigned: a lambda, or an object that is callable."""
        if len(found) != 1 or found[0].index is not None:
            return None
        value = found[0].value
        if isinstance(value, ast.Lambda):
            return file, value
        kind = _value(value.func, file) if isinstance(value, ast.Call) else None
        return _method_of(kind) if isinstance(kind, type) else None


def _optimizer_line(kind: str, places: Sequence[Place], files: Sequence[str]) -> SourceLocation | None:
    """Where the optimizer of a class is built that steps from `places`; None where several calls could be it."""
    found = [(file, call) for file in map(read, files) if file for call in constructions(file, kind)]
    if len(found) > 1 and places:
        stepping = read(places[0].file)
        call = call_at(stepping, places[0].line, "step") if stepping else None
        if stepping is None or call is None:
            return None
        names = {ast.unparse(x) for x in (*call.args[:1], getattr(call.func, "value", None)) if x is not None}
        found = [(file, c) for file, c in found if names.intersection(targets(file, c))]
        around = set(stepping.up(call))
        found = [(file, c) for file, c in found if file.scope(c) in around] or found
    if len({(file.name, call.lineno) for file, call in found}) != 1:
        return None
    file, call = found[0]
    return file.location(call)


# ---------------------------------------------------------------------- objects of the running program


def _namespace(module: object) -> dict[str, Any]:
    # Not by attribute: a lazy module would load itself, and other things may pass for modules.
    return object.__getattribute__(module, "__dict__") if issubclass(type(module), types.ModuleType) else {}


def _value(expression: ast.expr, file: SourceFile) -> Any:
    """What a global name, or an attribute of a module, stands for; None where it is neither."""
    if isinstance(expression, ast.Name):
        for module in list(sys.modules.values()):
            namespace = _namespace(module)
            at = namespace.get("__file__") if expression.id in namespace else None
            if isinstance(at, str) and os.path.abspath(at) == os.path.abspath(file.name):
                return namespace[expression.id]
        return None
    if isinstance(expression, ast.Attribute):
        return _namespace(_value(expression.value, file)).get(expression.attr)
    return None


def _function_of(thing: object) -> tuple[SourceFile, Function] | None:
    """The source of a function, or of what calling an object runs; None where it is not the user's."""
    if isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, types.MethodType):
        thing = thing.__func__
    if isinstance(thing, types.FunctionType):
        code = inspect.unwrap(thing).__code__
        return _function_at(code.co_filename, code.co_firstlineno, code.co_name)
    return _method_of(type(thing)) if isinstance(thing, nn.Module) else None


def _method_of(kind: type) -> tuple[SourceFile, Function] | None:
    method = inspect.getattr_static(kind, "forward" if issubclass(kind, nn.Module) else "__call__", None)
    return _function_of(method) if isinstance(method, types.FunctionType) else None


def _function_at(name: str, line: int, function: str) -> tuple[SourceFile, Function] | None:
    file = read(name) if is_users(name) else None
    found = function_at(file, line, function) if file else None
    return (file, found) if file and found else None
