"""The tool `search_files`: grep and find, with results that no file name can corrupt.

Names are NUL-terminated and sorted, so that the same tree gives the same result. The sandbox needs GNU grep and find,
which all but the smallest Linux distributions with bash have.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import Annotated, Literal

from pydantic import Field

from backends.base import ExecResult
from backends.tasks import in_own_thread
from lachesis_tools.files import file_error
from lachesis_tools.text import printable
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

MAX_LINE_CHARS = 400
"""The most characters of a matching line that are shown."""

MAX_PATTERN_CHARS = 4000
"""The pattern is part of an argument of at most 128 KiB, where quoting multiplies characters."""

_TIMEOUT = 50.0
_MAX_BYTES = 2_000_000
_BAD_PATTERN = 3
_NO_PATH = 4
_NO_GREP = 5

_SCRIPT = r"""
[ -e "$root" ] || exit 4
command -v grep >/dev/null && command -v find >/dev/null || exit 5
mode=-P
printf x | grep -qP x 2>/dev/null || mode=-E
if [ "$kind" = content ]; then
  grep "$mode" -e "$pattern" </dev/null >/dev/null
  [ $? -gt 1 ] && exit 3
fi
export LC_ALL="$charset"
list() {
  find -H "$root" \( -name .git -o -name .hg -o -name .svn \) -type d -prune -o -type f "$@" -print0 2>/dev/null |
    LC_ALL=C sort -z
}
scan() {
  if [ "$kind" = files ]; then cat; return; fi
  xargs -0 grep -HIsn --null "$mode" "${options[@]}" -e "$pattern" --
}
"""

_RECORD = re.compile(rb"--\n|([^\0]+)\0(\d+)([:-])([^\n]*)(?:\n|\Z)")
_AS_ONE = re.compile(r"\[[^\]]*[^\x00-\x7f]|[^\x00-\x7f][*+?{]")
"""A character of several bytes that a pattern needs as one: in brackets, or repeated."""
_COUNT = re.compile(rb"([^\0]+)\0(\d+)\n")


@tool(toolset="file", concurrency_safe=True)
async def search_files(
    session: ToolSession,
    pattern: str,
    target: Literal["content", "files"] = "content",
    path: str = ".",
    file_glob: str | None = None,
    limit: Annotated[int, Field(ge=1, le=1000)] = 50,
    offset: Annotated[int, Field(ge=0)] = 0,
    output_mode: Literal["content", "files_only", "count"] = "content",
    context: Annotated[int, Field(ge=0, le=20)] = 0,
) -> str:
    """Search the text of files with a Perl-style regular expression, or search for files by name. Binary files and
    version-control folders such as .git are left out. Matching lines come as path:line:text.

    Args:
        pattern: A regular expression for the content of files. With target=files a name such as '*.py'; without
            wildcards any name that contains it.
        target: content searches inside files, files searches names.
        path: Folder or file to search in. A relative path starts at the initial working directory.
        file_glob: Search only files with such names, for example '*.py'.
        limit: Most results to return.
        offset: Results to leave out at the start, to see the next page.
        output_mode: With target=content, show matching lines, only the names of files, or the number of matching
            lines of each file.
        context: Lines to show before and after each match.
    """
    if not pattern or "\0" in pattern + (file_glob or ""):
        raise ToolFailure("the pattern is empty or contains a NUL character")
    if len(pattern) + len(file_glob or "") > MAX_PATTERN_CHARS:
        raise ToolFailure(f"pattern and file_glob may have {MAX_PATTERN_CHARS} characters; shorten them")
    if "\n" in pattern and target == "content":
        raise ToolFailure("the pattern contains a line break; lines are searched one by one")
    sandbox = await session.sandbox()
    root = await session.path(path)
    base = await session.path(".")
    names = [file_glob] if file_glob else []
    if target == "files":
        names.append(pattern if re.search(r"[*?\[]", pattern) else f"*{pattern}*")
    options = {"files_only": ["-l"], "count": ["-c"]}.get(output_mode, [f"-C{context}"] if context else [])
    settings = {
        "root": root,
        "kind": target,
        "pattern": pattern,
        # In the C locale no file is skipped for its encoding.
        "charset": "C.UTF-8" if _AS_ONE.search(pattern) else "C",
    }
    script = "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items())
    script += f"options=({shlex.join(options)})\n{_SCRIPT}"
    script += f"list {shlex.join(_name_tests(names))} | scan | head -c {_MAX_BYTES}"
    # In a separate bash with the initial environment of the sandbox: it does not affect the model's shell, and changes
    # in the model's shell, for example of its PATH, do not affect it.
    done = await sandbox.exec(
        f"bash -c {shlex.quote(script)}", timeout=_TIMEOUT, cwd="/", fresh=True, max_output=_MAX_BYTES + 1000
    )
    if done.exit_code == _NO_PATH:
        raise await file_error(sandbox, root, FileNotFoundError(root))
    if done.exit_code == _BAD_PATTERN:
        reason = done.stderr.decode(errors="replace").strip().removeprefix("grep: ")
        raise ToolFailure(f"invalid regular expression {pattern!r}: {reason}")
    if done.exit_code == _NO_GREP:
        raise ToolFailure("this sandbox has no grep and find; search_files needs them")
    if done.exit_code != 0 and not done.timed_out:
        raise ToolFailure(f"the search failed: {printable(done.stderr).strip() or f'exit code {done.exit_code}'}")
    if target == "files" or output_mode == "files_only":
        found = [_name(each, base) for each in done.stdout.split(b"\0")[:-1]]
    elif output_mode == "count":
        counts = ((each[1], int(each[2])) for each in _COUNT.finditer(done.stdout))
        found = [f"{_name(name, base)}: {count}" for name, count in counts if count]
    else:  # in a thread: there may be 100,000 of them
        found = await in_own_thread(_matches, done.stdout, base)
    notes = _notes(found, offset, offset + limit, done)
    separator = "\n--\n" if context and output_mode == "content" else "\n"
    body = separator.join(found[offset : offset + limit])
    return "\n".join(([body] if body else []) + notes)


def _name_tests(globs: list[str]) -> list[str]:
    tests = []
    for glob in globs:
        tests += ["-path", f"*/{glob.removeprefix('./').removeprefix('**/')}"] if "/" in glob else ["-name", glob]
    return tests


def _name(raw: bytes, base: str) -> str:
    """A path for the model: relative to the working folder if inside it, with unprintable characters escaped."""
    path = raw.decode("utf-8", errors="backslashreplace")
    if path.startswith(base.rstrip("/") + "/"):
        path = posixpath.relpath(path, base)
    return path if path.isprintable() else repr(path)


def _matches(output: bytes, base: str) -> list[str]:
    """One entry per match; with context, one per group of adjacent lines."""
    entries: list[list[str]] = []
    grouped = b"\n--\n" in output or any(each[3] == b"-" for each in _RECORD.finditer(output) if each[1])
    fresh = True
    for each in _RECORD.finditer(output):
        if each[1] is None:
            fresh = True
            continue
        sign = each[3].decode()
        text = printable(each[4]).rstrip("\r")
        if len(text) > MAX_LINE_CHARS:
            text = f"{text[:MAX_LINE_CHARS]} [... {len(text) - MAX_LINE_CHARS} more characters]"
        line = f"{_name(each[1], base)}{sign}{each[2].decode()}{sign}{text}"
        if fresh or not grouped:
            entries.append([line])
            fresh = False
        else:
            entries[-1].append(line)
    return ["\n".join(entry) for entry in entries]


def _notes(found: list[str], start: int, stop: int, done: ExecResult) -> list[str]:
    """What the page from `start` to before `stop` does not show."""
    notes = []
    cut_off = len(done.stdout) >= _MAX_BYTES
    complete = not done.timed_out and not cut_off
    total = f"{len(found)}" if complete else f"more than {len(found)}"
    last = min(stop, len(found))
    if not found:
        notes.append("[no matches]")
    elif start >= len(found):
        notes.append(f"[offset {start} is past the last of {total} results]")
    elif start or last < len(found) or not complete:
        more = f"; continue with offset={last}" if last < len(found) else ""
        notes.append(f"[results {start + 1}-{last} of {total}{more}]")
    if done.timed_out:
        notes.append(f"[the search was stopped after {_TIMEOUT:g} s and is not complete; choose a smaller path]")
    elif cut_off:
        notes.append("[too much output, the rest was not searched; narrow the pattern, path or file_glob]")
    trouble = printable(done.stderr).strip()
    if trouble and not cut_off:  # else it is the closed pipe of the cut-off output
        notes.append(f"[not everything was searched: {trouble[:MAX_LINE_CHARS]}]")
    return notes
