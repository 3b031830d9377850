"""The executor as one file, which backends send to where it runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import marshal
import pkgutil
import threading
from typing import Callable, TypeVar

T = TypeVar("T")

_LOCK = threading.RLock()


def _once(compute: Callable[[], T]) -> Callable[[], T]:
    """Compute a value at the first call, in one thread at a time.

    Python 3.11 may raise `SystemError: AST constructor recursion depth mismatch` when two threads call `ast.parse`.
    """
    cached = functools.lru_cache(maxsize=None)(compute)  # Python 3.8: far machines run this as well

    @functools.wraps(compute)
    def locked() -> T:
        with _LOCK:
            return cached()

    return locked


@_once
def source() -> bytes:
    """The file, for Python 3.8 or later: each module after those that it imports, without these imports.

    A test checks that names are unique over all modules.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name in parts:
            return
        text = (pkgutil.get_data("backends.executor", f"{name}.py") or b"").decode()
        lines = text.splitlines(keepends=True)
        for node in reversed(ast.parse(text).body):
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


@_once
def bytecode() -> bytes:
    """The file as a .pyc for the running interpreter, and no other version: it starts without compiling."""
    code = compile(source(), "executor.py", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code)


@_once
def modules() -> tuple[str, ...]:
    """The modules of the standard library that it imports anywhere, sorted."""
    found = set()
    for node in ast.walk(ast.parse(source())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return tuple(sorted(found - {"__future__"}))
