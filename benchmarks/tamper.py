"""Which judges take a cheat for a solution: the agents of `lachesis_testing.cheats` on four backends.

    python benchmarks/tamper.py [--backends local,docker] [--agents gc]

A row is an agent, a cell lists the backends on which a judge gave it the full score. Exits with 1 if `judge_pytest` or
the comparison of programs takes a cheat for a solution, or rejects the honest agent. A backend that cannot run here is
skipped, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Backend, SandboxSpec, create_backend
from lachesis_tools import ToolSessions
from tests.support.docker_engine import docker_engine
from tests.support.judges import AGENTS, JUDGES, table
from tests.support.root_images import pytest_root
from tests.support.singularity_engine import find_binary
from tests.support.ssh_engine import ssh_engine

BACKENDS = ("local", "docker", "singularity", "ssh")
SOUND = ("`judge_pytest`", "programs")
IMAGE = "lachesis-test:pytest"


@contextlib.contextmanager
def backend_of(name: str, folder: Path) -> Iterator[tuple[Backend, SandboxSpec]]:
    root = pytest_root(folder / "pytest")
    if name == "docker":
        with docker_engine(folder, ()) as engine:
            engine.add_image(IMAGE, root)
            yield create_backend("docker", **engine.options), SandboxSpec(image=IMAGE)
        return
    options: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if name == "singularity":
            options = {"binary": find_binary()}
        elif name == "ssh":
            options = stack.enter_context(ssh_engine()).options
        yield create_backend(name, **options), SandboxSpec(image=str(root))


async def measure(backends: list[str], agents: list[str], folder: Path) -> dict[str, dict[str, set[str]]]:
    found = {}
    for name in backends:
        try:
            with backend_of(name, folder) as (backend, spec):
                async with ToolSessions(backend, spec) as sessions:
                    found[name] = await table(sessions, agents, JUDGES)
        except RuntimeError as error:
            print(f"{name}: skipped, {error}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--agents", default="", help="a part of the names of the cheats")
    options = parser.parse_args()
    agents = [agent for agent in AGENTS if agent == "honest" or options.agents in agent]
    with tempfile.TemporaryDirectory(prefix="lachesis-tamper-") as folder:
        Path(folder).chmod(0o755)
        found = asyncio.run(measure(options.backends.split(","), agents, Path(folder)))
    print("| agent | " + " | ".join(JUDGES) + " |")
    print("| --- |" + " --- |" * len(JUDGES))
    for agent in agents:
        cells = [[name for name in found if agent in found[name][judge]] for judge in JUDGES]
        shown = ["1.0" if len(cell) == len(found) else ", ".join(cell) or "0" for cell in cells]
        print(f"| {agent} | " + " | ".join(shown) + " |")
    forged = [max(len(found[name][judge] - {"honest"}) for name in found) for judge in JUDGES]
    print(f"| forged, of {len(agents) - 1} | " + " | ".join(map(str, forged)) + " |")
    wrong = [(name, judge) for name in found for judge in SOUND if found[name][judge] != {"honest"}]
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
