"""A program that changes files in a sandbox, and says what is there then to the last bit."""

from __future__ import annotations

import json
from typing import Any

from backends import Sandbox

PATHS = ["a", "b", "c", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/b"]
CHANGE = r'''
import hashlib, json, os, shutil, stat, sys
folder, clock, operations = json.loads(sys.stdin.read())
os.chdir(folder)
seen = []

def tick(*paths):
    """Give what was touched, and the folders around it, a time of its own."""
    global clock
    clock += 1
    for path in [*paths, *map(os.path.realpath, paths)]:
        for each in (path, os.path.dirname(path) or "."):
            if os.path.lexists(each):
                os.utime(each, ns=(clock * 10**9 + 7, clock * 10**9 + 7), follow_symlinks=False)

def write(path, text):
    with open(path, "w") as file: file.write(text)

def append(path, text):
    with open(path, "a") as file: file.write(text)

def remove(path, _):
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

def folder_at(path, _): os.mkdir(path)
def rename(path, other): os.rename(path, other)
def link(path, other): os.link(path, other, follow_symlinks=False)
def symlink(path, other): os.symlink(other, path)
def mode(path, text):
    if not os.path.islink(path): os.chmod(path, {"a": 0o700, "b": 0o755}.get(text[:1], 0o750))
def truncate(path, _): os.truncate(path, 1)

for name, path, other in operations:
    try:
        globals()[name](path, other)
        seen.append(0)
    except OSError as error:
        seen.append(error.errno)
    tick(path, *([other] if name in ("rename", "link") else []))

tree, links = {}, {}
for top, folders, files in os.walk("."):
    for name in [*folders, *files, "."]:
        path = os.path.normpath(os.path.join(top, name))
        facts = os.lstat(path)
        kind = stat.S_IFMT(facts.st_mode)
        entry = [kind, stat.S_IMODE(facts.st_mode), facts.st_mtime_ns]
        if stat.S_ISREG(facts.st_mode):
            entry += [hashlib.sha256(open(path, "rb").read()).hexdigest(), facts.st_nlink]
            links.setdefault((facts.st_dev, facts.st_ino), []).append(path)
        elif stat.S_ISLNK(facts.st_mode):
            entry.append(os.readlink(path))
        tree[path] = entry
print(json.dumps([clock, seen, tree, sorted(sorted(paths) for paths in links.values())]))
'''


async def changed(sandbox: Sandbox, folder: str, clock: int, operations: list[Any]) -> list[Any]:
    """Apply `operations` below `folder`: the new clock, the errno of each, the tree, and which paths are one file."""
    request = json.dumps([folder, clock, operations]).encode()
    done = await sandbox.exec("python3 /tmp/change", timeout=60, stdin=request)
    assert done.exit_code == 0, done
    found: list[Any] = json.loads(done.stdout)
    return found
