"""Small environments for the tests, with their settings, servers in a thread, and child processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

import environments.hermes_base_env
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from tests.support.pictures import image, text
from tests.support.scripted_server import Answer, ScriptedServer, call, say

Env = TypeVar("Env", bound=HermesAgentBaseEnv)
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("pear fig apple", "delta alpha", "one two three", "b a", "z y x", "green blue")


class SortWords(HermesAgentBaseEnv):
    """The agent sorts the words of a line into a file."""

    name = "sort-words"

    async def setup(self):
        self.items = itertools.cycle(["pear fig apple", "delta alpha"])

    async def get_next_item(self):
        return next(self.items)

    def format_prompt(self, item):
        return f"Write the words of {item!r}, sorted, one a line, into sorted.txt."

    async def compute_reward(self, item, result, ctx):
        written = await ctx.read_file("sorted.txt")
        return float(written.split() == sorted(item.split()))


class Shows(SortWords):
    """Its prompt has an image. The second rollout of an item is the best."""

    name = "shows"
    max_agent_turns = 1

    def format_prompt(self, item):
        return [text("What is on "), image(56, 28), text("this?")]

    async def compute_reward(self, item, result, ctx):
        return float(ctx.task_id.rsplit("-", 3)[1] == "1")


class OldSortWords(SortWords, environments.hermes_base_env.HermesAgentBaseEnv):
    """The same on the old import paths: its contexts are called without `await`."""


class ManyWords(SortWords):
    """The same with many items, each once."""

    name = "many-words"

    async def setup(self):
        self.items = (f"{word} {number}" for number in itertools.count() for word in WORDS)


class Fussy(SortWords):
    """It scores only one rollout of a group that is about apples."""

    name = "fussy"

    async def setup(self):
        self.items = iter(f"{word} {number}" for number in range(5) for word in ("apple", "pear"))

    async def get_next_item(self):
        return next(self.items, None)

    async def compute_reward(self, item, result, ctx):
        return None if "apple" in item and ctx.task_id.split("-")[2] != "0" else 1.0


def fussed(request: dict[str, Any]) -> Answer:
    """A model that needs a turn more for apples, and no sandbox."""
    return call(("todo", {})) if "apple" in asked_words(request) and len(request["messages"]) < 3 else say("Done.")


def asked_words(request: Mapping[str, Any]) -> list[str]:
    """The words of the item that a request is about."""
    prompt = next(message["content"] for message in request["messages"] if message["role"] == "user")
    return str(prompt).split("'")[1].split()


def sorts(request: dict[str, Any]) -> Answer:
    """A model that solves `SortWords`: one call of `write_file`, then an answer."""
    if request["messages"][-1]["role"] == "tool":
        return say("Done.")
    content = "\n".join(sorted(asked_words(request)))
    return call(("write_file", {"path": "sorted.txt", "content": content}))


def does_nothing(_: dict[str, Any]) -> Answer:
    return say("I would rather not.")


def make(env_cls: type[Env], server: ScriptedServer | str | None, folder: Path, **settings: Any) -> Env:
    """An environment over a server, or its reference policy, with small settings and its output in `folder`."""
    base_url = server.base_url if isinstance(server, ScriptedServer) else server
    over_http = ServerConfig(base_url=base_url, model_name="scripted", api_key="x", max_retries=0)
    chosen = {
        "total_steps": 2,
        "group_size": 2,
        "enabled_toolsets": ["terminal", "file"],
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "data_dir_to_save_evals": str(folder / "eval"),
        "max_infra_retries": 0,
        **settings,
    }
    config = env_cls.env_config_cls(**chosen)
    env = env_cls(config, [over_http if server is not None else ServerConfig(model_name="reference")])
    env.console = Console(file=(folder / "console.txt").open("a"), width=200)
    return env


async def process(
    env_cls: type[HermesAgentBaseEnv],
    folder: Path,
    policy: Sequence[Answer] | Callable[[dict[str, Any]], Any] = sorts,
    **settings: Any,
) -> Any:
    """Play an environment against a new server. Returns the result of `process`."""
    async with ScriptedServer(policy) as server:
        return await make(env_cls, server, folder, **settings).process_manager()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rollouts(path: Path) -> list[dict[str, Any]]:
    """Every rollout of a groups file."""
    return [rollout for group in lines(path) for rollout in group["rollouts"]]


def sandboxes() -> set[int]:
    """Processes of sandboxes that this process, or a child of it, made."""
    parents: dict[int, int] = {}
    names: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
                names[int(entry.name)] = command
    return {
        pid
        for pid, command in names.items()
        if (b"bwrap" in command.split(b"\0")[0] or b"executor.py" in command) and _is_ours(pid, parents)
    }


def kill_sandboxes() -> None:
    """End them with SIGKILL. One may be gone by then: it ends with another."""
    for pid in sandboxes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_ours(pid: int, parents: Mapping[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False


@contextmanager
def served(policy: Callable[[dict[str, Any]], Any]) -> Iterator[ScriptedServer]:
    """A scripted server in a separate thread, for code without an event loop or with its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ScriptedServer(policy)
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def start(arguments: Sequence[str], **env: str) -> subprocess.Popen[str]:
    """Run `python ARGUMENTS` in the project's root, and keep its output."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )


if __name__ == "__main__":
    ManyWords.cli()
