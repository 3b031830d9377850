"""Small environments on atroposlib's `BaseEnv`, written as its own are, for `lachesis play`."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class StockConfig(BaseEnvConfig):
    flavour: str = "plain"


class StockEnv(BaseEnv):
    name = "stock"
    env_config_cls = StockConfig

    @classmethod
    def config_init(cls):
        config = StockConfig(group_size=3, total_steps=2, max_token_length=64, use_wandb=True, tokenizer_name="x/y")
        return config, APIServerConfig(model_name="m", base_url="http://localhost:9001/v1", api_key="x")

    async def setup(self):
        self.drawn = 0
        self.logged: list[Any] = []
        self.shown: list[Any] = []

    async def get_next_item(self):
        self.drawn += 1
        return ((frozenset({"role": "user", "content": f"Question {self.drawn}"}.items()),), self.drawn)

    async def evaluate(self, *args, **kwargs):
        answer = await self.server.chat_completion(
            messages=[{"role": "user", "content": "eval"}], n=1, max_tokens=20, temperature=0.0, split="eval"
        )
        await self.evaluate_log({"eval/length": len(answer.choices[0].message.content)}, samples=[{"one": 1}])

    async def wandb_log(self, wandb_metrics=None):
        self.logged.append(dict(wandb_metrics or {}))
        await super().wandb_log(wandb_metrics)

    async def add_rollouts_for_wandb(self, scored_data, item=None):
        self.shown.append((scored_data, item))

    def messages(self, item):
        return [dict(message) for message in item[0]]

    def group(self, chats, scores, **how):
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for chat, score in zip(chats, scores, strict=True):
            made = tokenize_for_trainer(self.tokenizer, chat, **how)
            group["tokens"].append(made["tokens"])
            group["masks"].append(made["masks"])
            group["scores"].append(score)
        return group


class ChatEnv(StockEnv):
    """`n` answers of one question."""

    async def answers(self, item, **how):
        chat = self.messages(item)
        given = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=64, **how)
        return [[*chat, {"role": "assistant", "content": choice.message.content}] for choice in given.choices]

    async def collect_trajectories(self, item):
        chats = await self.answers(item)
        return self.group(chats, [float(place) for place in range(len(chats))]), []


class ShuffledEnv(ChatEnv):
    """Drops one answer and shuffles the others."""

    async def collect_trajectories(self, item):
        chats = (await self.answers(item))[1:]
        random.shuffle(chats)
        group = self.group(chats, [float(len(chat[-1]["content"])) for chat in chats])
        group["group_overrides"] = {"group_size": len(chats)}
        group["overrides"] = [{"set_advantage_to_zero": place == 0} for place in range(len(chats))]
        group["advantages"] = [[1.0], [2.0]]
        return group, []


class TurnsEnv(StockEnv):
    """Three turns each, all trained; one trajectory at a time."""

    async def collect_trajectory(self, item):
        chat = self.messages(item)
        for turn in range(3):
            given = await self.server.chat_completion(messages=chat, n=1, max_tokens=64)
            chat.append({"role": "assistant", "content": given.choices[0].message.content})
            chat.append({"role": "user", "content": f"And then? {turn}"})
        made = tokenize_for_trainer(self.tokenizer, chat[:-1], train_on_all_assistant_turns=True)
        return ScoredDataItem(tokens=made["tokens"], masks=made["masks"], scores=random.random()), []


class NodesEnv(StockEnv):
    """`managed_server` and its nodes."""

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            prompt = self.tokenizer.apply_chat_template(self.messages(item), add_generation_prompt=True, tokenize=False)
            await managed.completion(prompt=prompt, n=self.config.group_size, max_tokens=64, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "advantages": [[0.5] * len(node.tokens) for node in nodes],
            "scores": [1.0, 0.0, 0.5],
        }, []


class CompletionEnv(StockEnv):
    """Text completions with a prefill, tokenised as a chat."""

    async def collect_trajectories(self, item):
        chat = self.messages(item)
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + "<think>\n"
        given = await self.server.completion(prompt=prompt, n=self.config.group_size, max_tokens=64)
        chats = [[*chat, {"role": "assistant", "content": "<think>\n" + choice.text}] for choice in given.choices]
        return self.group(chats, [1.0, 0.0, 0.5]), []


class RawIdsEnv(ChatEnv):
    """Encodes by itself: nothing but the ids tells what was said."""

    async def collect_trajectories(self, item):
        group = {"tokens": [], "masks": [], "scores": [1.0, 0.0, 0.5]}
        for chat in await self.answers(item):
            before = self.tokenizer.encode("Q: " + chat[0]["content"] + " A: ", add_special_tokens=False)
            after = self.tokenizer.encode(chat[-1]["content"], add_special_tokens=False)
            group["tokens"].append(before + after)
            group["masks"].append([-100] * len(before) + after)
        return group, []


class BacklogEnv(ChatEnv):
    """The first item makes two others."""

    async def get_next_item(self):
        item = await super().get_next_item()
        return item if item[1] == 1 else None

    async def collect_trajectories(self, item):
        group, _ = await super().collect_trajectories(item)
        later = [(item[0], number) for number in (10, 11)] if item[1] == 1 else []
        return group, later


class ListEnv(ChatEnv):
    """Two groups of an item, and one that is None."""

    async def collect_trajectories(self, item):
        first, _ = await super().collect_trajectories(item)
        second, _ = await super().collect_trajectories(item)
        return [first, None, second], []


class EditedEnv(ChatEnv):
    """The first answer is edited, the second is somebody else's, the third is the model's."""

    async def collect_trajectories(self, item):
        chats = await self.answers(item)
        chats[0][-1]["content"] = chats[0][-1]["content"][:-3] + "..."
        chats[1][-1]["content"] = "As a person I would say this."
        return self.group(chats, [1.0, 0.5, 0.0]), []


class NoneEnv(ChatEnv):
    async def collect_trajectories(self, item):
        await self.answers(item)
        return None, []


class RaisingEnv(ChatEnv):
    async def collect_trajectories(self, item):
        await self.answers(item)
        raise KeyError("no such key in my data")


class SwallowingEnv(ChatEnv):
    """Makes a bad score of every failure, as many do."""

    async def collect_trajectories(self, item):
        chats = []
        for _ in range(self.config.group_size):
            try:
                given = await self.server.chat_completion(messages=self.messages(item), n=1, max_tokens=64)
                said = given.choices[0].message.content
            except Exception:
                said = "no answer"
            chats.append([*self.messages(item), {"role": "assistant", "content": said}])
        return self.group(chats, [float(chat[-1]["content"] != "no answer") for chat in chats]), []


class ThreadEnv(ChatEnv):
    """Asks from a thread with an event loop of its own, and from one of the loop's own executor."""

    async def collect_trajectories(self, item):
        def ask():
            return asyncio.run(self.answers(item))

        loop = asyncio.get_running_loop()
        one, two = await asyncio.gather(asyncio.to_thread(ask), loop.run_in_executor(None, ask))
        return [self.group(chats, [1.0, 0.0, 0.5]) for chats in (one, two)], []


class StateEnv(ChatEnv):
    """Keeps its place in the trainer's checkpoints."""

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {**(data or {}), "drawn": self.drawn})


class WarmEnv(ChatEnv):
    """Samples in its own way."""

    how: dict[str, Any] = {"temperature": 0.8}  # noqa: RUF012

    async def answers(self, item):
        return await super().answers(item, **self.how)


class GroupsOfOneEnv(TurnsEnv):
    """A trajectory is a group of one, with what each sample may have."""

    as_list = False

    async def collect_trajectory(self, item):
        trajectory, later = await super().collect_trajectory(item)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], messages=[], overrides=[])
        group["tokens"].append(trajectory["tokens"])
        group["masks"].append(trajectory["masks"])
        group["scores"].append(trajectory["scores"])
        group["messages"].append([{"role": "user", "content": "one message"}])
        group["overrides"].append({"set_advantage_to_zero": True})
        return [group] if self.as_list else group, later


class PlaysOnly(BaseEnv):
    """It has no `evaluate`."""

    name = "stock"
    env_config_cls = StockConfig
    config_init, setup, get_next_item = StockEnv.config_init, StockEnv.setup, StockEnv.get_next_item
    messages, group, answers = StockEnv.messages, StockEnv.group, ChatEnv.answers
    collect_trajectories = ChatEnv.collect_trajectories


class FiguresEnv(ChatEnv):
    """Figures of an evaluation, in each of the ways that Atropos' environments give them."""

    way = "eval_metrics"

    async def setup(self):
        await super().setup()
        self.eval_metrics: list[Any] = []

    async def evaluate(self, *args, **kwargs):
        await self.server.chat_completion(messages=[{"role": "user", "content": "eval"}], n=1, max_tokens=8)
        if self.way == "eval_metrics":
            self.eval_metrics.append(("eval/percent_correct", 0.25))
        elif self.way == "wandb_log":
            self.eval_metrics.append(("eval/percent_correct", 0.25))
            await self.wandb_log({"eval/other": 1})
        elif self.way == "added":
            self.right = 0.25
            await self.wandb_log()
        elif self.way == "returned":
            return {"eval/percent_correct": 0.25, "samples": ["a"]}
        return None

    async def wandb_log(self, wandb_metrics=None):
        wandb_metrics = wandb_metrics or {}
        wandb_metrics.update(dict(self.eval_metrics))
        if self.way == "added":
            wandb_metrics["eval/percent_correct"] = self.right
        self.eval_metrics = []
        await super().wandb_log(wandb_metrics)


class BareEnv(TurnsEnv):
    """Trajectories without a backlog; every second one is None."""

    made = 0

    async def collect_trajectory(self, item):
        self.made += 1
        trajectory, _ = await super().collect_trajectory(item) if self.made % 2 else (None, [])
        return trajectory


class ExitingEnv(ChatEnv):
    """Code that ends its program."""

    async def collect_trajectories(self, item):
        raise SystemExit(0)
