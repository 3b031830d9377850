"""The child process of `generators`: one JSON question a line in, one JSON answer a line out.

It runs by itself, as a file, and imports nothing of the project. reasoning-gym's own scorers call `eval` on what the
model answers, some through sympy. Here that is Python literals, and sympy's expressions, but no other code; and an
answer that takes more than its CPU time or memory ends this process, not the run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "reasoning_gym"
WHOLE = ("coaching", "data")
"""Packages whose `__init__` is run. The others import every generator of a kind, with all that these need."""
MAX_MEMORY = 4 << 30
"""Bytes of address space."""
MAX_SECONDS = 10.0
"""CPU time of one question. The kernel ends the process then: arithmetic in C notices no timer of Python."""
_EXPRESSION = (ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List)
_OPERATORS = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Compare, ast.cmpop)
_OTHER_NAMES: dict[str, dict[str, Any]] = {
    "coin_flip": {"min": max},
    "complex_arithmetic": {"min": lambda *given: 0.0 if any(map(math.isnan, given)) else min(given)},
}
"""Of modules whose scorers give full marks for `0`, with which every probability begins, and for `nan`."""
_FUNCTIONS = ("sqrt", "cbrt", "root", "real_root")


def main() -> None:
    # Some generators print.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        channel.write(json.dumps({"missing": "reasoning_gym"}) + "\n")
        return
    generators = PackageGenerators(Path(spec.submodule_search_locations[0]))
    channel.write(json.dumps({"names": sorted(generators.modules)}) + "\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            answer = generators.answer(**json.loads(line))
        except ModuleNotFoundError as error:
            answer = {"missing": error.name}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.write(json.dumps(answer) + "\n")


class PackageGenerators:
    """The generators of the package in the folder `root`, each imported when it is asked for."""

    def __init__(self, root: Path) -> None:
        sys.path.append(str(Path(__file__).parent))
        self.solution = importlib.import_module("solutions").solution
        self.root = root
        self.modules: dict[str, str] = {}
        """Name -> module that registers it."""
        self.made: dict[str, Any] = {}
        for path in root.rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.name == "factory.py" or "register_dataset(" not in text:
                continue
            for name in re.findall(r'^DATASET_NAME = "(\w+)"|^register_dataset\(\s*"(\w+)"', text, re.MULTILINE):
                module = path.relative_to(root).with_suffix("").parts
                self.modules["".join(name)] = ".".join((PACKAGE, *module))
        for folder in (root, *(path.parent for path in root.glob("*/__init__.py") if path.parent.name not in WHOLE)):
            package = ".".join((PACKAGE, *folder.relative_to(root).parts))
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]

    def answer(self, generator: str, config: dict[str, Any], index: int, answer: str | None = None) -> dict[str, Any]:
        """The problem `index`; with `answer`, the score of that."""
        dataset = self.dataset(generator, config)
        entry = dataset[index]
        right = entry["answer"]
        if right is None:
            right = self.solution(generator, entry["metadata"])
        if answer is None:
            category = self.modules[generator].split(".")[1]
            return {"question": entry["question"], "answer": right, "category": category}
        try:
            return {"score": float(dataset.score_answer(answer, entry))}
        except Exception as error:  # it cannot read this answer, if it can read the right one
            dataset.score_answer(right, entry)
            return {"score": 0.0, "unreadable": f"{type(error).__name__}: {error}"[:300]}

    def dataset(self, generator: str, config: dict[str, Any]) -> Any:
        key = json.dumps([generator, config])
        if key not in self.made:
            self.load(generator)
            if generator == "composite":
                config = {**config, "datasets": self.composed(config.get("datasets") or ["chain_sum", "leg_counting"])}
            self.made[key] = importlib.import_module(f"{PACKAGE}.factory").create_dataset(generator, **config)
        return self.made[key]

    def composed(self, datasets: list[Any]) -> list[Any]:
        """The parts of a composite: names, or `{"name", "weight", "config"}`."""
        parts = [{"name": each} if isinstance(each, str) else each for each in datasets]
        for part in parts:
            self.load(part["name"])
        make = importlib.import_module(self.modules["composite"]).DatasetSpec
        return [make(**{"weight": 1.0, "config": {}, **part}) for part in parts]

    def load(self, generator: str) -> None:
        module = importlib.import_module(self.modules[generator])
        if re.search(r"\beval\(answer\)", Path(module.__file__ or "").read_text(encoding="utf-8")):
            vars(module)["eval"] = ast.literal_eval
        vars(module).update(_OTHER_NAMES.get(generator, {}))
        if parser := sys.modules.get("sympy.parsing.sympy_parser"):
            vars(parser)["eval"] = expression


def expression(code: Any, names: dict[str, Any], local: dict[str, Any]) -> Any:
    """`eval` for sympy's parser: numbers, and what is sympy's own."""
    basic = sys.modules["sympy"].Basic
    functions = [getattr(sys.modules["sympy"], name) for name in _FUNCTIONS]
    tree = ast.parse(code, mode="eval") if isinstance(code, str) else None
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, (*_EXPRESSION, *_OPERATORS)):
            raise ValueError(f"{type(node).__name__} is not a part of an expression")
        if isinstance(node, ast.Name):
            value = local.get(node.id, names.get(node.id))
            known = isinstance(value, basic) or (isinstance(value, type) and issubclass(value, basic))
            if not known and not any(value is function for function in functions):
                raise ValueError(f"{node.id} is not a name of an expression")
    if tree is None:
        raise ValueError("expected the text of an expression")
    run: Callable[..., Any] = eval
    return run(compile(tree, "<answer>", "eval"), names, local)


if __name__ == "__main__":
    main()
