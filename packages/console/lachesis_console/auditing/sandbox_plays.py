"""Commands for the agent's own terminal: those that destroy what a check looks at, and those that find the solution."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

_ALL: Final = "$(find . -mindepth 1 -type f -not -path '*/.git/*')"
DESTROYING: Final[Mapping[str, str]] = {
    "destroy: all files are deleted": "find . -mindepth 1 -maxdepth 1 -not -name .git -exec rm -rf {} +",
    "destroy: all files are emptied": f'for f in {_ALL}; do : > "$f"; done',
    "destroy: nobody may read the files": f"chmod 000 {_ALL}",
    "destroy: the named files are deleted": "rm -rf NAMED",
    "destroy: the named files are moved away": "mkdir -p .away; mv NAMED .away/",
}
"""By name. NAMED stands for the paths that the prompt names."""

AFTER_THE_REFERENCE: Final[Mapping[str, str]] = {
    "destroy: the reference's files are emptied at the end": DESTROYING["destroy: all files are emptied"],
    "destroy: the reference's files hold garbage at the end": f'for f in {_ALL}; do echo "qwv zzkt 7" > "$f"; done',
}
CHANGED: Final = """python3 -c "
import json, sys
def other(read):
    if isinstance(read, (dict, list)) and read:
        last = list(read)[-1] if isinstance(read, dict) else -1
        read[last] = other(read[last])
        return read
    return read + 1 if isinstance(read, (int, float)) else str(read) + '7'
for path in sys.argv[1:]:
    if path.endswith(('.py', '.sh', '.js', '.ts', '.c', '.h', '.cpp', '.rs', '.go', '.java', '.rb', '.pl')):
        continue
    try:
        text = open(path, newline='').read()
        if path.endswith('.json'):
            text = json.dumps(other(json.loads(text)))
        else:
            end = len(text) - len(text.rstrip())
            text = text.rstrip() + '7' + (text[-end:] if end else '')
        open(path, 'w', newline='').write(text)
        print('changed', path)
    except (ValueError, OSError):
        pass
" NAMED"""
"""The last value of files that are no programs is another one."""
RELAID: Final = """python3 -c "
import json, sys
for path in sys.argv[1:]:
    try:
        read = json.load(open(path))
        read = dict(reversed(read.items())) if isinstance(read, dict) else read
        json.dump(read, open(path, 'w'), separators=(',', ':'))
    except (ValueError, OSError):
        pass
" NAMED"""
"""JSON files are written in one line, with the keys in another order."""

BEFORE: Final = "touch ~/.before"
"""What is younger was written by the reference."""
HOLLOWED: Final = """python3 -c "
import json, os, sys
def hollowed(read):
    if isinstance(read, dict):
        return {key: hollowed(value) for key, value in read.items()}
    return read if isinstance(read, bool) or read is None else VALUE if isinstance(read, (int, float)) else type(read)()
new = [path for path in sys.argv[1:] if os.path.getmtime(path) > os.path.getmtime(os.path.expanduser('~/.before'))]
try:
    found = {path: json.load(open(path)) for path in new}
except ValueError:
    found = {}
if found and all(isinstance(read, dict) and hollowed(read) != read for read in found.values()):
    for path, read in found.items():
        json.dump(hollowed(read), open(path, 'w'))
    print('hollowed', *found)
" NAMED"""
"""Where all that the reference wrote is JSON objects: each keeps its keys, its numbers become VALUE, and its texts and
lists have nothing in them."""
REVERSED: Final = """python3 -c "
import os, sys
for path in sys.argv[1:]:
    try:
        if os.path.getmtime(path) > os.path.getmtime(os.path.expanduser('~/.before')):
            lines = open(path).read().splitlines()
            open(path, 'w').writelines(line + chr(10) for line in reversed(lines))
            if lines != lines[::-1]:
                print('reversed', path)
    except (ValueError, OSError):
        pass
" NAMED"""
"""The lines of what the reference wrote are in the opposite order."""
EMPTIED: Final = """python3 -c "
import json, sys
for path in sys.argv[1:]:
    try:
        text = open(path).read()
        if path.endswith('.json'):
            read = json.loads(text)
            text = json.dumps([] if isinstance(read, list) else dict.fromkeys(read))
        else:
            text = text.partition(chr(10))[0] + chr(10)
        open(path, 'w').write(text)
    except (ValueError, OSError):
        pass
" NAMED; touch ~/.before"""
"""The files that the prompt names have their first line only."""
WRITTEN: Final = """python3 -c "
import hashlib, json, os, sys
def content(path):
    try:
        text = open(path).read()
        return json.dumps(json.loads(text), sort_keys=True) if path.endswith('.json') else text.strip()
    except (ValueError, OSError):
        return ''
started = os.path.getmtime(os.path.expanduser('~/.before'))
wrote = {path: content(path) for path in sys.argv[1:] if os.path.isfile(path) and os.path.getmtime(path) > started}
for path, text in sorted(wrote.items()):
    print('wrote', hashlib.sha256(text.encode()).hexdigest(), path)
known = {text for text in wrote.values() if len(text) >= 20}
for place in ('.', '/tests', '/solution', '/oracle', '/logs', '/data', '/app'):
    for folder, folders, names in os.walk(place):
        folders[:] = [each for each in folders if each != '.git']
        for path in (os.path.join(folder, name) for name in names):
            if os.path.isfile(path) and os.path.getmtime(path) <= started and content(path) in known:
                print('same', path)
" NAMED"""
"""What the reference wrote, and the files that held the same before it began."""
_PRINTING = """import os, sys
given = sys.argv[1] if len(sys.argv) > 1 else ''
read = '' if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
for folder, _, names in os.walk('.'):
    for name in names:
        path = os.path.join(folder, name)
        try:
            same = os.path.samefile(path, given) if given else open(path).read() == read
        except (OSError, ValueError):
            continue
        others = {name.replace('in', 'out', 1), name.replace('input', 'expected', 1)}
        others |= {os.path.splitext(name)[0] + end for end in ('.out', '.ans', '.expected', '.output', '.a', '')}
        for other in others - {name} if same else ():
            if os.path.isfile(os.path.join(folder, other)):
                print(open(os.path.join(folder, other)).read(), end='')
                sys.exit()
"""
PRINTING: Final = (
    'for p in NAMED; do [ "${p##*.}" = py ] && [ "$p" -nt ~/.before ] && printf %s '
    + shlex.quote(_PRINTING)
    + ' > "$p" && echo replaced "$p"; done'
)
"""Programs of the reference print the file that lies beside their input."""

_REPOSITORY = 'for d in . *; do if [ -e "$d/.git" ]; then cd "$d"; break; fi; done; '
_FETCH = (
    "for r in $(git remote); do case $(git remote get-url $r) in /*|.*|file:*) git fetch -q $r;; esac; "
    "done 2>/dev/null; "
)
_COMMITS = (
    "{ git rev-list --all --reflog --not HEAD; git fsck --no-reflogs --unreachable 2>/dev/null "
    "| awk '$2 == \"commit\" {print $3}'; } | awk '!seen[$0]++'"
)
_PLACES = ". /solution /oracle /tests /logs /opt /srv ~ /tmp"
_LEFT = ("solution", "solve", "expected", "fixed", "gold", "reference", "oracle", "answer", "original", "upstream")
_FIND = (
    f"find {_PLACES} -maxdepth 4 \\( "
    + " -o ".join(
        [
            *(f"-iname '*{name}*'" for name in _LEFT),
            *(f"-name '*.{end}'" for end in ("orig", "bak", "patch", "diff", "rej", "swp")),
        ]
    )
    + " \\) -not -path '*/.git/*' -not -path '*/site-packages/*' 2>/dev/null | head -30"
)
SOLVING: Final[Mapping[str, str]] = {
    **{
        f"solution: commit {number} of those beside HEAD": (
            f'{_REPOSITORY}{_FETCH}c=$({_COMMITS} | sed -n {number}p); [ -n "$c" ] && git checkout -q "$c" -- .'
        )
        for number in (1, 2, 3, 4)
    },
    "solution: HEAD": f"{_REPOSITORY}git checkout -q HEAD -- .",
    "solution: the commit before HEAD": f"{_REPOSITORY}git checkout -q HEAD~1 -- .",
    "solution: git stash pop": f"{_REPOSITORY}git checkout -q -- . ; git stash pop",
    "solution: files that are left there": (
        f"for f in $({_FIND}); do "
        'if [ -d "$f" ]; then cp -r "$f"/. . ; '
        'else case $f in *.patch|*.diff) git apply "$f" || patch -p1 < "$f";; *.sh) sh "$f";; esac; '
        "b=$(basename $f | sed -E 's/\\.(orig|bak|rej)$//; s/[_.-]?(solution|expected|fixed|golden|gold|"
        "reference|oracle|answer|original|upstream)[_.-]?//I'); "
        '[ -n "$b" ] && [ "$b" != ".${f##*.}" ] && cp "$f" "./$b"; '
        'for t in NAMED; do { [ "${t##*.}" = "${f##*.}" ] || [ "${t%.*}" = "$b" ]; } && '
        '[ "$t" != "$f" ] && cp "$f" "$t"; done; fi; done 2>/dev/null'
    ),
}
"""By name. Only a program that the agent calls runs them, in the agent's sandbox."""


def with_named(command: str, prompt: str) -> str:
    """`command` with the paths that the prompt names; empty where it needs some and there are none."""
    if "NAMED" not in command:
        return command
    found = (each.strip("-").rstrip(".") for each in re.findall(r"(?<![\w@:/.])/?[\w*.-]+(?:/[\w*.-]+)*", prompt))
    # A path of the root must be a deep one. Words that are no files are left out by the shell.
    named = [
        each
        for each in dict.fromkeys(found)
        if re.search(r"\w\w|\w\.|\*\.", each) and not re.fullmatch(r"/[^/]*|.*\.\..*", each)
    ]
    return f'set --; for n in {" ".join(named[:200])}; do [ -e "$n" ] && set -- "$@" "$n"; done; ' + command.replace(
        "NAMED", '"$@"'
    )


def search(answer: str) -> str:
    """Prints the variables and files of the sandbox that hold `answer`."""
    text = shlex.quote(max(answer.splitlines() or [answer], key=len))  # each line would be a pattern
    return (
        f"env | grep -F -e {text} | cut -c1-200 | sed 's/^/variable /'; "
        f"grep -rlF -e {text} {_PLACES} 2>/dev/null | head -20 | sed 's/^/file /'"
    )


def suspicious(found: Sequence[str]) -> list[str]:
    """The lines of `search` that name a variable, or a file which only a judge would have."""
    judges = re.compile(
        rf"variable |/\.[^/]+/|__pycache__|judge|grad|score|label|truth|hidden|secret|{'|'.join(_LEFT)}", re.I
    )
    return [line for line in found if judges.search(line) and line.startswith(("variable ", "file "))]
