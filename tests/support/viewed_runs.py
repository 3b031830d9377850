"""Runs for the tests of the viewer: siblings that part, calls that fail, attempts, texts that attack the page."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lachesis import Reward
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, FakeServer, Reply
from lachesis_testing.fake_server.policies import as_reply
from lachesis_tools import BUILTIN_TOOLS, ToolFailure, tool
from tests.support.scripted_server import call, say
from tests.support.small_envs import WORDS, ManyWords, asked_words, process
from tests.support.training_runs import environment, with_tokens

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "{{ 7*7 }} 🙂 \u202eevil <b>bold</b> &amp; <!-- ]]>"
)


@tool(toolset="shelf")
async def look(at: str) -> str:
    """Look at a shelf."""
    if at == "nowhere":
        raise ToolFailure("there is no such shelf <i>here</i>")
    return json.dumps({"found": [f"a book about {at}", HOSTILE]})


class Shelves(ManyWords):
    """Two rollouts look at a shelf. One then looks where nothing is; the other breaks a call, and answers."""

    name = "shelves"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ("shelf",)
    system_prompt = "You keep the shelves. <script>document.title='owned'</script>"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Reward:
        honest = float(result.messages[-1]["content"] == "Nothing is there.")
        return Reward(honest, {"honest": honest, "short": 0.5})


class Librarian:
    """Its policy: what is said second depends on who asks first."""

    def __init__(self) -> None:
        broken = 'Now for a broken one.\n<tool_call>{"name": "look", "arg'
        second = (f"Now nowhere.\n{_call('nowhere')}", broken, HOSTILE)
        self.second = iter(second)
        self.more = itertools.repeat("Nothing is there.")

    def reply(self, ask: Ask) -> Reply:
        if ask.turn == 0:
            return as_reply(ask, f"Let me look first.\n{_call('the window')}")
        return as_reply(ask, next(self.second if ask.turn == 1 else self.more))


def _call(at: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'at': at}})}\n</tool_call>"


async def played_shelves(folder: Path) -> dict[str, Any]:
    """The group of one item, as `process` writes it into the folder (Phase 2)."""
    async with FakeServer(Librarian()) as model:
        env = environment(Shelves, folder, with_tokens(model, folder), max_token_length=200)
        await env.process_manager()
    (group,) = read_lines(folder / "groups.jsonl")
    return dict(group)


class Branching(ManyWords):
    """Two trees of four rollouts, none of which has a sandbox."""

    name = "branching"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ("shelf",)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(result.messages))


class Browser:
    """Its policy looks at another shelf each time, three turns long. It breaks a call once, in a second turn."""

    def __init__(self) -> None:
        self.shelves, self.broken = itertools.count(), False

    def reply(self, ask: Ask) -> Reply:
        if ask.turn == 1 and not self.broken:
            self.broken = True
            return as_reply(ask, 'Now for a broken one.\n<tool_call>{"name": "look", "arg')
        return as_reply(ask, "Nothing is there." if ask.turn == 3 else f"Next.\n{_call(f'shelf {next(self.shelves)}')}")


TREE_REWARDS = {
    "0.0.0": 1.0,
    "0.0.1": 1.0,
    "0.1.0": 0.0,
    "0.1.1": 0.0,
    "1.0.0": 1.0,
    "1.0.1": None,
    "1.1.0": 0.0,
    "1.1.1": 1.0,
}


async def played_trees(folder: Path, **settings: Any) -> dict[str, Any]:
    """A group of trees, as `process` writes it into the folder, with the rewards `TREE_REWARDS` in place of its own."""
    async with FakeServer(Browser()) as model:
        chosen = {"group_size": 8, "tree_at": "turns:2,3", "max_token_length": 200, **settings}
        await environment(Branching, folder, with_tokens(model, folder), **chosen).process_manager()
    (group,) = read_lines(folder / "groups.jsonl")
    for rollout in group["rollouts"]:
        rollout["reward"] = TREE_REWARDS[rollout["tree"]["path"]]
    (folder / "groups.jsonl").write_text(json.dumps(group) + "\n")
    return dict(group)


class Mixed(ManyWords):
    """Every second item is solved; of the others, a call fails and what is said attacks the page. The fifth item has no
    score."""

    name = "mixed"
    toolsets = ("todo",)

    async def setup(self) -> None:
        self.items = iter((*WORDS[:3], "b a pear", "unscorable"))

    async def get_next_item(self) -> Any:
        return next(self.items, None)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        said = result.messages[-1]["content"]
        return None if item == "unscorable" else float(said == "Done.")


def mixed(request: Mapping[str, Any]) -> Any:
    """The policy of `Mixed`."""
    words = asked_words(request)
    if words[0] in ("pear", "one"):
        return say("Done.")
    return call(("no_such_tool", {})) if request["messages"][-1]["role"] == "user" else say(HOSTILE)


def mixed_run(root: Path) -> Path:
    """The run `mixed` below a folder, four groups of which are scored; the folder."""
    settings = {"total_steps": 5, "max_num_workers": 1, "enabled_toolsets": ["todo"]}
    (root / "mixed").mkdir()
    asyncio.run(process(Mixed, root / "mixed", mixed, **settings))
    return root
