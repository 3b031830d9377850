"""`lachesis doctor [demo | train | BACKEND]`: what works on this machine, and how to install missing parts.

With a purpose, it looks at what that needs, and ends with 1 where something is missing; with `-b`, at a server.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from rich.console import Console

from backends import backend_names, create_backend
from backends.errors import ExitCode, LachesisError
from lachesis.cli.subcommands import options_of
from lachesis.cli.verb_parser import VerbParser
from lachesis.other_packages import TOKENS
from lachesis.settings.flags import close_names

PATIENCE = 20.0
"""Seconds within which a backend or a model server must answer."""
PURPOSES = ("demo", "train")
TRAINING = ("accelerate", "gguf", "peft", "tinker", "torch", "transformers")
CLIENTS = {"docker": "aiodocker", "modal": "modal", "ssh": "asyncssh"}
"""Packages of backends, which are installed as extras of their names."""
USES = {
    "sandboxes: local": "eval, process and serve with a model server, or -m reference",
    "embedded model": "demo and -m embedded",
    "trainer": "train",
    "tokens (Phase 2)": "serve with this server",
    "chat (Phase 1)": "eval and process with this server",
}
"""By check: what it lets one do."""
_INSTALL = re.compile(r"(?:apt-get|pip) install(?: --\S+)* [^\s,;]+")
_CHILD = """
import asyncio, dataclasses, json, sys
from lachesis_console.verbs.doctor import sandboxes
async def main():
    for found in await asyncio.gather(*(sandboxes(name, {}, needed=False) for name in sys.argv[1:])):
        print(json.dumps(dataclasses.asdict(found)))
asyncio.run(main())
"""
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
    install: Sequence[str] = ()
    """Commands that install missing parts, one package each."""


async def examine(purpose: str | None, options: dict[str, Any]) -> list[Check]:
    """All checks, those that are needed first; or those that one of `PURPOSES` or a backend needs."""
    if purpose is not None and purpose not in PURPOSES:
        return [await sandboxes(purpose, options, needed=True)]
    python = sys.version_info >= (3, 11)
    checks = [
        Check("lachesis", True, importlib.metadata.version("lachesis-core")),
        Check("python", python, sys.version.split()[0], "install Python 3.11 or newer", needed=True),
        await sandboxes("local", {}, needed=True),
    ]
    demo = [_model()]
    install = "pip install --no-deps reasoning-gym"
    problems = _packages("gsm_symbolic problems", ["reasoning_gym"], install, use="the default problems of gsm8k")
    train = [_packages("trainer", TRAINING, "pip install 'lachesis-rl[torch]'", use="lachesis train")]
    if purpose is not None:
        return [*checks, *(replace(check, needed=True) for check in (demo if purpose == "demo" else train))]
    others = await _in_child(*(name for name in backend_names() if name != "local"))
    return [*checks, *others, *demo, problems, *train, *(_key(name, use) for name, use in KEYS.items())]


async def examine_server(url: str, model: str | None, key: str) -> list[Check]:
    """Whether a model server answers, knows the model, and reports token ids with logprobs (Phase 2)."""
    from lachesis.other_packages import ENGINES, load_engine
    from lachesis.runs.model_servers import server_of, settings_of
    from lachesis.settings.checked import validate_settings
    from lachesis.settings.server_settings import ServerConfig
    from lachesis_client.sampling import read_sampling

    given = {"base_url": url, "model_name": model or "default", "api_key": key}
    config = validate_settings(ServerConfig, {**given, "max_retries": 0, "timeout": int(PATIENCE)}, "openai")
    found: list[Check] = []
    async with server_of(config, tool_call_parser=None) as server:
        try:
            names = await server.check()
        except LachesisError as error:
            return [Check("model server", False, str(error), needed=True)]
        listed = f"it lists {', '.join(names[:8])}" if names else "it lists no models"
        known = model is None or not names or model in names
        found.append(Check("model server", known, listed, f"{model!r} is not among them", needed=True))
        config.model_name = model or (names or ["default"])[0]
    async with server_of(config, tool_call_parser=None) as server:
        try:
            await server.chat([{"role": "user", "content": "Hello"}], max_tokens=1)
            found.append(Check("chat (Phase 1)", True, config.model_name, needed=True))
        except LachesisError as error:
            return [*found, Check("chat (Phase 1)", False, str(error), needed=True)]
    reporting = []
    for name in ENGINES.names():
        engine = load_engine(name)(settings_of(config, base_url=None, tool_call_parser=None))
        try:
            await engine.generate([1, 2, 3], read_sampling({"temperature": 1.0}, default_max_tokens=1))
            reporting.append(name)
        except LachesisError:
            continue
        finally:
            await engine.close()
    fix = "`serve` needs them: a vLLM, SGLang or llama.cpp server, or the embedded model (docs/models.md)"
    detail = f"with openai.engine {', '.join(reporting)}" if reporting else "no token ids with logprobs"
    return [*found, Check("tokens (Phase 2)", bool(reporting), detail, fix)]


async def _in_child(*names: str) -> list[Check]:
    """`sandboxes` of all in another process: a backend may load a large client, or one that ends its process. Then each
    has a process of its own."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, *names), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await child.communicate()
    if not child.returncode:
        return [Check(**json.loads(line)) for line in output.splitlines()[-len(names) :]]
    if len(names) == 1:
        return [Check(f"sandboxes: {names[0]}", False, f"its check ended with exit code {child.returncode}")]
    return [check for alone in await asyncio.gather(*map(_in_child, names)) for check in alone]


async def sandboxes(name: str, options: dict[str, Any], *, needed: bool) -> Check:
    """What isolates the sandboxes of a backend, which limits hold, and what would make it better."""
    try:
        async with asyncio.timeout(PATIENCE):
            found = await create_backend(name, **options).check()
    except TimeoutError:
        return Check(f"sandboxes: {name}", False, f"no answer within {PATIENCE:g} s", needed=needed)
    except (LachesisError, ValueError) as error:  # a package or an option that it needs
        return Check(f"sandboxes: {name}", False, str(error), needed=needed, install=[*_missing(name, str(error))])
    lines = [("isolation", found.isolation), ("limits", found.limits), *(("better", line) for line in found.better)]
    more = [f"{what}: {line}" for what, line in lines if line]
    install = [] if found.ok else [*_missing(name, found.fix)]
    return Check(f"sandboxes: {name}", found.ok, found.detail, found.fix, needed, more, install)


def _missing(backend: str, said: str) -> Iterator[str]:
    """How to install what a backend lacks: what it says, and what it would say next."""
    if (client := CLIENTS.get(backend)) and importlib.util.find_spec(client) is None:
        yield f"pip install 'lachesis-rl[{backend}]'"
        if backend == "docker" and shutil.which("dockerd") is None:
            yield "apt-get install docker.io"
    elif found := _INSTALL.search(said):
        yield found[0]


def _model() -> Check:
    if importlib.util.find_spec("xllamacpp") is None:
        step, said = "pip install xllamacpp", "xllamacpp is not installed (for the demo, and -m embedded)"
        return Check("embedded model", False, said, step, install=[step])
    # In a child process: a missing shared library shows only when the module is loaded.
    tried = subprocess.run([sys.executable, "-c", "import xllamacpp"], capture_output=True, text=True, check=False)
    if tried.returncode:
        # On a processor that it was not built for, it is killed and prints nothing.
        reason = (tried.stderr.strip().splitlines() or [f"its import ended with exit code {tried.returncode}"])[-1]
        fix = "apt-get install libgomp1" if "libgomp" in reason else "pip install --force-reinstall xllamacpp"
        return Check("embedded model", False, reason, fix, install=[fix])
    version = importlib.metadata.version("xllamacpp")
    try:
        TOKENS.load("embedded_server")().model_file  # noqa: B018  # raises where there is none
    except LachesisError as error:
        return Check("embedded model", True, f"xllamacpp {version}; {error}")
    return Check("embedded model", True, f"SmolLM2-135M-Instruct on xllamacpp {version}")


def _packages(name: str, packages: Sequence[str], fix: str, *, use: str) -> Check:
    if missing := [each for each in packages if importlib.util.find_spec(each) is None]:
        return Check(name, False, f"not installed (for {use}): {', '.join(missing)}", fix, install=[fix])
    versions = [importlib.metadata.version(each.replace("_", "-")) for each in packages]
    return Check(name, True, ", ".join(f"{each} {version}" for each, version in zip(packages, versions, strict=True)))


def together(commands: Sequence[str]) -> str:
    """One line that installs everything: apt once, pip once, and once more for packages without their requirements."""
    packages: dict[str, dict[str, None]] = {}
    for command in commands:
        tool, _, package = command.rpartition(" ")
        packages.setdefault(tool, {})[package] = None
    return " && ".join(f"{tool} {' '.join(packages[tool])}" for tool in sorted(packages))


def verdict(findings: Sequence[Check]) -> list[str]:
    """What can be done here, and what not and why, in two lines; nothing of keys."""
    works, fails = list[str](), list[str]()
    others = [finding for finding in findings if finding.name.startswith("sandboxes: ") and finding.name not in USES]
    for ok, said in (True, works), (False, fails):
        if names := [finding.name.removeprefix("sandboxes: ") for finding in others if finding.ok is ok]:
            reason = f" ({_reason(others[0].detail)})" if len(others) == 1 and not ok else ""
            said.append(f"sandboxes in {', '.join(names)}{reason}")
    for finding in findings:
        if use := USES.get(finding.name):
            (works if finding.ok else fails).append(use if finding.ok else f"{use} ({_reason(finding.detail)})")
        elif finding.needed and not finding.ok:
            fails.append(f"{finding.name} ({_reason(finding.detail)})")
    found = (("not ready for", fails), ("ready for", works))
    return [f"{what}: {'; '.join(uses)}" for what, uses in found if uses]


def _reason(detail: str) -> str:
    """Its beginning, which says why; the table has all of it."""
    return shorten(re.split(r"[.;:] | \(", detail)[0], 60, placeholder=" ...")


def _key(name: str, use: str) -> Check:
    found = bool(os.environ.get(name))
    return Check(name, found, "set" if found else f"not set (optional: for {use})")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; 1 when something needed is missing."""
    parser = VerbParser(prog="lachesis doctor", description=__doc__)
    purposes = [*PURPOSES, *backend_names()]
    known = ", ".join([*purposes, "or package.module:Class"])
    parser.add_argument("purpose", nargs="?", metavar="PURPOSE", help=f"only what this needs: {known}")
    parser.add_argument("--backend", metavar="NAME", help="only this backend of sandboxes")
    parser.add_argument("--options", default="{}", metavar="YAML", help="its options, as in terminal_options")
    parser.add_argument("-b", "--base-url", old=["--url"], dest="url", metavar="URL", help="only this model server")
    parser.add_argument("-m", "--model", metavar="MODEL", help="its model")
    parser.add_argument("-k", "--api-key", default="", metavar="KEY", help="its key")
    arguments = parser.parse_args(argv)
    purpose = arguments.backend or arguments.purpose
    if purpose and purpose not in purposes and ":" not in purpose:
        near = close_names(purpose, purposes)
        parser.error(f"unknown purpose {purpose!r}; {f'did you mean {near[0]}?' if near else f'known are {known}'}")
    options = options_of(arguments.options)
    if options and purpose in (None, *PURPOSES):
        parser.error("--options needs --backend")
    if arguments.url:
        findings = asyncio.run(examine_server(arguments.url, arguments.model, arguments.api_key))
    else:
        findings = asyncio.run(examine(purpose, options))
    console = Console(emoji=False)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("missing", "red") if finding.needed else ("optional", "dim")
        console.print(f"{mark:<10}", style=style, end="")
        # Not a table: text that is folded at the edge of a cell cannot be copied.
        said = finding.detail if finding.ok or finding.needed else finding.detail.partition(". ")[0]
        detail = said if finding.ok or not finding.fix else f"{said}; {finding.fix}"
        for line in (f"{finding.name:<{width}}  {detail}", *(f"{'':{width + 12}}{line}" for line in finding.more)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    ready = all(finding.ok for finding in findings if finding.needed)
    last = []
    if missing := together([command for finding in findings for command in finding.install]):
        last.append(f"{'the rest is optional; all of it' if ready else 'to install what is missing'}: {missing}")
    last += verdict(findings)
    for line in last:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return ExitCode.DONE if ready else ExitCode.FAILED
