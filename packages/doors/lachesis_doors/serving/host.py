"""The tasks of a served environment, and the rollouts that clients have open in it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, Self, TypeAlias

from backends.errors import LachesisError, SettingsError
from backends.text import counted
from lachesis import HermesAgentBaseEnv
from lachesis.figures.item_keys import ItemKeys, first_items, part_key
from lachesis.loop.rollout import PlayedGroup
from lachesis_doors.serving.open_rollout import (
    OpenRollout,
    answer_description,
    answer_name,
    completions_from,
    described,
)
from lachesis_doors.serving.policies import Policies, RequestPolicy
from lachesis_doors.serving.refusals import refusal

OnBranches: TypeAlias = Literal["error", "longest", "last"]
"""What a standard with one chain of tokens a rollout gets of one that has several: none, or one of them."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at silent clients."""


class NoSuchTask(LachesisError):
    """The client names a split or a number that there is not."""


class NoPlace(LachesisError):
    """There are as many open rollouts as there may be, or the server is about to end."""


class ServingHost:
    """Opens rollouts of an environment, whose run has begun, and closes those that their clients have left.

    Args:
        items: how many tasks of `get_next_item` are offered.
        idle: seconds after which the rollout of a silent client is closed.
        driven: clients say what a model would say. Otherwise `play` runs whole rollouts.
    """

    def __init__(
        self,
        env: HermesAgentBaseEnv,
        *,
        items: int,
        idle: float,
        driven: bool = True,
        on_branches: OnBranches = "error",
    ) -> None:
        if env.collects or not env.takes_follow_ups:
            raise SettingsError(f"{env.run_name}: its agent is a program of its own, which cannot be served")
        self.env = env
        self.on_branches = on_branches
        self.name = env.run_name.lower()
        self.places = env.max_num_workers
        self.draining = False
        self._wanted, self._idle = items, idle
        self._splits: dict[str, list[tuple[Any, str]]] = {}
        self._played: Counter[str] = Counter()
        self._next = 0
        self._open: dict[str, OpenRollout] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self.policies = Policies(env, self._stack)
        """The model servers of rollouts that run here."""
        self._room = asyncio.Semaphore(self.places)
        self._playing: set[asyncio.Future[None]] = set()
        self._driven = driven

    async def __aenter__(self) -> Self:
        splits = {"train": await first_items(self.env.get_next_item, self._wanted)}
        if type(self.env).get_eval_items is not HermesAgentBaseEnv.get_eval_items:
            splits["test"] = list(await self.env.get_eval_items())[: self.env.config.eval_items]
        for split, items in splits.items():
            keys = ItemKeys()
            self._splits[split] = [(item, keys.key(item)) for item in items]
        if not any(self._splits.values()):
            raise SettingsError(f"{self.env.run_name}: it has no items to serve")
        if not self._driven:
            return self
        first = next(items[0][0] for items in self._splits.values() if items)
        given = described([*self.env.tool_definitions(), *(tool.definition() for tool in self.env.tools_for(first))])
        self.answer_tool = answer_name(self.env, [tool["name"] for tool in given])
        self.tools = [*given, answer_description(self.env, self.answer_tool)]
        """Before a task is chosen: those of all tasks, and those of the first one."""
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close what is open. Rollouts that have not ended have no score."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*self._closing, *(self.close(name) for name in list(self._open)))
        await self._stack.aclose()

    async def drain(self) -> None:
        """Open no more rollouts, and give those that are open the grace period to end."""
        self.draining = True
        seconds = self.env.config.grace_period
        if unfinished := [*(asyncio.create_task(each.over()) for each in self._unfinished()), *self._playing]:
            rollouts = counted(len(unfinished), "rollout")
            self.env.console.print(f"{rollouts} open, with {seconds:g} s to finish", markup=False, highlight=False)
            await asyncio.wait(unfinished, timeout=seconds)

    def _unfinished(self) -> list[OpenRollout]:
        return [each for each in self._open.values() if not each.ended]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_EVERY, self._idle / 4))
            silent = time.monotonic() - self._idle
            for name in [name for name, each in self._open.items() if each.touched < silent and not each.busy]:
                # Not awaited: meanwhile clients speak again, and close theirs.
                closing = asyncio.create_task(self._open.pop(name).close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    @property
    def splits(self) -> Mapping[str, int]:
        """The number of tasks in each."""
        return {split: len(items) for split, items in self._splits.items()}

    def task(self, split: str, index: int) -> dict[str, Any]:
        """How clients name a task: without its content, which may contain the solution. Raises `NoSuchTask`."""
        if split not in self._splits or not 0 <= index < len(self._splits[split]):
            size = ", ".join(f"{name} has {number}" for name, number in self.splits.items())
            raise NoSuchTask(f"there is no task {index} of the split {split!r}; {size}")
        return {"split": split, "index": index, "id": self._splits[split][index][1]}

    def tasks(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """All, each with its first messages. They are not known where a session writes them."""
        for split, items in self._splits.items():
            for index, (item, _) in enumerate(items):
                known = self.env.player.scorer.session is None
                yield self.task(split, index), self.env.initial_messages(item) if known else []

    def _attempt(self, split: str, index: int) -> tuple[Any, str]:
        """The item, and a key that no other rollout of it has. Raises `NoSuchTask`."""
        self.task(split, index)
        item, key = self._splits[split][index]
        self._played[key] += 1
        return item, part_key(key, self._played[key] - 1)

    async def play(self, split: str, index: int, policy: RequestPolicy) -> tuple[PlayedGroup, str]:
        """One rollout of a task with this policy, once there is a place; and why no trainer may have it, if so.

        Nothing is trained on the split `test`. Raises as `open`, and as `play_item`.
        """
        item, key = self._attempt(split, index)
        over = asyncio.get_running_loop().create_future()
        async with self._room:
            if self.draining:
                raise NoPlace("the server is about to end")
            self._playing.add(over)
            token = completions_from.set(policy)
            try:
                (group,) = await self.env.play_item(item, key, size=1, evaluation=split == "test")
                (rollout,) = group.rollouts
                if split == "test":
                    return group, ""
                return group, await asyncio.to_thread(refusal, rollout, policy, self.env.config, policy.named)
            finally:
                completions_from.reset(token)
                self._playing.discard(over)
                over.set_result(None)

    def open(self, split: str = "train", index: int | None = None, name: str | None = None) -> tuple[str, OpenRollout]:
        """Begin a rollout, under a name for `get` and `close`. Without an index, it is that of the next task.

        Raises:
            NoSuchTask: there is no such task.
            NoPlace: another rollout has to end first.
        """
        self.check(split, index, name)
        if index is None:
            index, self._next = self._next % max(1, len(self._splits.get(split, ()))), self._next + 1
        item, key = self._attempt(split, index)
        rollout = OpenRollout(self.env, item, key, self.answer_tool, evaluation=split == "test")
        name = name or uuid.uuid4().hex
        self._open[name] = rollout
        return name, rollout

    def check(self, split: str, index: int | None, name: str | None) -> None:
        """Raises as `open` would once the rollout of this name is closed."""
        if self.draining:
            raise NoPlace("the server is about to end")
        if sum(each is not self._open.get(name or "") for each in self._unfinished()) >= self.places:
            raise NoPlace(f"all {self.places} places are taken; more are set with -c")
        self.task(split, index or 0)

    def get(self, name: str) -> OpenRollout | None:
        """The rollout of this name; None if it was closed. Its client is not silent."""
        rollout = self._open.get(name)
        if rollout is not None:
            rollout.touched = time.monotonic()
        return rollout

    async def close(self, name: str) -> None:
        """Close a rollout and remove its sandbox."""
        rollout = self._open.pop(name, None)
        if rollout is not None:
            await rollout.close()
