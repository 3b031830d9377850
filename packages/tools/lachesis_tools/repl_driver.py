"""Executes cells of Python in one namespace, inside the sandbox. `tools.python` reads it as text; Python >= 3.8.

Requests are JSON lines on the original stdin. Cells see an empty stdin and write to the original stdout, as their
subprocesses do; the driver writes `<nonce><status>\\n` after the output of a cell.
"""

import contextlib
import linecache
import os
import sys
import traceback
import types
from ast import Expr, Expression, parse
from builtins import compile, eval, exec, print, repr
from json import loads
from os import _exit, getpid, write

# Imported names: a cell that replaces `json.loads` or `print` must not break the driver.


def main() -> None:
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(1, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", write_through=True
        )
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    owner = getpid()
    for number, line in enumerate(iter(requests.readline, ""), 1):
        request = loads(line)
        for name in ("stdout", "stderr"):
            if getattr(sys, name, None) is None:  # without a stream, a traceback would be lost
                setattr(sys, name, getattr(sys, f"__{name}__"))
        failed = run(request["code"], f"<cell {number}>", module.__dict__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if getpid() != owner:  # a child that the cell forked: later cells belong to its parent
            _exit(int(failed))
        write(replies, f"{request['nonce']}{'E' if failed else 'K'}\n".encode())


def run(code: str, filename: str, namespace: dict) -> bool:  # type: ignore[type-arg]
    """Execute one cell and echo the value of its last expression. Returns whether it raised."""
    linecache.cache[filename] = (len(code), None, [line + "\n" for line in code.split("\n")], filename)
    try:
        tree = parse(code, filename)
        tail = tree.body[-1] if tree.body else None
        last = tail.value if isinstance(tail, Expr) else None
        if last is not None:
            tree.body.pop()
        exec(compile(tree, filename, "exec"), namespace)
        if last is not None:
            value = eval(compile(Expression(last), filename, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        report(error)
        return True
    return False


def report(error: BaseException) -> None:
    """Print the traceback without the frames of the driver."""
    try:
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
            frames = frames.tb_next
        for text in traceback.format_exception(type(error), error, frames):
            print(text, end="", file=sys.stderr)
    except BaseException:
        write(2, f"{type(error).__name__} (its traceback cannot be printed)\n".encode())


if __name__ == "__main__":
    main()
