"""Policies that answer instead of a model: a script, random words or tokens, an echo, tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeAlias

from lachesis_testing.fake_server.completions import Ask, Policy, Reply

Said: TypeAlias = "Reply | str | Sequence[int]"
"""A text (the end-of-turn token is added), unchanged ids, or a `Reply`."""
Speaker: TypeAlias = Callable[[Ask], Said]

WORDS: Final = (
    *("the", "of", "and", "to", "in", "that", "was", "with", "for", "one", "all", "there", "answer", "question"),
    *("time", "water", "tree", "river", "measure", "length", "thread", "spin", "cut", "first", "then", "more"),
    *("less", "many", "each", "three", "four", "number", "line", "word", "light", "night", "morning", "house"),
    *("street", "people", "write", "read", "run", "look", "find", "make", "know", "think", "say", "come", "go"),
    *("see", "tell", "ask", "work", "call", "try", "need", "feel", "become", "leave", "put"),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The length of replies in tokens, the end-of-turn token included; uniform from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`200`, or `50-400`."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"{text!r} is not a length; write 200 or 50-400")
        return cls(int(match[1]), int(match[2] or match[1]))

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


class Scripted:
    """Plays `script`: texts, ids, `Reply`s or functions of the `Ask`. The last entry repeats.

    Each request plays one entry, for all of its completions. With `by_turn`, the number of the model's turns in the
    prompt selects the entry, so that concurrent conversations play the same script.
    """

    def __init__(self, *script: Said | Speaker, by_turn: bool = False) -> None:
        if not script:
            raise ValueError("a script needs an entry")
        self.script = script
        self.by_turn = by_turn

    def reply(self, ask: Ask) -> Reply:
        place = ask.turn if self.by_turn else ask.number
        entry = self.script[min(place, len(self.script) - 1)]
        return as_reply(ask, entry(ask) if callable(entry) else entry)


class RandomTokens:
    """Samples from the fake model: any token of the vocabulary, with the parameters of the request.

    With `lengths`, a random length decides where the end-of-turn token comes. It has the model's logprob.
    """

    def __init__(self, lengths: Lengths | None = None) -> None:
        self.lengths = lengths

    def reply(self, ask: Ask) -> Reply:
        rng, call = ask.rng(), ask.call
        drawn = ask.limit + 1 if self.lengths is None or not ask.end_ids else self.lengths.draw(rng)
        stop_ids = frozenset(call.stop_ids) if call.ignore_end else ask.end_ids.union(call.stop_ids)
        ids, logprobs = ask.model.sample(
            ask.hashed,
            ask.sampling,
            rng,
            limit=min(drawn - 1, ask.limit),
            stop_ids=stop_ids,
            end_with=min(ask.end_ids) if drawn <= ask.limit else None,
            kind=ask.logprobs,
        )
        return Reply(ids, "stop" if ids and (ids[-1] in stop_ids or drawn <= ask.limit) else "length", logprobs)


class RandomWords:
    """Prose of random words: readable, and cheap."""

    def __init__(self, lengths: Lengths = Lengths(16, 64)) -> None:
        self.lengths = lengths

    def reply(self, ask: Ask) -> Reply:
        rng = ask.rng()
        count = self.lengths.draw(rng)
        # A word has at least one token, so these are enough; the rest is cut.
        ids = ask.codec.prose(rng.choices(WORDS, k=count - 1))
        return Reply(ask.ended(ids[: count - 1]))


class Echo:
    """Repeats the last message of the prompt."""

    def reply(self, ask: Ask) -> Reply:
        if ask.call.messages:
            content = ask.call.messages[-1].get("content")
            return as_reply(ask, content if isinstance(content, str) else json.dumps(content))
        ids = list(ask.prompt_ids)
        ends = [place for place, index in enumerate(ids) if index in ask.end_ids]
        if not ends:
            return Reply(ask.ended(ids))
        start = ends[-2] + 1 if len(ends) > 1 else 0
        text = ask.codec.decode(ids[start : ends[-1]]).lstrip()
        return as_reply(ask, text.partition("\n")[2] or text)


class ToolUser:
    """Calls random tools of the prompt for `turns` turns, in Hermes' format, then answers in words.

    Arguments are random and match the tool's schema. Without tools it answers at once.
    """

    def __init__(self, turns: int = 3, *, thinking: bool = False, calls: int = 1, answer: Policy | None = None) -> None:
        self.turns = turns
        self.thinking = thinking
        self.calls = calls
        """Calls in one turn."""
        self.answer = answer or RandomWords()

    def reply(self, ask: Ask) -> Reply:
        if ask.turn >= self.turns:
            return self.answer.reply(ask)
        tools = ask.call.tools if ask.call.tools is not None else offered_tools(ask.prompt)
        if not tools:
            return self.answer.reply(ask)
        rng = ask.rng()
        text = f"<think>\n{' '.join(rng.choices(WORDS, k=12))}\n</think>\n\n" if self.thinking else ""
        return as_reply(ask, text + "\n".join(hermes_call(rng, rng.choice(tools)) for _ in range(self.calls)))


def create_policy(name: str, *, lengths: Lengths | None = None, script: Sequence[str] = ()) -> Policy:
    """A policy by its name in `POLICIES`.

    Raises:
        ValueError: there is no such policy, or it takes no such setting.
    """
    if name not in POLICIES:
        raise ValueError(f"no policy is called {name!r}; there are: {', '.join(sorted(POLICIES))}")
    if bool(script) != (name == "script"):
        raise ValueError("the policy 'script' needs texts to say, and no other policy takes any")
    if lengths is not None and name in ("echo", "script"):
        raise ValueError(f"the policy {name!r} takes no lengths")
    return POLICIES[name](lengths, script)


def as_policy(policy: Policy | Speaker | str) -> Policy:
    """A policy from a policy, a function of the `Ask`, or a constant text."""
    return Scripted(policy) if isinstance(policy, str) or not hasattr(policy, "reply") else policy


def as_reply(ask: Ask, said: Said) -> Reply:
    """A `Reply` from a text, ids or a `Reply`."""
    if isinstance(said, Reply):
        return said
    if isinstance(said, str):
        return Reply(ask.ended(ask.codec.encode(said)))
    return Reply(list(said))


def offered_tools(prompt: str) -> list[Mapping[str, Any]]:
    """The tools that a prompt lists: the JSON objects, one a line, in its `<tools>` blocks."""
    found: list[Mapping[str, Any]] = []
    for block in re.findall(r"<tools>(.*?)</tools>", prompt, re.DOTALL):
        for line in block.splitlines():
            try:
                tool = json.loads(line)
            except ValueError:
                continue
            if isinstance(tool, dict) and isinstance(_function(tool).get("name"), str):
                found.append(tool)
    return found


def hermes_call(rng: Random, tool: Mapping[str, Any]) -> str:
    """A call of the tool in Hermes' format, with random arguments."""
    function = _function(tool)
    call = {"name": function.get("name"), "arguments": random_value(rng, function.get("parameters") or {})}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def random_value(rng: Random, schema: Mapping[str, Any], depth: int = 0) -> Any:
    """A value that fits the JSON schema, as far as type, enum, properties and items go."""
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type", "object" if depth == 0 or "properties" in schema else "string")
    kind = rng.choice(kind) if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        kept = [name for name in properties if name in required or rng.random() < 0.5]
        return {name: random_value(rng, properties[name], depth + 1) for name in kept} if depth < 4 else {}
    if kind == "array":
        items = schema.get("items") or {"type": "string"}
        return [random_value(rng, items, depth + 1) for _ in range(rng.randint(0, 2))] if depth < 4 else []
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return rng.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 100)))
    return None if kind == "null" else " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


POLICIES: Final[Mapping[str, Callable[[Lengths | None, Sequence[str]], Policy]]] = {
    "echo": lambda lengths, script: Echo(),
    "script": lambda lengths, script: Scripted(*script),
    "tokens": lambda lengths, script: RandomTokens(lengths),
    "tools": lambda lengths, script: ToolUser(answer=RandomWords(lengths or Lengths(16, 64))),
    "tools-thinking": lambda lengths, script: ToolUser(thinking=True, answer=RandomWords(lengths or Lengths(16, 64))),
    "words": lambda lengths, script: RandomWords(lengths or Lengths(16, 64)),
}
"""The policies of the command, by name."""
