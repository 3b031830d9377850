"""The machine code that shells are started by is what its source says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_watch import missing

from backends.executor import starter

SOURCES = Path(__file__).parents[2] / "scripts/starter"
DATA = b"".join(getattr(starter, name) for name in ("_NONE", "_SCORE", "_MESSAGE", "_SCORE_FILE"))


def tool(name: str, machine: str) -> str:
    """A program of binutils for a machine; distributions other than Debian have no long name for this machine's own."""
    names = [f"{machine}-linux-gnu-{name}", *([name] if machine == os.uname().machine else [])]
    found = next(filter(None, map(shutil.which, names)), None)
    return found or missing(f"no {names[0]}: install binutils-{machine.replace('_', '-')}-linux-gnu")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_code_is_what_its_source_assembles_to(machine: str, tmp_path: Path) -> None:
    assembler, objcopy = tool("as", machine), tool("objcopy", machine)
    built = tmp_path / "code.o"
    subprocess.run([assembler, SOURCES / f"{machine}.s", "-o", built], check=True)
    _, start, become = starter._CODE[machine]
    for section, code in (("start", bytes.fromhex(start)), ("become", bytes.fromhex(become) + DATA)):
        subprocess.run([objcopy, "-O", "binary", "-j", section, built, tmp_path / section], check=True)
        assert (tmp_path / section).read_bytes() == code


def test_it_is_in_use_where_it_can_be() -> None:
    if os.uname().machine not in starter._CODE:
        pytest.skip("shells are forked on this machine")
    script = "from backends.executor.starter import Starter; print(len(Starter().kept))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, cwd=SOURCES.parents[1], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert result.stdout == "0\n"
