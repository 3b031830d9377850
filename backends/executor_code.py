"""The executor as one file, which backends send to where it runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import marshal
import pkgutil

from backends.first_use import in_turn, parse


@in_turn
@functools.lru_cache(maxsize=None)
def executor_source() -> bytes:
    """The file, for Python 3.8 or later: each module after those that it imports, without these imports.

    A test checks that names are unique over all modules.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in parts:
            return
        text = (pkgutil.get_data("backends.executor", f"{name}.py") or b"").decode()
        lines = text.splitlines(keepends=True)
        for node in reversed(parse(text).body):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                assert node.module is not None, f"{name} imports the package itself"
                add(node.module)
            elif not _is_left_out(node):
                continue
            del lines[node.lineno - 1 : node.end_lineno]
        parts[name] = f"# {name}.py\n" + "".join(lines).strip("\n")

    add("main")
    return "\n\n\n".join(["from __future__ import annotations", *parts.values()]).encode() + b"\n"


def _is_left_out(node: ast.stmt) -> bool:
    """Whether a statement is for readers and type checkers only."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("__future__", "typing")
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@in_turn
@functools.lru_cache(maxsize=None)
def executor_bytecode() -> bytes:
    """The file as a .pyc for the running interpreter, and no other version: it starts without compiling."""
    code = compile(executor_source(), "executor.py", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code)


@in_turn
@functools.lru_cache(maxsize=None)
def modules() -> tuple[str, ...]:
    """The modules of the standard library that it imports anywhere, sorted."""
    found = set()
    for node in ast.walk(parse(executor_source())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return tuple(sorted(found - {"__future__"}))
