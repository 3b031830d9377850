"""Environments on atroposlib's `BaseEnv` whose samples are easily mistaken for each other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

from tests.support.stock_envs import StockEnv


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def value(text: str) -> float:
    """A score that tells texts apart."""
    return float(sum(place * ord(letter) for place, letter in enumerate(text.strip(), 1)))


class Asking(StockEnv):
    async def say(self, chat, **how):
        given = await self.server.chat_completion(messages=chat, n=1, max_tokens=how.pop("max_tokens", 64), **how)
        return given.choices[0].message.content

    async def talk(self, turns=3):
        """A conversation that ends with the model's last turn."""
        chat = []
        for turn in range(turns):
            chat.append(user(f"Question {turn}"))
            chat.append(model(await self.say(chat)))
        return chat

    def raw(self, pieces):
        """Ids and masks of (text, trained) pieces, each encoded by itself."""
        ids, masks = [], []
        for text, trained in pieces:
            found = self.tokenizer.encode(text, add_special_tokens=False)
            ids += found
            masks += found if trained else [-100] * len(found)
        return ids, masks


class Sorted(Asking):
    """The best and the worst of several, in the order of their scores; the items are all equal."""

    async def get_next_item(self):
        await super().get_next_item()
        return "the same"

    async def collect_trajectories(self, item):
        said = list(await asyncio.gather(*(self.say([user("Question")]) for _ in range(4))))
        random.shuffle(said)
        said.sort(key=value)
        chats = [[user("Question"), model(text)] for text in (said[0], said[-1])]
        return self.group(chats, [value(chat[-1]["content"]) for chat in chats]), []


class TwoPrompts(Asking):
    """One answer to two prompts; the second prompt comes first in the group."""

    shows_prompt = True

    async def collect_trajectories(self, item):
        prompts = {}
        for name in ("A", "B"):
            chat = [user(f"Prompt {name}")]
            given = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompts[given if self.shows_prompt else "Q:"] = await self.say(chat)
        made = [self.raw([(prompt, False), (" " + said, True)]) for prompt, said in reversed(prompts.items())]
        if not self.shows_prompt:
            made *= 2
        ids, masks = zip(*made, strict=True)
        return {"tokens": list(ids), "masks": list(masks), "scores": [2.0, 1.0]}, []


class OneTurn(Asking):
    """All turns are encoded as trained; then the mask keeps one of them."""

    kept = 0

    async def collect_trajectories(self, item):
        made = tokenize_for_trainer(self.tokenizer, await self.talk(), train_on_all_assistant_turns=True)
        run, masks = -1, []
        for place, mask in enumerate(made["masks"]):
            run += mask != -100 and (place == 0 or made["masks"][place - 1] == -100)
            masks.append(mask if run == self.kept else -100)
        return {"tokens": [made["tokens"]], "masks": [masks], "scores": [1.0]}, []


class HalfATurn(Asking):
    async def collect_trajectories(self, item):
        made = tokenize_for_trainer(self.tokenizer, await self.talk(1))
        trained = [place for place, mask in enumerate(made["masks"]) if mask != -100]
        for place in trained[: len(trained) // 2]:
            made["masks"][place] = -100
        return {"tokens": [made["tokens"]], "masks": [made["masks"]], "scores": [1.0]}, []


class Everything(Asking):
    """The prompt is trained too."""

    async def collect_trajectories(self, item):
        made = tokenize_for_trainer(self.tokenizer, await self.talk(1))
        return {"tokens": [made["tokens"]], "masks": [list(made["tokens"])], "scores": [1.0]}, []


class FewShot(Asking):
    """An example's answer, which the model gave elsewhere, is trained too."""

    async def collect_trajectories(self, item):
        await self.say([user("Example")])
        await self.say([user("Something else")])
        chat = [user("An example"), model("Yes"), user("Question")]
        chat.append(model(await self.say(chat)))
        return self.group([chat], [1.0], train_on_all_assistant_turns=True), []


class SameTurns(Asking):
    """Three equal answers of one conversation, in ids that do not show the conversation."""

    as_chat = False

    async def collect_trajectories(self, item):
        chat = await self.talk()
        if self.as_chat:
            return self.group([chat], [1.0], train_on_all_assistant_turns=True), []
        ids, masks = self.raw([(each["content"], each["role"] == "assistant") for each in chat])
        return {"tokens": [ids], "masks": [masks], "scores": [1.0]}, []


class CutTwin(Asking):
    """An answer, and the same without its end of turn, which its text does not show."""

    scores = (0.0, 1.0)

    async def collect_trajectories(self, item):
        chat = [user("Question")]
        length = len(self.tokenizer.encode("Yes", add_special_tokens=False))
        whole, cut = await self.say(chat), await self.say(chat, max_tokens=length)
        return self.group([[*chat, model(cut)], [*chat, model(whole)]], list(self.scores)), []


class Edited(Asking):
    async def collect_trajectories(self, item):
        chat = [user("Question")]
        said = await self.say(chat)
        chats = [[*chat, model(text)] for text in (said[:-1], "x" + said, said + " Done.")]
        return self.group(chats, [3.0, 2.0, 1.0]), []


class Gold(Asking):
    """Adds the right answer to the group, which the model happened to give as well."""

    async def collect_trajectories(self, item):
        chats = [[user("Question"), model(text)] for text in ("Yes", await self.say([user("Question")]))]
        return self.group(chats, [1.0, 0.0]), []


class Observed(Asking):
    """A tool's result within one message: the model goes on after it, and the mask trains all after the prompt."""

    stop: list[str] | None = None
    between = "<obs>3</obs>"
    turns = 2

    def kept(self, said: str, turn: int) -> str:
        """What the environment goes on with."""
        return said

    async def collect_trajectories(self, item):
        group = {"tokens": [], "masks": [], "scores": []}
        prompt = self.tokenizer.apply_chat_template([user(str(item))], tokenize=False, add_generation_prompt=True)
        for place in range(self.config.group_size):
            text = prompt
            for turn in range(self.turns):
                given = await self.server.completion(prompt=text, n=1, max_tokens=32, stop=self.stop)
                last = turn == self.turns - 1
                text += self.kept(given.choices[0].text, turn) + ("" if last else self.between)
            ids, masks = self.sample(prompt, text)
            group["tokens"].append(ids)
            group["masks"].append(masks)
            group["scores"].append(float(place))
        return group, []

    def sample(self, prompt: str, text: str):
        return self.raw([(prompt, False), (text[len(prompt) :], True)])


class ObservedMessage(Observed):
    """The same as a chat, whose last message is the whole text."""

    def sample(self, prompt, text):
        made = tokenize_for_trainer(self.tokenizer, [user("Q"), model(text[len(prompt) :])])
        return made["tokens"], made["masks"]


class ObservedCut(Observed):
    """The first answer is cut before its end."""

    def kept(self, said, turn):
        return said[: 2 * len(said) // 3] if turn == 0 else said


class ObservedWithoutItsBeginning(Observed):
    def kept(self, said, turn):
        return said[len(said) // 3 :] if turn == 0 else said


class ObservedFromTheMiddle(Observed):
    """The mask begins within the first answer."""

    def sample(self, prompt, text):
        begin = len(prompt) + 8
        return self.raw([(text[:begin], False), (text[begin:], True)])


class ObservedElsewhere(Observed):
    """The model is asked the second time after another prompt."""

    async def collect_trajectories(self, item):
        first = (await self.server.completion(prompt="First: ", n=1, max_tokens=32)).choices[0].text
        second = (await self.server.completion(prompt=f"So far: {first}<obs>", n=1, max_tokens=32)).choices[0].text
        ids, masks = self.raw([("First: ", False), (f"{first}<obs>{second}", True)])
        return {"tokens": [ids], "masks": [masks], "scores": [1.0]}, []


class WholeChat(Asking):
    """The mask trains all after the first question: answers and what stands between them."""

    async def collect_trajectories(self, item):
        return self.whole(await self.talk(2))

    def whole(self, chat):
        ids = self.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        begin = len(self.tokenizer.apply_chat_template(chat[:1], tokenize=True, return_dict=False))
        return {"tokens": [ids], "masks": [[-100] * begin + list(ids[begin:])], "scores": [1.0]}, []


class WholeCalls(WholeChat):
    """The same with calls, which a template writes in its own way."""

    async def collect_trajectories(self, item):
        tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        chat = [user("Add.")]
        for turn in range(2):
            given = await self.server.chat_completion(
                messages=chat, n=1, max_tokens=64, tools=[{"type": "function", "function": tool}]
            )
            chat.append(given.choices[0].message.model_dump(exclude_none=True))
            call = chat[-1]["tool_calls"][0]
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": f"the sum is {turn}"})
        return self.whole(chat[:-1])


class Twice(Asking):
    """The first of two answers is returned twice: in one group, or in two groups of the item."""

    as_groups = False

    async def collect_trajectories(self, item):
        chat = [user(f"Question {item}")]
        one, other = [[*chat, model(await self.say(chat))] for _ in range(2)]
        if self.as_groups:
            return [self.group([one, other], [1.0, 1.0]), self.group([one], [1.0])], []
        return self.group([one, one, other], [1.0, 1.0, 1.0]), []


class NodesTwice(Asking):
    """The same with the nodes of a managed server, which are known by their ids."""

    as_groups = False
    scores = (1.0, 1.0, 1.0)

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=[user(f"Question {item}")], n=2, max_tokens=64, temperature=1.0)
            one, other = managed.get_state()["nodes"]
        if self.as_groups:
            return [self.of([one, other], self.scores[1:]), self.of([one], self.scores[:1])], []
        return self.of([one, one, other], self.scores), []

    def of(self, nodes, scores):
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": list(scores),
        }


class SharedTurn(Asking):
    """Two conversations with the same first turn, which both train."""

    async def collect_trajectories(self, item):
        begun = [user(f"Question {item}")]
        begun += [model(await self.say(begun)), user("And then?")]
        chats = [[*begun, model(await self.say(begun))] for _ in range(2)]
        return self.group(chats, [1.0, 0.0], train_on_all_assistant_turns=True), []


class Kept(Asking):
    """Returns the sample of its first item again for every other one."""

    first = None

    async def collect_trajectories(self, item):
        chat = [user(f"Question {item}")]
        answered = [*chat, model(await self.say(chat))]
        self.first = self.first or answered
        return self.group([self.first], [1.0]), []


class Reencoded(Asking):
    """Two turns, encoded by the environment itself without a template."""

    async def collect_trajectories(self, item):
        group = {"tokens": [], "masks": [], "scores": []}
        for _ in range(self.config.group_size):
            chat = [user(f"Question {item}")]
            chat += [model(await self.say(chat)), user("And then?")]
            chat.append(model(await self.say(chat)))
            ids, masks = self.raw([(each["content"], each["role"] == "assistant") for each in chat])
            group["tokens"].append(ids)
            group["masks"].append(masks)
            group["scores"].append(1.0)
        return group, []
