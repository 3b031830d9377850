"""The executor as something to send to where it runs: its modules, joined to one file."""

from __future__ import annotations

import ast
import functools
import importlib.util
import marshal
import pkgutil


@functools.lru_cache(maxsize=None)  # Python 3.8: far machines run this as well
def source() -> bytes:
    """One file, for any Python from 3.8 on: each module after those that it imports from, without these imports.

    Names are therefore unique over all modules, which a test sees to.
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
    """What only readers and type checkers need."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("__future__", "typing")
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.lru_cache(maxsize=None)  # Python 3.8: far machines run this as well
def bytecode() -> bytes:
    """The file as a .pyc for the interpreter that runs this, and no other: it need not be compiled at every start."""
    code = compile(source(), "executor.py", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code)


@functools.lru_cache(maxsize=None)  # Python 3.8: far machines run this as well
def modules() -> tuple[str, ...]:
    """Names of the standard library's modules that it imports, in any function, in any mode; sorted."""
    found = set()
    for node in ast.walk(ast.parse(source())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return tuple(sorted(found - {"__future__"}))
