"""Calling bash, and carrying its folder and exported variables over to the next shell."""

from __future__ import annotations

import os
import re

from .kernel import REPORT_FD

ARGUMENT = 100_000
"""Bytes of an argument into which a long command is split. The kernel's limit, also for a variable, is 128 KiB."""
ENVIRONMENT = 1_000_000
"""Bytes of variables that carry over. With more than about 2 MiB, the kernel could start no command."""
NAMED = 20
"""How many variables are reported by name when they do not carry over."""

# `builtin`, because the command may have functions called `set` or `exit`; a DEBUG trap would write into the report.
_QUIET = "{ %sbuiltin trap - DEBUG; builtin set +xv; } >&- 2>&-; "
_SAVE = r'{ builtin printf "%%s\0" "$PWD"; builtin export -p; builtin printf "\0"; } 2>&- >&%d || :' % REPORT_FD
# `eval`, because the command may set an EXIT trap of its own; the one here is for commands that call `exit`.
STATEFUL = (
    "trap '" + _QUIET % "" + 'builtin test "${__saved-}" || ' + _SAVE + "' EXIT; RUN; "
    + _QUIET % 'builtin set -- "$?"; ' + _SAVE + '; __saved=1; builtin exit "$1"'
)  # fmt: skip
_EXPORT = re.compile(rb"^(?:declare -\w+|export) (\w+)(?:=(\"|\$'))?", re.MULTILINE)
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"e": b"\33", b"E": b"\33", b"f": b"\f", b"n": b"\n", b"r": b"\r"}
_ESCAPES.update({b"t": b"\t", b"v": b"\v"})
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_NOT_KEPT = frozenset(["_", "PWD", "SHLVL", "BASHOPTS", "SHELLOPTS", "BASH_ENV"])


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1)
    if code[:1] in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"):
        return bytes([int(code, 8) & 255])
    return _ESCAPES.get(code, code)


def find_unescaped(quote: bytes, text: bytes, begin: int) -> int:
    """The index of the first `quote` that no backslash escapes; -1 when there is none."""
    while True:
        end = text.find(quote, begin)
        slashes = end
        while slashes > begin and text[slashes - 1] == ord("\\"):
            slashes -= 1
        if end < 0 or (end - slashes) % 2 == 0:
            return end
        begin = end + 1


def parse_exports(text: bytes) -> dict[str, str]:
    """The output of bash's `export -p` as a mapping, in linear time and memory for any input."""
    found: dict[str, str] = {}
    end = 0
    while True:
        match = _EXPORT.search(text, end)
        if match is None:
            return found
        name, quote = match.groups()
        begin = end = match.end()
        if quote is None:
            continue  # exported without a value: not in the environment
        end = find_unescaped(quote[-1:], text, begin)
        if end < 0:
            return found
        value = text[begin:end]
        if quote == b'"':
            value = re.sub(rb"\\([$`\"\\])", rb"\1", value)
        else:
            value = re.sub(rb"\\([0-7]{1,3}|.)", _unescape, value, flags=re.DOTALL)
        found[os.fsdecode(name)] = os.fsdecode(value)


def shell_call(bash: str) -> list[bytes]:
    """The beginning of bash's command line; the script follows."""
    return [os.fsencode(bash), b"--norc", b"--noprofile", b"-c"]


def shell_arguments(bash: str, command: str, stateful: bool) -> list[bytes]:
    """The command line of a shell that runs `command` and, when `stateful`, reports its folder and variables."""
    encoded = os.fsencode(command)
    arguments = shell_call(bash)
    if not stateful and len(encoded) <= ARGUMENT:
        return [*arguments, encoded]
    parts = [encoded[i : i + ARGUMENT] for i in range(0, len(encoded), ARGUMENT)] or [b""]
    run = 'eval "shift %d; %s"' % (len(parts), "".join("${%d}" % (i + 1) for i in range(len(parts))))
    return [*arguments, os.fsencode(STATEFUL.replace("RUN", run) if stateful else run), b"bash", *parts]


def weight(name: str, value: str) -> int:
    """Bytes of the kernel's limit that a variable uses, with `=`, NUL and its pointer."""
    return len(os.fsencode(name + value)) + 10


def encode_environment(env: dict[str, str]) -> list[bytes]:
    return [os.fsencode(name + "=" + value) for name, value in env.items()]


class ShellState:
    """The folder and the variables with which the next shell starts."""

    def __init__(self, workdir: str, env: dict[str, str]) -> None:
        self.workdir = workdir
        self.cwd = workdir
        self.env = dict(env)
        self.first = dict(env)
        """The variables before any command."""
        self.version = 0
        """Changes with the folder and the variables."""
        self._parsed: tuple[bytes, dict[str, str]] = (b"", {})

    def commit(self, report: bytes, before: dict[str, str], cwd: str | None, env: dict[str, str]) -> list[str]:
        """Take over the changes of a shell, except those to what `cwd` and `env` overrode for that call.

        Only changes are applied, so shells that ran at the same time do not undo each other. Returns the names of the
        first variables that are too large to carry over; these keep their previous value.
        """
        parts = report.split(b"\0")
        if len(parts) < 3 or parts[-1]:
            return []
        if cwd is None and parts[-3].startswith(b"/"):
            folder = os.fsdecode(parts[-3])
            self.version += folder != self.cwd
            self.cwd = folder
        if parts[-2] != self._parsed[0]:  # rare: most commands export nothing
            self._parsed = (parts[-2], parse_exports(parts[-2]))
        after = self._parsed[1]
        for name in before:
            if name not in after and name not in _NOT_KEPT and name not in env and _NAME.match(name):
                self.env.pop(name, None)
                self.version += 1
        room = ENVIRONMENT - sum(weight(*item) for item in self.env.items())
        rejected = []
        for name, value in after.items():
            if name not in _NOT_KEPT and name not in env and before.get(name) != value:
                size = weight(name, value)
                grown = size - (weight(name, self.env[name]) if name in self.env else 0)
                if size > ARGUMENT or grown > room:
                    rejected.append(name)
                else:
                    self.env[name] = value
                    self.version += 1
                    room -= grown
        return rejected[:NAMED]
