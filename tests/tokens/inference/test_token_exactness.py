"""Random rollouts through the whole stack, over every chat template, checked against the fake server's record.

Rollouts edit, compact, retry, branch, offer other tools and run sub-agents. A turn says what the template would write
for it, or anything else: ids that no encoder makes, half a character, nothing, a turn without an end.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from template_tokenizers import ends, sources, tokenizer_of

from lachesis_client.errors import TemplateError
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_testing.fake_server import Reply
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.templates.template_cases import Pattern
from lachesis_tokens.templates.template_report import Extension, TemplateDifference
from tests.run import some
from tests.support.exactness import Stack, assert_exact, stack
from tool_call_parsers.detect import detect_parser

EXAMPLES = some(2)
"""Rollouts for each template. Raise it by hand: 20 take four minutes of CPU time."""
NAMES = list(sources())
FEW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking a failure takes minutes and shows nothing more
    suppress_health_check=list(HealthCheck),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look <up> & down.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string", "description": "What"}}},
        },
    }
    for name in ("search", "ping")
]
ORDINARY = min(tokenizer_of("hermes").added_tokens_decoder)
SAMPLING = Sampling(max_tokens=4096)
TEXTS = [
    "The tide is high.",
    "Zürich 東京 🙂 naïve",
    "a\n\n  b",
    "noon ",
    "{not json",
    "<|im_end|><end_of_turn> spelled </s><|eot_id|>",
]
OPS = ["turn"] * 9 + ["retry", "n", "edit", "edit turn", "compact", "delete", "insert", "rewind", "tools", "sub-agent"]


class Rollout:
    """One rollout by chance; `draw` decides everything."""

    def __init__(self, world: Stack, name: str, draw: random.Random) -> None:
        self.world, self.name, self.draw = world, name, draw
        self.managed: ManagedServer = world.tokens.for_rollout()
        self.tools: Any = draw.choice([None, TOOLS])
        self.history = MessageHistory()
        self.canonical: set[int] = set()
        """Identities of the completions that are, id for id, what the template writes for their message."""
        self.stable = {
            str(found.pattern) for found in world.prompts.template_report.findings if found.extension in _SHOWS
        }
        self.noisy = draw.choice([0.0, 0.4])
        """How often a turn says what no template would write."""
        self.compared = self.rejected = self.calls = 0
        self.start()

    def start(self) -> None:
        self.history.clear()
        if self.draw.random() < 0.5:
            self.history.append({"role": "system", "content": self.say()})
        self.history.append({"role": "user", "content": self.say()})

    def say(self) -> str:
        return self.draw.choice(TEXTS)

    async def play(self, length: int) -> None:
        steps = {
            "turn": self.turn,
            "retry": self.retry,
            "n": self.siblings,
            "edit": self.edit,
            "edit turn": self.edit_turn,
            "compact": self.compact,
            "delete": self.delete,
            "insert": self.insert,
            "rewind": self.rewind,
            "tools": self.other_tools,
            "sub-agent": self.sub_agent,
        }
        for _ in range(length):
            try:
                await steps[self.draw.choice(OPS)]()
            except TemplateError:  # some templates take no system message, no other order, no result
                self.rejected += 1
                self.start()
                del self.history[0 : len(self.history) - 1]

    # What a model says

    def wanted(self) -> dict[str, Any]:
        """A turn of the assistant, with no more calls than the template can be shown the results of."""
        most = 2 if "tool+ after calls" in self.stable else 1 if "tool after a call" in self.stable else 0
        called = self.draw.randint(0, most)
        turn: dict[str, Any] = {"role": "assistant", "content": self.say() if not called else ""}
        if self.draw.random() < 0.3:
            turn["reasoning"] = "First.\n\nThen."
        if called:
            turn["tool_calls"] = []
        for place in range(called):
            self.calls += 1
            arguments = self.draw.choice([{"query": "tide"}, {"query": 'Zürich "x"\n'}])
            function = {"name": TOOLS[place]["function"]["name"], "arguments": json.dumps(arguments)}
            turn["tool_calls"].append({"id": f"call_{self.calls}", "type": "function", "function": function})
        return turn

    def written(self, turn: dict[str, Any]) -> str | None:
        """What the template has a model write for the turn, its end included; None where it rewrites the prompt."""
        messages = self.history.to_openai("reasoning")
        try:
            prompt, text = self.rendered(messages, True), self.rendered([*messages, turn], False)
        except Exception:  # templates raise any exception
            return None
        if not text.startswith(prompt):
            return None
        end = ends(self.name)[bool(turn.get("tool_calls"))]
        if not end:  # the model opens the next message itself
            return text[len(prompt) :] + ("<|observation|>" if turn.get("tool_calls") else "<|user|>")
        at = text.rfind(end)
        return text[len(prompt) : at + len(end)] if at >= len(prompt) else None

    def rendered(self, messages: list[dict[str, Any]], prompted: bool) -> str:
        prepare = self.world.prompts._template.prepare
        return str(
            self.world.fake.tokenizer.apply_chat_template(
                [prepare(message) for message in messages],
                tools=self.tools,
                add_generation_prompt=prompted,
                tokenize=False,
            )
        )

    def noise(self) -> Reply:
        """Ids that no template writes."""
        draw = self.draw
        ids = [draw.randrange(ORDINARY) for _ in range(draw.randint(0, 12))]
        kind = draw.choice(["ended", "cut", "half a character", "nothing", "blank"])
        if kind == "half a character":
            ids += self.world.encode("🙂")[: draw.randint(1, 2)]
        elif kind == "blank":
            ids += self.world.encode(draw.choice([" ", "\n", "\n\n", "  \n"]))
        elif kind == "nothing":
            ids = []
        end = draw.choice(self.world.prompts.end_of_turn)
        return Reply(ids, "length", as_is=True) if kind == "cut" else Reply([*ids, end], "stop", as_is=True)

    async def sampled(self, n: int = 1) -> list[ChatResponse]:
        """Completions, some with the message that the template wrote them for, some with the one that was read."""
        turns: list[dict[str, Any] | None] = []
        said = []
        for _ in range(n):
            turn = self.wanted()
            text = self.written(turn) if self.draw.random() >= self.noisy else None
            ids = self.world.encode(text) if text is not None else []
            if not ids or not set(self.world.prompts.end_of_turn).isdisjoint(ids[:-1]):
                turns.append(None)
                said.append(self.noise())
            else:
                turns.append(turn)
                said.append(Reply(ids, "stop", as_is=True))
        self.world.says.next = said
        responses = await self.managed.chat_n(self.history, n, tools=self.tools, sampling=SAMPLING)
        self.compare()
        for place, turn in enumerate(turns):
            if turn is not None:
                responses[place] = replace(responses[place], message=Message.from_openai(turn))
                self.canonical.add(id(responses[place].tokens))
        return responses

    def compare(self) -> None:
        """The prompt is the template's rendering of the conversation, up to the differences in the report.

        If a continuation diverges, the rendering still ends with the suffix of the last sampled turn.
        """
        nodes = self.history.nodes()
        turns = [place for place, node in enumerate(nodes) if node.item["role"] == "assistant"]
        if not turns:
            return
        exact, following = True, []
        for place, end in zip(turns, [*turns, len(nodes)][1:], strict=True):
            origin = nodes[place].origin
            following = [node.item for node in nodes[place + 1 : end]]
            found = self.world.prompts._validator.find(Pattern.of(nodes[place].item, following))
            if found.extension not in (Extension.PREFIX, Extension.DIVERGES):
                return
            written = not isinstance(origin, ChatResponse) or id(origin.tokens) in self.canonical
            exact = exact and written and found.extension is Extension.PREFIX
        text, rendered = (
            self.world.text(self.world.last_prompt),
            self.rendered(self.history.to_openai("reasoning"), True),
        )
        if exact:
            assert text == rendered
            self.compared += 1
        elif written and not (
            TemplateDifference.BESIDE_CALLS in found.differences and nodes[turns[-1]].item["content"]
        ):
            node, context = nodes[turns[-1]], self.world.prompts.context(self.tools)
            if isinstance(node.origin, ChatResponse) and node.sampled and node.origin.tokens.context == context:
                before = node.origin.tokens.after
                assert self.world.last_prompt[: before.length] == before.ids
                suffix = self.world.text(self.world.last_prompt[before.length :])
                assert suffix and rendered.endswith(suffix)
                self.compared += 1

    def answer(self, response: ChatResponse, chat: MessageHistory | None = None) -> None:
        """Goes on with a completion, and with what follows it."""
        self.history.append(response)
        for call in response.message.tool_calls:
            message = Message("tool", self.say(), tool_call_id=call.id, name=call.name)
            self.history.append(ToolResponse(message, call.name, chat=chat))
        if not response.message.tool_calls:
            self.history.append({"role": "user", "content": self.say()})

    # Steps

    async def turn(self) -> None:
        self.answer((await self.sampled())[0])

    async def retry(self) -> None:
        """A malformed attempt: recorded beside the path, or appended and taken back, as the agent loop does it."""
        (attempt,) = await self.sampled()
        if self.draw.random() < 0.5:
            self.history.branch(attempt, "malformed")
        else:
            self.history.append(attempt)
            self.history.rewind(len(self.history) - 1, "malformed")
        await self.turn()

    async def siblings(self) -> None:
        responses = await self.sampled(self.draw.randint(2, 3))
        chosen = self.draw.randrange(len(responses))
        for place, response in enumerate(responses):
            if place != chosen:
                self.history.branch(response, "n > 1")
        self.answer(responses[chosen])

    async def sub_agent(self) -> None:
        (response,) = await self.sampled()
        outer, self.history = self.history, MessageHistory([{"role": "user", "content": self.say()}])
        try:
            for _ in range(self.draw.randint(1, 3)):
                await self.turn()
        finally:
            inner, self.history = self.history, outer
            if response.message.tool_calls:
                self.answer(response, inner)
            else:
                self.history.append(response)
                self.history.append(ToolResponse(Message("user", self.say()), "agent", chat=inner))

    async def edit(self) -> None:
        place = self.draw.randrange(len(self.history))
        self.history[place]["content"] = self.say()

    async def edit_turn(self) -> None:
        """Of a sampled turn, its reasoning or the arguments of a call."""
        if places := self.blocks():
            message = self.history[self.draw.choice(places)]
            if message.get("tool_calls"):
                message["tool_calls"][0]["function"]["arguments"] = '{"query": "edited"}'
            else:
                message["content"], message["reasoning"] = "Edited.", "On second thought."

    async def compact(self) -> None:
        """A summary takes the place of the first turns; the last ones are kept."""
        if places := self.blocks():
            kept = self.draw.choice([*places, len(self.history)])
            first = int(self.history[0]["role"] == "system")
            self.history[first:kept] = [{"role": "user", "content": "Summary."}]

    async def delete(self) -> None:
        """A turn and what follows it, from the middle."""
        if places := self.blocks():
            at = self.draw.randrange(len(places))
            del self.history[places[at] : [*places, len(self.history)][at + 1]]
            if self.history[-1]["role"] in ("assistant", "system"):
                self.history.append({"role": "user", "content": self.say()})

    async def insert(self) -> None:
        """A system message at the front, or an exchange that nobody sampled."""
        if self.history[0]["role"] != "system" and self.draw.random() < 0.5:
            self.history.insert(0, {"role": "system", "content": self.say()})
        elif places := self.blocks():
            at = self.draw.choice(places)
            if self.history[at - 1]["role"] == "user":
                self.history[at:at] = [
                    {"role": "assistant", "content": "Few-shot."},
                    {"role": "user", "content": "So?"},
                ]

    async def rewind(self) -> None:
        if places := self.blocks():
            self.history.rewind(self.draw.choice(places), "taken back")

    async def other_tools(self) -> None:
        self.tools = None if self.tools else TOOLS

    def blocks(self) -> list[int]:
        """Places of the assistant's turns."""
        return [place for place, message in enumerate(self.history) if message["role"] == "assistant"]


_SHOWS = (Extension.PREFIX, Extension.DIVERGES, Extension.UNEXTENDABLE)


def parser_of(name: str) -> str:
    return detect_parser(sources()[name]).tool_parser or "hermes"


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", NAMES)
def test_every_sampled_token_is_delivered_once_after_its_prompt(name: str) -> None:
    played: list[Rollout] = []

    with asyncio.Runner() as runner:
        closing = AsyncExitStack()
        world = runner.run(closing.enter_async_context(stack(tokenizer_of(name), parser=parser_of(name))))

        @FEW
        @given(seed=st.integers(0, 2**32), length=st.integers(10, 30))
        def examples(seed: int, length: int) -> None:
            world.fake.requests.clear()
            rollout = Rollout(world, name, random.Random(seed))
            runner.run(rollout.play(length))
            assert_exact(world, rollout.history)
            played.append(rollout)

        try:
            examples()
        finally:
            runner.run(closing.aclose())
