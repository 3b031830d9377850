"""The program that a far machine gets: a zip file with the modules of this package, which `BOOTSTRAP` runs there."""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path

from backends.first_use import in_turn

_BACKENDS = Path(__file__).parents[1]
_NEAR = {"disks", "program", "records", "requests", "rooting", "sandbox", "sandboxes", "spawn_server", "spawner"}

# Arguments: the size of the zip file, which is the beginning of standard input, then those of `far.main`. The file is
# read by sys.stdin.buffer, which reads ahead: nothing else may be sent before the program has answered.
BOOTSTRAP = """\
import os, sys
if sys.version_info < (3, 8): sys.exit("python3 is older than 3.8")
fd = os.memfd_create("far")
with open(fd, "wb", closefd=False) as file: file.write(sys.stdin.buffer.read(int(sys.argv.pop(1))))
sys.path.insert(0, "/proc/self/fd/%d" % fd)
import backends.host.far as far
far.main(sys.argv[1:])
"""


@in_turn
@functools.cache
def program() -> bytes:
    """The zip file."""
    sources = [path for path in (_BACKENDS / "host").glob("*.py") if path.stem not in _NEAR]
    sources += [*(_BACKENDS / "executor").glob("*.py")]
    sources += [_BACKENDS / name for name in ("errors.py", "executor_code.py", "first_use.py")]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("backends/__init__.py", "")
        for path in sorted(sources):
            archive.writestr(str(path.relative_to(_BACKENDS.parent)), path.read_bytes())
    return buffer.getvalue()
