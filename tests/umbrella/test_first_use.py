"""What is cached can be used by many threads at once from the first moment on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HAMMER = r'''
import gc, json, sys, tempfile, threading
from collections import Counter

THREADS = 64


class Finalized:
    """Garbage whose finalizer runs Python code, in the middle of whatever allocates."""

    def __del__(self):
        sum(range(3))


def littered(function):
    for _ in range(40):
        piece = Finalized()
        piece.self = piece
    return function()


def together(name, function, keep=lambda value: value):
    """The different values that the threads got, and what went wrong."""
    barrier, values, errors = threading.Barrier(THREADS), [], []

    def work():
        barrier.wait()
        try:
            values.append(littered(function))
        except BaseException as error:
            errors.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if len({id(value) for value in values}) > 1 and keep is id:
        errors.append(f"{name}: computed more than once")
    if len({repr(value) for value in values}) > 1 and keep is repr:
        errors.append(f"{name}: threads got different values")
    return errors


sys.setswitchinterval(1e-4)
gc.set_threshold(200, 1, 1)
from backends import executor_code
from backends.host import folders, program, runtime
from backends.modal import exec_stream
from backends.lazy import quiet_imports
from lachesis_envs.gsm8k import worked_solutions
from lachesis_tools import BUILTIN_TOOLS, python
import tool_call_parsers as parsers
import logging

errors = []
code = (executor_code.modules, executor_code.executor_bytecode, executor_code.executor_source)
for module in (*code, program.program, runtime._sources):
    errors += together(module.__name__, module, id)
errors += together("cache folder", folders._own_cache, id)
errors += together("entry point of Modal", exec_stream._program, id)
errors += together("driver", python._driver, id)
errors += together("sums", lambda: worked_solutions.evaluate("(1 + 2) * 3.5 - 4 / (5 + 6)"), repr)
for tool in BUILTIN_TOOLS.values():
    errors += together(tool.name, lambda: tool.model, id)
    errors += together(tool.name, lambda: json.dumps(tool.definition()), repr)


def registered():
    name = f"own{threading.get_ident()}"
    parsers.register_parser(name)(object)
    return name


errors += together("registrations", registered)
assert sum(name.startswith("own") for name in parsers.list_parsers()) > 0
lost = THREADS - sum(name.startswith("own") for name in parsers.list_parsers())
if lost:
    errors.append(f"{lost} registrations of parsers are lost")
TEXT = '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'


def said(parser):
    parsed = parser.parse(TEXT)
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


for name in [name for name in parsers.list_parsers() if not name.startswith("own")]:
    try:
        parsers.get_parser(name)
    except Exception:
        continue  # it needs a tokenizer
    errors += together(f"parser {name}", lambda: said(parsers.get_parser(name)), repr)


def quietly():
    with quiet_imports():
        import colorsys


errors += together("quiet imports", quietly)
if logging.root.manager.disable:
    errors.append("logging stays off")
print(json.dumps(errors))
'''


@pytest.mark.slow
def test_the_first_use_of_everything_cached_is_safe_with_64_threads_at_once() -> None:
    """In a process of its own, where nothing is cached yet, with many switches of threads and much garbage."""
    done = subprocess.run([sys.executable, "-c", HAMMER], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
