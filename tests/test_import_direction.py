"""The import rule of the package, read off its source: what may import what, and where torch and mcp may come in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p.relative_to(ROOT) for top in ("gradtracer", "mcp_server") for p in (ROOT / top).rglob("*.py"))


def imports(path: Path, *, within_functions: bool) -> Iterator[str]:
    """Full names of what a file imports, at module level or anywhere; imports for type checkers only do not count."""
    todo: list[ast.AST] = [ast.parse((ROOT / path).read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not within_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


def is_of(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def in_folder(path: Path, *folders: str) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


TORCH_SIDE = ("gradtracer/training", "gradtracer/compression")
# The demo trains a network in a process of its own.
TORCH_USERS = (*TORCH_SIDE, "gradtracer/demo")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    at_module_level = set(imports(path, within_functions=False))
    anywhere = set(imports(path, within_functions=True))

    if not in_folder(path, *TORCH_USERS):
        assert not [n for n in at_module_level if is_of(n, "torch")]
        if not in_folder(path, "gradtracer/fixes"):
            assert not [n for n in anywhere if is_of(n, "torch")]
        assert not [n for n in at_module_level if is_of(n, "gradtracer.training", "gradtracer.compression")]
    if in_folder(path, "gradtracer") and not in_folder(path, "gradtracer/demo"):
        assert not [n for n in anywhere if is_of(n, "mcp", "mcp_types")]
        assert not [n for n in at_module_level if is_of(n, "mcp_server")]
        if path not in (Path("gradtracer/cli.py"), Path("gradtracer/__main__.py")):
            assert not [n for n in at_module_level if is_of(n, "gradtracer.cli")]
    if in_folder(path, "gradtracer/records"):
        assert not [n for n in anywhere if is_of(n, "gradtracer") and not is_of(n, "gradtracer.records")]
