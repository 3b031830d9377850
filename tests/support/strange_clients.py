"""Clients that treat a conversation as real agent programs do, on three APIs, and a judge of what the model was sent.

The judge knows nothing of the product. Every text has a mark, so the marks in a prompt tell which messages the model
read, and the fake server's record tells which tokens it sampled. A client knows which of its answers it has left as
they were: a request that goes on from such an answer must extend exactly the tokens of that answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import aiohttp

from lachesis_messages.responses import ChatResponse
from lachesis_testing.fake_server import Ask, Reply
from lachesis_tokens.endpoint import Recording
from tests.support.exactness import Stack

PARAMETERS = {"type": "object", "properties": {"note": {"type": "string"}, "n": {}}, "required": ["note"]}
NAMES = ("look", "write", "run")
MARK = re.compile(r"zq([A-Z]\d+)qz")


def mark(kind: str, number: int) -> str:
    return f"zq{kind}{number}qz"


@dataclass(frozen=True, eq=False)
class Entry:
    """One message of a client's conversation. Entries are compared by identity: a changed message is another one."""

    role: str
    text: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str, str], ...] = ()
    """Id, name and JSON of the arguments."""
    answers: str | None = None
    """The id of the call that a tool result answers."""
    context: tuple[Entry, ...] | None = None
    """The conversation in which an answer was sampled; None for messages of clients."""
    tools: bool = True
    mark: str = ""
    keeps_reasoning: bool = False

    def marks(self) -> list[str]:
        return MARK.findall(" ".join([self.text, *(arguments for _, _, arguments in self.calls)]))


Talk = tuple[Entry, ...]


def in_place(talk: Talk, tools: bool) -> Entry | None:
    """The last answer that is as it was sampled, after the messages that it was sampled after."""
    found = None
    for place, entry in enumerate(talk):
        if entry.context is not None and entry.context == talk[:place] and entry.tools == tools:
            found = entry
    return found


@dataclass
class Sent:
    """A request that was answered: what the judge compares."""

    marks: list[str]
    extends: str
    """The mark of the answer whose tokens the prompt must extend, "" if there is none."""
    answers: list[str]
    changed: str = ""
    """The mark of an answer whose reasoning the client changed: nothing may extend its tokens."""


class Model:
    """A policy: answers with marks, calls, reasoning, and now and then the same answer again."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.numbers = itertools.count(1)

    def __call__(self, ask: Ask) -> Reply:
        ids = ask.ended(ask.codec.encode(self.text()))
        return Reply(ids, logprobs=[-self.rng.random() for _ in ids])  # to score them takes longer than all else

    def text(self) -> str:
        rng = self.rng
        if rng.random() < 0.08:
            return f"The same {mark('A', 0)}."
        text = ""
        if rng.random() < 0.4:
            text = f"<think>\nreason {next(self.numbers)}{rng.choice(['', ' é', chr(10) + 'more'])}\n</think>\n\n"
        calls = rng.choice([0, 0, 1, 1, 2, 3])
        if not calls or rng.random() < 0.3:
            text += f"say {mark('A', next(self.numbers))}{rng.choice(['', '.', ' “ü”', chr(10) + 'two lines', '  x'])}"
        for _ in range(calls):
            arguments = {"note": mark("A", next(self.numbers)), "n": rng.choice(VALUES)}
            written = json.dumps({"name": rng.choice(NAMES), "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
            text += f"\n<tool_call>\n{written}\n</tool_call>"
        return text.lstrip("\n")


VALUES: Sequence[Any] = (
    0,
    1.0,
    2.5,
    -7,
    True,
    None,
    "",
    'ä"\\\n',
    [1, [2, {"b": 1, "a": 2}]],
    {"z": {}, "a": []},
    1e20,
)


class Wire:
    """How a client writes its conversation: `noise` is what a client does to messages without a change of meaning."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def chance(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def renamed(self, talk: Talk) -> Talk:
        """The conversation with other call ids, the same in calls and results."""
        way = self.rng.choice(["same", "same", "new", "count", "one"])
        if way == "same":
            return talk
        numbers, names, found = itertools.count(), {}, []
        for entry in talk:
            if entry.calls:
                if way == "count":
                    numbers = itertools.count()  # from zero in every turn
                new = [f"{way}_{next(numbers)}" for _ in entry.calls]
                if way == "one":  # all calls of a turn
                    new = new[:1] * len(new)
                names |= {call[0]: name for call, name in zip(entry.calls, new, strict=True)}
                entry = replace(entry, calls=tuple((names[id], name, text) for id, name, text in entry.calls))
            elif entry.answers:
                entry = replace(entry, answers=names.get(entry.answers, entry.answers))
            found.append(entry)
        return tuple(found)

    def arguments(self, text: str) -> str:
        value = json.loads(text)
        way = self.rng.randrange(5)
        if way == 0:
            return text
        if way == 1:
            return json.dumps(value, indent=2)
        if way == 2:
            return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        value = dict(self.shuffled(value))
        return re.sub(r"(?<=[ :])1\.0(?=[,}])", "1", json.dumps(value))  # as JavaScript writes it

    def shuffled(self, mapping: dict[str, Any]) -> dict[str, Any]:
        items = list(mapping.items())
        self.rng.shuffle(items)
        return dict(items)


class Chat(Wire):
    route = "/v1/chat/completions"

    def body(self, talk: Talk, tools: bool, n: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "any", "messages": [self.message(entry) for entry in self.renamed(talk)]}
        if tools:
            body["tools"] = [
                {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
            ]
        return self.shuffled({**body, "n": n, "temperature": self.rng.choice([0, 1])})

    def message(self, entry: Entry) -> dict[str, Any]:
        message: dict[str, Any] = {"role": entry.role, "content": entry.text}
        if entry.role == "system" and self.chance():
            message["role"] = "developer"
        if entry.role == "assistant":
            if not entry.text:
                message["content"] = self.rng.choice([None, ""])
                if entry.calls and self.chance():
                    del message["content"]
            elif self.chance(0.3):
                cut = self.rng.randrange(len(entry.text) + 1)
                message["content"] = [{"type": "text", "text": part} for part in (entry.text[:cut], entry.text[cut:])]
            if entry.reasoning:
                way = self.rng.choice(["reasoning", "reasoning_content", "reasoning_details"])
                details = [{"type": "reasoning.text", "text": entry.reasoning}]
                message[way] = details if way == "reasoning_details" else entry.reasoning
            if entry.calls:
                message["tool_calls"] = [
                    self.shuffled(
                        {
                            "id": id,
                            "type": "function",
                            "function": self.shuffled({"name": name, "arguments": self.arguments(text)}),
                        }
                    )
                    for id, name, text in entry.calls
                ]
            more = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
            message |= {name: value for name, value in more.items() if self.chance(0.3)}
        elif self.chance(0.3):
            part: dict[str, Any] = {"type": "text", "text": entry.text}
            message["content"] = [part | ({"cache_control": {"type": "ephemeral"}} if self.chance() else {})]
        if entry.answers:
            message["tool_call_id"] = entry.answers
        return self.shuffled(message)

    def read(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "text": choice["message"].get("content") or "",
                "reasoning": choice["message"].get("reasoning_content"),
                "calls": tuple(
                    (call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in choice["message"].get("tool_calls") or ()
                ),
            }
            for choice in answer["choices"]
        ]

    def read_stream(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            turn = found.setdefault(choice["index"], {"text": "", "reasoning": "", "calls": {}})
            delta = choice["delta"]
            turn["text"] += delta.get("content") or ""
            turn["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                known = turn["calls"].setdefault(call["index"], ["", "", ""])
                known[0] += call.get("id") or ""
                known[1] += call["function"].get("name") or ""
                known[2] += call["function"].get("arguments") or ""
        return [
            {**turn, "reasoning": turn["reasoning"] or None, "calls": tuple(map(tuple, turn["calls"].values()))}
            for _, turn in sorted(found.items())
        ]


class Items(Wire):
    """The responses API."""

    route = "/v1/responses"

    def body(self, talk: Talk, tools: bool, n: int) -> dict[str, Any]:
        talk = self.renamed(talk)
        body: dict[str, Any] = {"model": "any"}
        if talk[0].role == "system" and self.chance():
            body["instructions"], talk = talk[0].text, talk[1:]
        body["input"] = [item for entry in talk for item in self.items(entry)]
        if tools:
            body["tools"] = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
        return self.shuffled(body)

    def items(self, entry: Entry) -> list[dict[str, Any]]:
        if entry.answers:
            return [{"type": "function_call_output", "call_id": entry.answers, "output": entry.text}]
        if entry.role != "assistant":
            kind: Any = entry.text if self.chance() else [{"type": "input_text", "text": entry.text}]
            return [{"role": entry.role, "content": kind} | ({"type": "message"} if self.chance() else {})]
        found: list[dict[str, Any]] = []
        if entry.reasoning:
            text = {"type": "reasoning_text", "text": entry.reasoning}
            found.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]})
        if entry.text or not entry.calls:
            content: Any = [{"type": "output_text", "text": entry.text, "annotations": []}]
            content = content if self.chance() else entry.text
            found.append(
                {"type": "message", "role": "assistant", "content": content, "id": "msg_1", "status": "completed"}
            )
        found += [
            {"type": "function_call", "call_id": id, "name": name, "arguments": self.arguments(text)}
            for id, name, text in entry.calls
        ]
        return found

    def read(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        turn: dict[str, Any] = {"text": "", "reasoning": None, "calls": ()}
        for item in answer["output"]:
            if item["type"] == "reasoning":
                turn["reasoning"] = item["content"][0]["text"]
            elif item["type"] == "message":
                turn["text"] = item["content"][0]["text"]
            else:
                turn["calls"] += ((item["call_id"], item["name"], item["arguments"]),)
        return [turn]

    def read_stream(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.read(events[-1]["response"])


class Blocks(Wire):
    """Anthropic's API."""

    route = "/v1/messages"

    def body(self, talk: Talk, tools: bool, n: int) -> dict[str, Any]:
        talk = self.renamed(talk)
        body: dict[str, Any] = {"model": "any", "max_tokens": 4000, "messages": []}
        if talk[0].role == "system":
            body["system"], talk = self.texts(talk[0].text), talk[1:]
        if tools:
            body["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
        for entry in talk:
            role, content = self.content(entry)
            merged = body["messages"] and body["messages"][-1]["role"] == role == "user"
            if merged and entry.answers:
                body["messages"][-1]["content"] += content
            else:
                body["messages"].append({"role": role, "content": content})
        return self.shuffled(body)

    def texts(self, text: str) -> Any:
        if self.chance():
            return text
        return [{"type": "text", "text": text} | ({"cache_control": {"type": "ephemeral"}} if self.chance() else {})]

    def content(self, entry: Entry) -> tuple[str, Any]:
        if entry.answers:
            more = {"is_error": False} if self.chance() else {}
            return "user", [
                {"type": "tool_result", "tool_use_id": entry.answers, "content": self.texts(entry.text), **more}
            ]
        if entry.role != "assistant":
            return entry.role, [{"type": "text", "text": entry.text}]
        found: list[dict[str, Any]] = []
        if entry.reasoning:
            found.append({"type": "thinking", "thinking": entry.reasoning, "signature": "x"})
        if entry.text:
            found.append({"type": "text", "text": entry.text})
        found += [
            {"type": "tool_use", "id": id, "name": name, "input": json.loads(self.arguments(text))}
            for id, name, text in entry.calls
        ]
        return "assistant", found

    def read(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        turn: dict[str, Any] = {"text": "", "reasoning": None, "calls": ()}
        for block in answer["content"]:
            if block["type"] == "thinking":
                turn["reasoning"] = block["thinking"]
            elif block["type"] == "text":
                turn["text"] = block["text"]
            else:
                turn["calls"] += ((block["id"], block["name"], json.dumps(block["input"])),)
        return [turn]

    def read_stream(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] += delta[name]
                block["json"] += delta.get("partial_json", "")
        for block in blocks.values():
            if block["json"]:
                block["input"] = json.loads(block["json"])
        return self.read({"content": list(blocks.values())})


@dataclass
class Program:
    """A program that does `steps` random things to its conversations."""

    world: Stack
    recording: Recording
    http: aiohttp.ClientSession
    rng: Random
    talks: list[Talk] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    received: set[str] = field(default_factory=set)
    dropped: set[Entry] = field(default_factory=set)
    left: int = 0
    """Requests that the client did not wait for."""
    done: Counter[str] = field(default_factory=Counter)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def play(self, steps: int) -> None:
        while sum(self.done.values()) < steps:
            name = self.rng.choices(list(BEHAVIOURS), [share for share, _ in BEHAVIOURS.values()])[0]
            await BEHAVIOURS[name][1](self)
            self.done[name] += 1

    # Messages

    def text(self, kind: str) -> str:
        return f"{self.rng.choice(['please', 'now', 'ünd', 'a  b'])} {mark(kind, next(self.numbers))}"

    def opening(self) -> Talk:
        system = (Entry("system", self.text("S")),) if self.rng.random() < 0.7 else ()
        return (*system, Entry("user", self.text("U")))

    def talk(self) -> Talk:
        """One of the conversations, as far as it has been answered."""
        if not self.talks or self.rng.random() < 0.05:
            self.talks.append(self.opening())
        return self.rng.choice(self.talks[-12:])

    def followed(self, talk: Talk) -> Talk:
        """The conversation with what a program says after the last answer."""
        if talk[-1].role != "assistant":
            return talk
        results = tuple(Entry("tool", self.text("T"), answers=id) for id, _, _ in talk[-1].calls)
        question = (Entry("user", self.text("U")),) if not results or self.rng.random() < 0.2 else ()
        return (*talk, *results, *question)

    # Requests

    async def ask(
        self, talk: Talk, *, n: int = 1, tools: bool = True, wait: float | None = None, changed: str = ""
    ) -> list[Talk]:
        wire = self.rng.choice([Chat, Chat, Items, Blocks] if n == 1 else [Chat])(self.rng)
        body = wire.body(self.with_less_reasoning(talk), tools, n)
        stream = self.rng.random() < 0.4
        asked = self._post(wire, {**body, "stream": stream} if stream else body)
        try:
            turns = await (asyncio.wait_for(asked, wait) if wait is not None else asked)
        except TimeoutError:
            self.left += 1
            return []
        answers = [Entry("assistant", **turn, context=talk, tools=tools) for turn in turns]
        answers = [replace(answer, mark=(answer.marks() or [""])[0]) for answer in answers]
        expected = in_place(talk, tools)
        marks = [name for entry in talk for name in entry.marks()]
        names = [answer.mark for answer in answers]
        self.sent.append(Sent(marks, expected.mark if expected else "", names, changed))
        self.received.update(names)
        return [(*talk, answer) for answer in answers]

    def with_less_reasoning(self, talk: Talk) -> Talk:
        """The conversation as it is sent: the reasoning of an answer is kept or dropped, each time anew.

        Reasoning that once was dropped from an answer in another place than that of its sampling stays dropped there:
        with it, the answers after it would follow another message than they were sampled after.
        """
        found = []
        for place, entry in enumerate(talk):
            if entry.reasoning and not entry.keeps_reasoning:
                moved = entry.context != talk[:place]
                if (moved and entry in self.dropped) or self.rng.random() < 0.5:
                    self.dropped.update([entry] if moved else [])
                    entry = replace(entry, reasoning=None)
            found.append(entry)
        return tuple(found)

    async def _post(self, wire: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.http.post(f"{self.recording.base_url}{wire.route}", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            if not body.get("stream"):
                found: list[dict[str, Any]] = wire.read(json.loads(text))
                return found
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
            read: Callable[[Any], list[dict[str, Any]]] = wire.read_stream
            return read([json.loads(line) for line in lines if line != "[DONE]"])

    # Behaviours

    async def goes_on(self) -> None:
        self.talks += await self.ask(self.followed(self.talk()))

    async def several_answers(self) -> None:
        self.talks += await self.ask(self.followed(self.talk()), n=self.rng.choice([2, 3]))

    async def asks_again(self) -> None:
        """A retry: the same request, whose answer came or did not."""
        talk = self.followed(self.talk())
        await self.ask(talk)
        self.talks += await self.ask(talk)

    async def goes_on_twice(self) -> None:
        talk = self.talk()
        self.talks += [*await self.ask(self.followed(talk)), *await self.ask(self.followed(talk))]

    async def asks_in_parallel(self) -> None:
        talks = [self.followed(self.talk()) for _ in range(3)]
        for found in await asyncio.gather(*map(self.ask, [*talks, talks[0]])):
            self.talks += found

    async def does_not_wait(self) -> None:
        talk = self.followed(self.talk())
        await self.ask(talk, wait=self.rng.uniform(0, 0.012))
        if self.rng.random() < 0.5:
            self.talks += await self.ask(talk)

    async def changes_an_answer(self) -> None:
        talk = self.talk()
        places = [place for place, entry in enumerate(talk) if entry.role == "assistant"]
        if not places:
            await self.goes_on()
            return
        place = self.rng.choice(places)
        old = talk[place]
        new = replace(old, context=None, text=f"{old.text} {self.text('X')}")
        if old.calls and self.rng.random() < 0.5:
            (id, name, _), *others = old.calls
            new = replace(old, context=None, calls=((id, name, json.dumps({"note": self.text("X")})), *others))
        changed = ""
        if old.reasoning and old.mark != "A0" and self.rng.random() < 0.5:
            new = replace(old, context=None, reasoning=f"{old.reasoning} not", keeps_reasoning=True)
            changed = old.mark
        self.talks += await self.ask(self.followed((*talk[:place], new, *talk[place + 1 :])), changed=changed)

    async def changes_a_message(self) -> None:
        talk = self.talk()
        places = [place for place, entry in enumerate(talk) if entry.role != "assistant"]
        place = self.rng.choice(places)
        new = replace(talk[place], text=self.text("X"))
        self.talks += await self.ask(self.followed((*talk[:place], new, *talk[place + 1 :])))

    async def cuts(self) -> None:
        """Leaves out old turns."""
        talk = self.talk()
        users = [place for place, entry in enumerate(talk) if entry.role == "user"]
        start = talk[:1] if talk[0].role == "system" else ()
        self.talks += await self.ask(self.followed((*start, *talk[self.rng.choice(users) :])))

    async def summarises(self) -> None:
        talk = self.talk()
        start = talk[:1] if talk[0].role == "system" else ()
        self.talks += await self.ask((*start, Entry("user", f"Until now: {self.text('U')}")))

    async def asks_a_sub_agent(self) -> None:
        talk: Talk = (Entry("system", self.text("S")), Entry("user", self.text("U")))
        for _ in range(self.rng.randint(1, 3)):
            (talk,) = await self.ask(self.followed(talk))

    async def invents_an_answer(self) -> None:
        talk = self.followed(self.talk())
        invented = Entry("assistant", self.text("X"))
        self.talks += await self.ask((*talk, invented, Entry("user", self.text("U"))))

    async def offers_no_tools(self) -> None:
        self.talks += await self.ask(self.followed(self.talk()), tools=False)

    async def sends_nonsense(self) -> None:
        body = self.rng.choice([{}, {"messages": "x"}, {"messages": [{"role": "x"}]}, {"messages": [], "fancy": 1}, []])
        async with self.http.post(f"{self.recording.base_url}/v1/chat/completions", json=body) as response:
            assert response.status == 400 and "error" in await response.json()

    # The judge

    def judge(self) -> None:
        """Compare every answered request with the model server's record."""
        sampled: dict[str, list[tuple[list[int], list[int]]]] = {}
        for seen in self.world.fake.requests:
            for made in seen.completions:
                assert seen.call is not None
                text = self.world.text(made.ids)
                marks = MARK.findall(text)
                sampled.setdefault(marks[0] if marks else "", []).append(
                    (list(seen.call.prompts[made.prompt]), made.ids)
                )
        read = {id(prompt): MARK.findall(self.world.text(prompt)) for made in sampled.values() for prompt, _ in made}
        for sent in self.sent:
            wholes = [[*prompt, *ids] for prompt, ids in sampled.get(sent.extends, ())] if sent.extends else [[]]
            for answer in sent.answers:
                assert any(
                    read[id(prompt)] == sent.marks and any(prompt[: len(whole)] == whole for whole in wholes)
                    for prompt, _ in sampled[answer]
                ), f"{answer} was not sampled after {sent.marks} with the tokens of {sent.extends or 'nothing'}"

    def judge_history(self) -> None:
        """Every answer that came is in the history once for each time, and after the answers that it extends."""
        history = self.recording.history()
        kept = Counter(_mark_of(response) for response in history.completions())
        got = Counter(answer for sent in self.sent for answer in sent.answers)
        assert not got - kept, f"not recorded: {got - kept}"
        assert sum((kept - got).values()) <= self.left, f"recorded and never sampled for a client: {kept - got}"
        above: dict[str, list[set[str]]] = {}
        for node in history.all_nodes():
            if isinstance(node.origin, ChatResponse):
                before, parent = set(), node.parent
                while parent is not None:
                    if isinstance(parent.origin, ChatResponse) and parent.sampled:
                        before.add(_mark_of(parent.origin))
                    parent = parent.parent
                above.setdefault(_mark_of(node.origin), []).append(before)
        for sent in self.sent:
            for answer in sent.answers:
                assert not sent.extends or any(sent.extends in before for before in above[answer]), (
                    f"{answer} is not after {sent.extends}"
                )
                after = [sent.changed in before for before in above[answer]]
                assert not sent.changed or answer == "A0" or not any(after), f"{answer} is after {sent.changed}"


def _mark_of(response: ChatResponse) -> str:
    message = response.message
    return (MARK.findall(" ".join([message.text, *(call.arguments for call in message.tool_calls)])) or [""])[0]


BEHAVIOURS: dict[str, tuple[int, Callable[[Program], Any]]] = {
    "goes on": (30, Program.goes_on),
    "several answers": (6, Program.several_answers),
    "asks again": (5, Program.asks_again),
    "goes on twice": (5, Program.goes_on_twice),
    "asks in parallel": (5, Program.asks_in_parallel),
    "does not wait": (8, Program.does_not_wait),
    "changes an answer": (8, Program.changes_an_answer),
    "changes a message": (6, Program.changes_a_message),
    "cuts": (5, Program.cuts),
    "summarises": (4, Program.summarises),
    "asks a sub-agent": (5, Program.asks_a_sub_agent),
    "invents an answer": (4, Program.invents_an_answer),
    "offers no tools": (4, Program.offers_no_tools),
    "sends nonsense": (3, Program.sends_nonsense),
}
