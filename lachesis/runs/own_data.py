"""The data that an environment's own code reads: files next to it, or in the folder of the run, that its strings name.

`open("weights.json")`, `Path(__file__).parent / "rubrics" / "style.txt"` and `subprocess.run([sys.executable,
"judge.py"])` decide scores as code does. A name that is put together while the program runs is not seen.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

_LONGEST_NAME, _MOST_NAMES, _LARGEST = 200, 2_000, 64 << 20
_GROWING: Final = frozenset({".jsonl", ".csv", ".tsv"})
"""Rows may be appended to such files: the old ones stay the same."""
_OF_THE_SANDBOX: Final = frozenset(
    (
        *("read_file", "write_file", "read_text", "read_json", "search", "terminal"),
        *("download_file", "download_dir", "patch"),
    )
)
"""Methods of `ctx`, whose paths are no files here."""
_WRITES: Final = frozenset(
    {"write_text", "write_bytes", "to_csv", "to_json", "to_parquet", "to_pickle", "savefig", "savetxt", "FileHandler"}
)


def named(tree: ast.AST) -> tuple[str, ...]:
    """The texts of a module that may name a file that it reads."""
    found = dict.fromkeys(_texts(tree))
    return tuple(found)[:_MOST_NAMES]


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and _reads_nothing(node):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _may_be_name(node.value):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _reads_nothing(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "open":
        given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and {*str(mode.value)} & {*"wax+"} for mode in given)
    return name in _WRITES or (name in _OF_THE_SANDBOX and bool(call.args or call.keywords))


def _may_be_name(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and text.isprintable() and not text.startswith(("~", "-", "http:", "https:"))


def files(texts: Iterable[str], folder: Path) -> dict[Path, None]:
    """The regular files that the texts of a module in `folder` name, in it or in the working folder, also together with
    a folder that another text names."""
    texts, roots = list(texts), dict.fromkeys((folder, Path.cwd()))
    folders = [path for root in roots for text in texts for path in [_below(root, text)] if path and path.is_dir()]
    found: dict[Path, None] = {}
    for root in dict.fromkeys([*roots, *folders[:20]]):
        for text in texts:
            path = _below(root, text)
            if path is not None and path.is_file() and not path.name.startswith("."):
                found[path.resolve()] = None
    return found


def _below(root: Path, text: str) -> Path | None:
    try:
        path = Path(os.path.normpath(root / text))
        path.stat()
    except (OSError, ValueError):
        return None
    return path if path != root and any(path.is_relative_to(place) for place in (root, Path.cwd())) else None


def digest(path: Path, length: int | None = None) -> str:
    """`HASH-LENGTH` of a file, or of its first `length` bytes; without a hash where it is too large or not readable."""
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            return f"-{size}"
        with path.open("rb") as file:
            data = file.read(length)
    except OSError:
        return "-0"
    return f"{hashlib.sha256(data).hexdigest()[:16]}-{len(data)}"


def changed(before: Mapping[str, str], folder: Path, run: Path) -> list[str]:
    """Names of files that have changed since the run at `run` started.

    What changed before the run finished its last group was written by the run itself, or is in its scores as well.
    """
    ended = run.stat().st_mtime_ns if run.exists() else 0
    return [name for name, old in before.items() if _is_changed(folder / name, old, ended, run)]


def _is_changed(path: Path, old: str, ended: int, run: Path) -> bool:
    try:
        facts = path.stat()
    except OSError:
        return False
    if facts.st_mtime_ns <= ended or path.resolve().is_relative_to(run.resolve().parent):
        return False
    appended = path.suffix in _GROWING and facts.st_size > int(old.rpartition("-")[2])
    return digest(path, int(old.rpartition("-")[2]) if appended else None) != old
