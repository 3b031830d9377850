"""Plays an environment of every scheme, checks the tokens, and measures a turn beside the standard's own driver.

    python -m benchmarks.doors [SCHEME ...] [--embedded] [--turns 300]

For each scheme whose package is there (`make test-doors` installs them). It fails where a rollout has no score, or
a token is not delivered exactly once.

* `script`: rollouts of a policy without a model, how many have a score, and their mean reward. It is the reference
  policy where the environment knows its solutions, else one that draws calls at random.
* `tokens`: rollouts of a fake model server that reports tokens: completions whose tokens are in a valid sample exactly
  once, of all that it sampled.
* `embedded` (with `--embedded`): tokens of the embedded model in valid samples. Nobody else counts what it sampled: the
  records of the rollouts do.
* `ms/turn`: CPU of this process and its guest for a turn, with tool and reward, beside that of the standard's own
  driver (`door_drivers.py`), which has no agent loop, no messages and no record. Servers are in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import resource
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
from lachesis import Message, ServerConfig, ToolCall
from lachesis.cli.environment_classes import environment_class
from lachesis_console.auditing.policies import value_of
from lachesis_doors.processes import PACKAGES, interpreter
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing import FakeServer, ToolUser
from lachesis_tokens.samples.verification import verify_records

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = Path(__file__).with_name("door_drivers.py")
DOORS = Path(os.environ.get("LACHESIS_DOORS") or Path.home() / ".cache/lachesis/doors")
LEAST_TURNS = 50
ROWS = [
    {
        "prompt": [{"role": "user", "content": "What is 6 * 7? End with #### and the number."}],
        "reward_spec": {"ground_truth": "42"},
    }
] * 1000


@dataclass
class Target:
    """One environment. `{folder}` and `{port}` in its name are filled in."""

    name: str
    says: str = "Done."
    """What the random policy says where there are no tools."""
    known: bool = False
    """It has solutions, so the reference policy plays."""
    server: str | None = None
    """A server of `tests/doors/real`, which it needs."""
    alive: str = "/health"
    driven: bool = True
    """`door_drivers.py` has a driver."""

    scheme: str = field(init=False)

    def __post_init__(self) -> None:
        self.scheme = self.name.partition(":")[0]


TARGETS = [
    Target("textarena:GuessTheNumber-v0", says="[7]"),
    Target("gymnasium:FrozenLake-v1"),
    Target("skyrl:gsm8k?rows={folder}/rows.jsonl", says="#### 42"),
    Target("bfcl:multi_turn_base", known=True),
    Target("nemogym:calendar", driven=False),
    Target("openenv:ws://127.0.0.1:{port}", server="openenv"),
    Target("ors:http://127.0.0.1:{port}/numbers", server="ors"),
]


@contextlib.contextmanager
def reachable(target: Target, folder: Path) -> Iterator[str]:
    """The target's full name, while its server runs."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if target.server is None:
        yield target.name.format(folder=folder, port=0)
        return
    python = DOORS / target.server / "bin/python"
    if not python.exists():
        raise SettingsError(f"{python} is missing. Next step: make test-doors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), str(ROOT / f"tests/doors/real/{target.server}_server.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{target.alive}"):
                    break
                time.sleep(0.2)
            yield target.name.format(folder=folder, port=port)
        finally:
            running.terminate()


def drawn(target: Target) -> Any:
    """A policy that calls a tool at random in every turn, or says the target's text."""

    def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
        draw = random.Random(json.dumps(messages, sort_keys=True, default=str))
        if not tools:
            return Message("assistant", target.says)
        function = draw.choice(tools)["function"]
        number = len(messages)
        arguments = json.dumps(value_of(function["parameters"], draw))
        return Message("assistant", tool_calls=(ToolCall(f"call_{number}", function["name"], arguments),))

    return policy


async def play(env_cls: type[Any], folder: Path, servers: list[ServerConfig], **settings: Any) -> list[dict[str, Any]]:
    """The groups of a run, those without a score too."""
    folder.mkdir(parents=True)
    chosen = {
        "total_steps": 2,
        "group_size": 2,
        "max_agent_turns": 40,
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
    found = rollouts(asyncio.run(play(with_policy(env_cls, target), folder, REFERENCE, total_steps=4)))
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


def tokens(env_cls: type[Any], folder: Path) -> str:
    async def run() -> str:
        async with FakeServer(ToolUser(turns=3)) as server:
            server.tokenizer.save_pretrained(str(folder / "tokenizer"))
            one = ServerConfig(
                base_url=server.base_url,
                model_name="fake",
                server_type="vllm",
                tokenizer_name=str(folder / "tokenizer"),
            )
            groups = await play(env_cls, folder / "run", [one])
            sampled = sum(len(made.ids) for seen in server.requests for made in seen.completions)
        return checked(groups, sampled)

    return asyncio.run(run())


def embedded(env_cls: type[Any], folder: Path) -> str:
    model = ServerConfig(model_name="embedded", engine="llama.cpp", context=8192)
    settings = {"total_steps": 1, "max_agent_turns": 3, "max_token_length": 48}
    return checked(asyncio.run(play(env_cls, folder, [model], **settings)), None)


def turn_cost(env_cls: type[Any], target: Target, folder: Path, turns: int) -> float:
    """Milliseconds of CPU for a turn: a long run less a short one, so that loading is in neither."""

    def spent(name: str, steps: int) -> tuple[float, int]:
        began = time.process_time()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = rollouts(asyncio.run(play(with_policy(env_cls, target), folder / name, REFERENCE, total_steps=steps)))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.process_time() - began + children, sum(each["turns"] for each in found)

    spent("warm", 1)
    short, few = spent("short", 1)
    steps = max(2, 2 * turns // max(1, few))
    long, many = spent("long", steps)
    if many - few < LEAST_TURNS:
        raise LachesisError(f"{many - few} turns are too few to measure; {LEAST_TURNS} are enough")
    return 1000 * (long - short) / (many - few)


def driver_cost(target: Target, name: str, turns: int) -> float:
    python = interpreter(target.scheme, PACKAGES[target.scheme]) if target.scheme in PACKAGES else None
    python = python or str(DOORS / target.scheme / "bin/python")
    named = name.partition(":")[2].partition("?")[0]
    command = [python, str(DRIVERS), target.scheme, named, str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LachesisError(f"{target.scheme}: its driver failed: {done.stderr[-800:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return 1000 * float(found["cpu"]) / int(found["turns"])


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
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            print(target.scheme, flush=True)
            try:
                full = stack.enter_context(reachable(target, folder))
                env_cls = environment_class(full)
                print(f"  target    {full}")
                print(f"  script    {script(env_cls, target, folder / 'script')}", flush=True)
                print(f"  tokens    {tokens(env_cls, folder / 'tokens')}", flush=True)
                if given.embedded:
                    print(f"  embedded  {embedded(env_cls, folder / 'embedded')}", flush=True)
                ours = turn_cost(env_cls, target, folder / "turns", given.turns)
                theirs = driver_cost(target, full, given.turns) if target.driven else None
                beside = f", {theirs:.2f} by its own driver: {ours / theirs:.1f} times" if theirs else ""
                print(f"  ms/turn   {ours:.2f}{beside}", flush=True)
            except LachesisError as error:
                failed += 1
                print(f"  {error}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
