"""Plays an environment of every scheme, checks the tokens, and measures a turn beside the standard's own driver.

    python -m benchmarks.doors [SCHEME ...] [--embedded] [--turns 300]

For each scheme whose package is there (`make test-doors` and `make test-guests` install them; guests are played by
their own interpreters). It fails where a rollout has no score, or a token is not delivered exactly once.

* `script`: rollouts of a policy without a model, how many have a score, and their mean reward. It is the reference
  policy where the environment knows its solutions, else one that draws calls at random.
* `tokens`: rollouts of a fake model server that reports tokens: completions whose tokens are in a valid sample exactly
  once, of all that it sampled.
* `embedded` (with `--embedded`): tokens of the embedded model in valid samples. Nobody else counts what it sampled: the
  records of the rollouts do.
* `ms/turn`: CPU of this process and all that it starts for a turn, with tool and reward, beside that of the standard's
  own driver (`door_drivers.py`): of verifiers, Inspect and NeMo Gym their own agents; of the others a loop that has no
  agent, no messages and no record. Servers are in neither, nor are the sandboxes of MCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from backends.errors import LachesisError, SettingsError
from benchmarks.door_drivers import cpu
from lachesis import Message, ServerConfig, ToolCall
from lachesis.cli.environment_classes import environment_class
from lachesis_console.auditing.policies import value_of
from lachesis_doors.processes import PACKAGES, interpreter
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing import FakeServer, ScriptedServer, ToolUser
from lachesis_tokens.samples.verification import verify_records

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = Path(__file__).with_name("door_drivers.py")
REAL = ROOT / "tests/doors/real"
CACHE = Path.home() / ".cache/lachesis"
DOORS = Path(os.environ.get("LACHESIS_DOORS") or CACHE / "doors")
GUESTS = Path(os.environ.get("GUESTS") or CACHE / "guests")
LEAST_TURNS = 50
MAX_TURNS = 40
MANY = 1000
QUESTION = {
    "prompt": [{"role": "user", "content": "What is 6 * 7? End with #### and the number."}],
    "reward_spec": {"ground_truth": "42"},
}
TIME = {"name": "time__get_current_time", "arguments": {"timezone": "UTC"}}
ASKED_THE_TIME = {
    "prompt": "What time is it? Then say: Done.",
    "answer": "Done.",
    "solution": [*[{"calls": [TIME]}] * 4, {"text": "Done."}],
}


@dataclass
class Target:
    """One environment. `{folder}`, `{port}`, `{doors}` and `{real}` in its name are filled in."""

    name: str
    says: str = "Done."
    """What the random policy says where there are no tools, or after `calls` turns with calls."""
    calls: int = MAX_TURNS
    known: bool = False
    """It has solutions, so the reference policy plays."""
    server: str | None = None
    """A server of `tests/doors/real`, which it needs."""
    alive: str = "/health"
    drives: str = ""
    """What `door_drivers.py` gets in place of the name."""
    over_http: bool = False
    """Its own driver asks a model over HTTP."""

    scheme: str = field(init=False)

    def __post_init__(self) -> None:
        self.scheme = self.name.partition(":")[0]


TARGETS = [
    Target("textarena:GuessTheNumber-v0", says="[7]"),
    Target("gymnasium:FrozenLake-v1"),
    Target("skyrl:gsm8k?rows={folder}/skyrl.jsonl", says="#### 42"),
    Target("bfcl:multi_turn_base", known=True),
    Target("tau2:retail?user=scripted", known=True),
    Target("nemogym:workplace_assistant?rows={folder}/nemogym.jsonl", calls=4, over_http=True),
    Target(
        "mcp:{folder}/mcp.jsonl?command={doors}/mcp/bin/mcp-server-time",
        known=True,
        drives="{doors}/mcp/bin/mcp-server-time",
    ),
    Target("openenv:ws://127.0.0.1:{port}", server="openenv"),
    Target("ors:http://127.0.0.1:{port}/numbers", server="ors"),
    Target("verifiers:{real}/verifiers_numbers.py", says="7", calls=4, over_http=True),
    Target("inspect:{real}/inspect_numbers.py@numbers", says="7", calls=4),
]


def write_rows(folder: Path) -> None:
    """More items than the packages have, so that there are enough turns to measure."""
    of_nemo_gym = "nemogym/lib/*/site-packages/resources_servers/workplace_assistant/data/example.jsonl"
    own = [json.loads(line) for path in DOORS.glob(of_nemo_gym) for line in path.read_text().splitlines()]
    for name, rows in (("skyrl", [QUESTION]), ("mcp", [ASKED_THE_TIME]), ("nemogym", own)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) * MANY)


@contextlib.contextmanager
def reachable(target: Target, folder: Path) -> Iterator[str]:
    """The target's full name, while its server runs."""
    places = {"folder": folder, "doors": DOORS, "real": REAL}
    write_rows(folder)
    if target.server is None:
        yield target.name.format(**places)
        return
    python = DOORS / target.server / "bin/python"
    if not python.exists():
        raise SettingsError(f"{python} is missing. Next step: make test-doors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), str(REAL / f"{target.server}_server.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{target.alive}"):
                    break
                time.sleep(0.2)
            yield target.name.format(**places, port=port)
        finally:
            running.terminate()


def drawn(target: Target) -> Any:
    """A policy that calls a tool at random in `calls` turns, and says the target's text after, or without tools."""

    def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
        draw = random.Random(json.dumps(messages, sort_keys=True, default=str))
        if not tools or sum(message["role"] == "assistant" for message in messages) >= target.calls:
            return Message("assistant", target.says)
        function = draw.choice(tools)["function"]
        number = len(messages)
        arguments = json.dumps(value_of(function["parameters"], draw))
        return Message("assistant", tool_calls=(ToolCall(f"call_{number}", function["name"], arguments),))

    return policy


async def play(
    env_cls: type[Any], target: Target, folder: Path, servers: list[ServerConfig], **settings: Any
) -> list[dict[str, Any]]:
    """The groups of a run, those without a score too."""
    folder.mkdir(parents=True)
    if target.scheme == "mcp":  # the server is a program of the sandbox
        settings["terminal_options"] = {"mounts": mounts(DOORS / "mcp")}
    chosen = {
        "total_steps": 2,
        "group_size": 2,
        "max_agent_turns": MAX_TURNS,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "save_trajectories": False,
        "use_wandb": False,
        **settings,
    }
    env = env_cls(env_cls.env_config_cls(**chosen), servers)
    env.console = Console(file=io.StringIO(), emoji=False)
    result = await env.process_manager()
    paths = [path for path in (result.files.groups, result.files.failures) if path.exists()]
    return [group for path in paths for group in read_lines(path)]


def mounts(venv: Path) -> list[str]:
    """What a sandbox needs to run programs of a virtual environment."""
    base = (venv / "bin/python").resolve().parents[1]
    return [str(venv), *([] if base.is_relative_to("/usr") else [str(base)])]


def rollouts(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rollout for group in groups for rollout in group["rollouts"]]


def with_policy(env_cls: type[Any], target: Target) -> type[Any]:
    if target.known:
        return env_cls
    policy = drawn(target)
    given = {"__module__": env_cls.__module__, "__doc__": env_cls.__doc__, "reference_policy": lambda self: policy}
    return type(env_cls.__name__, (env_cls,), given)


REFERENCE = [ServerConfig(model_name="reference")]


def script(env_cls: type[Any], target: Target, folder: Path) -> str:
    found = rollouts(asyncio.run(play(with_policy(env_cls, target), target, folder, REFERENCE, total_steps=4)))
    scored = [each["reward"] for each in found if each["reward"] is not None]
    if len(scored) < len(found):
        raise LachesisError(f"only {len(scored)} of {len(found)} rollouts have a score")
    return f"{len(scored)} of {len(found)} scored, mean {sum(scored) / len(scored):.2f}"


def checked(groups: Sequence[Mapping[str, Any]], sampled: int | None) -> str:
    totals = verify_records(list(groups))
    whole = totals.delivered if sampled is None else sampled
    if totals.problems or totals.duplicated or not 0 < totals.delivered == whole:
        raise LachesisError(
            f"{totals.delivered} of {whole} tokens delivered, {totals.duplicated} duplicate; {totals.problems}"
        )
    return f"{whole} tokens, each once" if sampled is None else f"100 % of {whole} tokens, 0 duplicate"


def tokens(env_cls: type[Any], target: Target, folder: Path) -> str:
    async def run() -> str:
        async with FakeServer(ToolUser(turns=3)) as server:
            server.tokenizer.save_pretrained(str(folder / "tokenizer"))
            one = ServerConfig(
                base_url=server.base_url,
                model_name="fake",
                server_type="vllm",
                tokenizer_name=str(folder / "tokenizer"),
            )
            groups = await play(env_cls, target, folder / "run", [one])
            sampled = sum(len(made.ids) for seen in server.requests for made in seen.completions)
        return checked(groups, sampled)

    return asyncio.run(run())


def embedded(env_cls: type[Any], target: Target, folder: Path) -> str:
    model = ServerConfig(model_name="embedded", engine="llama.cpp", context=8192)
    settings = {"total_steps": 1, "max_agent_turns": 3, "max_token_length": 48}
    return checked(asyncio.run(play(env_cls, target, folder, [model], **settings)), None)


def turn_cost(env_cls: type[Any], target: Target, folder: Path, turns: int) -> float:
    """Milliseconds of CPU for a turn: a long run less a short one, so that loading is in neither."""
    played_by = with_policy(env_cls, target)

    def spent(name: str, steps: int) -> tuple[float, int]:
        began = cpu(target.scheme)
        run = play(played_by, target, folder / name, REFERENCE, total_steps=steps)
        found = rollouts(asyncio.run(run))
        return cpu(target.scheme) - began, sum(each["turns"] for each in found)

    spent("warm", 1)
    short, few = spent("short", 1)
    steps = max(2, 2 * turns // max(1, few))
    long, many = spent("long", steps)
    if many - few < LEAST_TURNS:
        raise LachesisError(f"{many - few} turns are too few to measure; {LEAST_TURNS} are enough")
    return 1000 * (long - short) / (many - few)


async def driver_cost(target: Target, name: str, folder: Path, turns: int) -> float:
    python = interpreter(target.scheme, PACKAGES[target.scheme]) if target.scheme in PACKAGES else None
    beside = DOORS / target.scheme / "bin/python"
    python = python or (str(beside) if beside.exists() else sys.executable)
    named = target.drives.format(doors=DOORS) or name.partition(":")[2].partition("?")[0]
    command = [python, str(DRIVERS), target.scheme, named, str(turns)]
    policy = drawn(target)

    def answer(request: dict[str, Any]) -> Any:
        return policy(request["messages"], request.get("tools")).to_openai("reasoning_content")

    async with ScriptedServer(answer) as model:
        given = [*command, model.base_url] if target.over_http else command
        pipe = asyncio.subprocess.PIPE
        done = await asyncio.create_subprocess_exec(*given, stdout=pipe, stderr=pipe, cwd=folder)
        said, log = await done.communicate()
    if done.returncode:
        raise LachesisError(f"{target.scheme}: its driver failed: {log.decode(errors='replace')[-2000:]}")
    found = json.loads(said.splitlines()[-1])
    return 1000 * float(found["cpu"]) / int(found["turns"])


def in_guest(scheme: str, arguments: Sequence[str]) -> int | None:
    """The exit code of this program in the interpreter of the guest; None if that is this one, or there is none."""
    python = GUESTS / scheme / "bin/python"
    if not python.exists() or Path(sys.prefix) == python.parents[1]:
        return None
    # Its servers of tools are processes that import the module of the task.
    paths = [str(ROOT), str(REAL), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [str(python), "-m", "benchmarks.doors", scheme, *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("schemes", nargs="*")
    parser.add_argument("--embedded", action="store_true", help="play with the embedded model too")
    parser.add_argument("--turns", type=int, default=300, help="turns that are measured")
    given = parser.parse_args()
    failed = 0
    for target in TARGETS:
        if given.schemes and target.scheme not in given.schemes:
            continue
        flags = [f"--turns={given.turns}", *(["--embedded"] if given.embedded else [])]
        if (code := in_guest(target.scheme, flags)) is not None:
            failed += code
            continue
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            print(target.scheme, flush=True)
            try:
                full = stack.enter_context(reachable(target, folder))
                env_cls = environment_class(full)
                print(f"  target    {full}")
                print(f"  script    {script(env_cls, target, folder / 'script')}", flush=True)
                print(f"  tokens    {tokens(env_cls, target, folder / 'tokens')}", flush=True)
                if given.embedded:
                    print(f"  embedded  {embedded(env_cls, target, folder / 'embedded')}", flush=True)
                ours = turn_cost(env_cls, target, folder / "turns", given.turns)
                theirs = asyncio.run(driver_cost(target, full, folder, given.turns))
                print(f"  ms/turn   {ours:.2f}, {theirs:.2f} by its own driver: {ours / theirs:.2f} times", flush=True)
            except LachesisError as error:
                failed += 1
                print(f"  {error}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
