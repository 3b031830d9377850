"""The code that a run's rewards come from: the file of the environment's class, the modules that it imports, and the
data that they name (`own_data`).

It is compared by its syntax trees, without comments and without docstrings that nothing reads. Installed packages, this
one among them, are no part of it: a new version of one begins no other run.
"""

from __future__ import annotations

import ast
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from typing import Any

from lachesis import ours
from lachesis.runs import own_data

_NO_MEANING = frozenset({"type_comment", "type_ignores", "kind", "ctx"})
"""Fields of a syntax tree that do not affect its behaviour."""
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The files of an environment's own code.

    Args:
        file: where the class is, for messages; absolute.
        files: digests of the syntax trees, by the path from the folder of `file`.
        data: digests of the files that they name, by the same paths.
    """

    file: str
    files: Mapping[str, str]
    data: Mapping[str, str] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"file": self.file, "files": dict(self.files), "data": dict(self.data)}

    def change(self, before: Mapping[str, Any] | None, path: Path) -> str:
        """What is different from an earlier record, that of the run at `path`, in words; empty where nothing is, or
        where the record is of an older version, which had none. A file may have another name, but not that of another
        file before: then those that import it get other code."""
        if not before:
            return ""
        old, new = before["files"], self.files
        gone, come = (sorted(of[name] for name in of.keys() - other.keys()) for of, other in ((old, new), (new, old)))
        if gone == come and all(old[name] == new[name] for name in old.keys() & new.keys()):
            return _said(own_data.changed(before.get("data", {}), Path(before["file"]).parent, path), path)
        if before["file"] != self.file:
            return f"{path} was started by {_shown(before['file'])}, not by {_shown(self.file)}"
        return _said(sorted({name for name, _ in {*old.items()} ^ {*new.items()}}), path)


def _said(names: Sequence[str], path: Path) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} changed since {path} began" if names else ""


def _shown(file: str) -> str:
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here := Path.cwd()) else file


def code_of(env: Any) -> OwnCode | None:
    """The code of an environment, that of a guest which it plays included."""
    return own_code(type(env), getattr(env, "guest_modules", list)())


def own_code(env_cls: type, guest: Sequence[str] = ()) -> OwnCode | None:
    """The code of an environment; None where it has none of its own: it is installed, or typed into a console.

    Args:
        env_cls: its class. `stock_cls` is the class of Atropos that it plays.
        guest: modules or files of a guest that it plays.
    """
    classes = [*env_cls.__mro__, *getattr(getattr(env_cls, "stock_cls", None), "__mro__", ())]
    todo = dict.fromkeys([*guest, *(cls.__module__ for cls in classes)])
    digests: dict[Path, str] = {}
    data: dict[Path, None] = {}
    while todo:
        del todo[name := next(iter(todo))]
        path = _file_of(name) if name else None
        if path is None or path in digests:
            continue
        facts = path.stat()
        digests[path], imported, texts = _read(path, _package(name, path), facts.st_mtime_ns, facts.st_size)
        named = own_data.files(texts, path.parent)
        data |= named
        todo |= dict.fromkeys([*imported, *(str(each) for each in named if each.suffix == ".py")])
    if not digests:
        return None
    first = next(iter(digests))
    return OwnCode(
        str(first),
        {os.path.relpath(path, first.parent): digest for path, digest in digests.items()},
        {os.path.relpath(path, first.parent): own_data.digest(path) for path in data if path not in digests},
    )


def _file_of(name: str) -> Path | None:
    """The source of a module, or of a file, unless it is installed. Imports nothing."""
    module = sys.modules.get(name)
    found = name if name.endswith(".py") else getattr(module, "__file__", None) if module else _search(name)
    if not found or not found.endswith(".py"):
        return None
    path = Path(found).resolve()
    return path if path.is_file() and not _is_installed(path) else None


def _search(name: str) -> str | None:
    """Where an import would find a module that is not loaded; None also where one of its packages is installed."""
    places: Any = None
    spec = None
    for part in accumulate(name.split("."), "{}.{}".format):
        try:
            spec = PathFinder.find_spec(part, places)
            places = list(spec.submodule_search_locations or ()) if spec else []
        except Exception:  # of a package without a file whose parent is not loaded, or of somebody's finder
            return None
        if spec is None or (places and _is_installed(Path(places[0]).resolve())):
            return None
    return spec.origin if spec else None


@cache
def _installed() -> tuple[Path, ...]:
    paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(Path(path).resolve() for path in [*paths, site.getusersitepackages(), *ours.folders()])


def _is_installed(path: Path) -> bool:
    named = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(named) or any(path.is_relative_to(folder) for folder in _installed())


def _package(name: str, path: Path) -> str:
    """What relative imports of a module begin at."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None:  # also of `python -m package.module`
        return str(spec.parent or "")
    return name if path.name == "__init__.py" else name.removesuffix(".py").rpartition(".")[0]


@lru_cache(maxsize=1_000)
def _read(path: Path, package: str, *changed: int) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The digest of a file's syntax tree, the names of modules that it may import, and texts that may name files.
    `changed`: see `cache`."""
    source = path.read_bytes()
    try:
        tree = ast.parse(source)
        text, imported = _text(tree, _reads_docstrings(tree)), tuple(_imported(tree, package))
        texts = own_data.named(tree)
    except (SyntaxError, ValueError, RecursionError):  # no Python of this version; or too deep for any walk
        text, imported, texts = source.decode("utf-8", "replace"), (), ()
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16], imported, texts


def _reads_docstrings(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == "__doc__")
        or (isinstance(node, ast.Attribute) and node.attr in ("__doc__", "getdoc"))
        for node in ast.walk(tree)
    )


def _text(node: Any, docstrings: bool) -> str:
    """A tree in a form of ours: `ast.dump` writes another one in another version of Python."""
    if isinstance(node, list):
        return f"[{','.join(_text(each, docstrings) for each in node)}]"
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__}:{node!r}"
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NO_MEANING}
    read = docstrings or any(map(_is_of_tools, getattr(node, "decorator_list", ())))
    if isinstance(node, _DOCUMENTED) and not read and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    said = (f"{name}={_text(value, docstrings)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({','.join(said)})"


def _is_of_tools(decorator: ast.AST) -> bool:
    """Whether a decorator creates a tool, whose docstring the model reads."""
    return any("tool" in _name(node).lower() for node in ast.walk(decorator))


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
        elif isinstance(node, ast.Call) and _name(node.func) in ("__import__", "import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            names = [f"{package}{name}" if name.startswith(".") else name for name in names]
        for name in names:
            yield from accumulate(name.split("."), "{}.{}".format)
