"""The executor as something to send to where it runs."""

from __future__ import annotations

import ast
import functools
import importlib.util
import marshal
from pathlib import Path

_FILE = Path(__file__).with_name("executor.py")


@functools.cache
def source() -> bytes:
    """The file, for any Python from 3.8 on."""
    return _FILE.read_bytes()


@functools.cache
def bytecode() -> bytes:
    """The file as a .pyc for the interpreter that runs this, and no other: it need not be compiled at every start."""
    code = compile(source(), "executor.py", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code)


@functools.cache
def modules() -> tuple[str, ...]:
    """Names of the standard library's modules that it imports, in any function, in any mode; sorted."""
    found = set()
    for node in ast.walk(ast.parse(source())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return tuple(sorted(found - {"__future__"}))
