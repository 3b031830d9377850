"""Templates whose later text depends on what a message says: every prompt is still what the template writes.

The judge is transformers: it renders the whole conversation, and the text after the sampled words must be the text that
the prompt has after the sampled ids.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")

from template_tokenizers import tokenizer_of

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens
from lachesis_tokens.prompts.prompts import PromptBuilder, PromptStart, TemplateNotExtendable
from lachesis_tokens.templates import content_dependence

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
    }
]
END = "<|im_end|>"
BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if ns.quiet %}<think></think>{% endif %}{% endif %}"
)
SYSTEM = (
    "{% set ns = namespace(quiet=messages[0].role == 'system' and '/no_think' in messages[0].content) %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}" + BODY
)
LAST_WORD = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}{% if m.role in ['user', 'system'] %}"
    "{% if '/think' in m.content %}{% set ns.quiet = false %}{% elif '/no_think' in m.content %}"
    "{% set ns.quiet = true %}{% endif %}{% endif %}{% endfor %}" + BODY
)
RESULT = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' and m.content.startswith('<locked>') and m.content.endswith('</locked>') %}"
    "{% set ns.quiet = true %}{% endif %}{% endfor %}" + BODY
)
EQUAL = "{% set ns = namespace(quiet=messages[-1].content == 'quiet' or messages[0].content == 'quiet') %}" + BODY
LONG = "{% set ns = namespace(quiet=messages[0].content | length > 40) %}" + BODY
TOOL = "{% set ns = namespace(quiet=tools and '/no_think' in tools[0].function.description) %}" + BODY
NUMBERED = SYSTEM.replace("{{ m.role }}", "{{ m.role }}{% if ns.quiet %} {{ loop.index }}{% endif %}")
"""With `/no_think`, each message also has its number: a suffix depends on the number of messages before it."""

OURS = {"system": SYSTEM, "last_word": LAST_WORD, "result": RESULT, "equal": EQUAL, "long": LONG, "numbered": NUMBERED}
WORDS = ("Tide?", "/no_think", "Tide? /no_think", "/think", "quiet", "<locked>x</locked>", "long " * 20)


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number:08}", "type": "function", "function": {"name": "look", "arguments": '{"q": "WORDS"}'}}


class Rollout:
    """A conversation that the judge watches."""

    def __init__(self, builder: PromptBuilder, end: str, messages: list[dict[str, Any]], tools: Any = None) -> None:
        self.builder, self.end, self.tools = builder, end, tools
        self.history = MessageHistory(messages)
        self.prompt = builder.prompt(self.history.nodes(), tools)
        self.starts: list[PromptStart] = []

    def say(self, words: str, *following: dict[str, Any], calls: int = 0) -> None:
        """A turn of the model, ended with `end`, and what follows it. The judge compares the next prompt."""
        turn: dict[str, Any] = {"role": "assistant", "content": "" if calls else words}
        if calls:
            turn["tool_calls"] = [call(number) for number in range(calls)]
        ids = self.builder.encode(words + self.end)
        tokens = SampledTokens.sample(
            self.prompt.prefix,
            ids,
            [-0.5] * len(ids),
            end_of_turn=self.builder.end_of_turn,
            context=self.prompt.context,
        )
        self.history.append(ChatResponse(Message.from_openai(turn), FinishReason.STOP, tokens=tokens))
        self.history.extend(following)
        before, self.prompt = self.prompt, self.builder.prompt(self.history.nodes(), self.tools)
        self.starts.append(self.prompt.start)
        if self.prompt.start is PromptStart.BRANCH:
            assert self.text(self.prompt.prefix.ids) == self.whole(self.history.to_openai())
            return
        assert self.text(self.prompt.prefix.ids) == (
            self.text(before.prefix.ids) + words + self.end + self.after_the_turn(turn)
        )
        assert self.text(self.prompt.prefix.ids).endswith(self.prompt.generation_prompt)
        assert "think" not in self.after_the_turn(turn)[-20:] or "think" in self.prompt.generation_prompt

    def after_the_turn(self, turn: dict[str, Any]) -> str:
        """What the template writes after the last turn, which has a word of its own here."""
        messages = self.history.to_openai("reasoning")
        at = max(at for at, node in enumerate(self.history.nodes()) if isinstance(node.origin, ChatResponse))
        for place in ("arguments", "content"):
            marked = {**turn, "content": "WORD-OF-ITS-OWN" if place == "content" or not turn.get("tool_calls") else ""}
            if turn.get("tool_calls"):
                *others, last = [dict(each) for each in turn["tool_calls"]]
                said = '{"q": "WORD-OF-ITS-OWN"}' if place == "arguments" else "{}"
                marked["tool_calls"] = [*others, {**last, "function": {"name": "look", "arguments": said}}]
            text = self.whole([*messages[:at], marked, *messages[at + 1 :]])
            if text.count("WORD-OF-ITS-OWN") == 1:
                return text.partition("WORD-OF-ITS-OWN")[2].partition(self.end)[2]
        raise AssertionError("the template does not write the turn")

    def whole(self, messages: list[dict[str, Any]]) -> str:
        prepare = self.builder._template.prepare
        return str(
            self.builder.tokenizer.apply_chat_template(
                [prepare(message) for message in messages],
                chat_template=self.builder._template.source,
                tools=self.tools,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def text(self, ids: Any) -> str:
        return str(self.builder.tokenizer.decode(ids))


def result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number:08}", "name": "look", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


@cache
def ours(source: str, **settings: Any) -> PromptBuilder:
    """Shared by the tests: what one conversation says is nothing to another."""
    return PromptBuilder(tokenizer_of("hermes"), chat_template=source, **settings)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("said", WORDS)
@pytest.mark.parametrize("where", ["system", "user"])
def test_what_the_first_messages_say(name: str, said: str, where: str) -> None:
    builder = ours(OURS[name])
    first = [system(said), user("Tide?")] if where == "system" else [user(said)]
    for _ in range(2):  # a sibling finds what the first rollout found
        rollout = Rollout(builder, END, first, TOOLS)
        rollout.say("Look", result("noon"), calls=1)
        rollout.say("Look", result("noon"), result("low", 1), calls=2)
        rollout.say("Noon.", user("And then?"))
        rollout.say("Look", result("noon"), user("Well?"), calls=1)
        rollout.say("Noon.", user("And then?"))
        assert set(rollout.starts) == {PromptStart.EXTENDED}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("said", WORDS)
@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_what_a_later_message_says(name: str, said: str, role: str) -> None:
    builder = ours(OURS[name])
    plain = Rollout(builder, END, [system("Be brief."), user("Tide?")], TOOLS)
    plain.say("Look", result("noon"), calls=1)
    rollout = Rollout(builder, END, [system("Be brief."), user("Tide?")], TOOLS)
    rollout.say("Look", result("noon"), calls=1)
    if role == "tool":
        rollout.say("Look", result(said), calls=1)
    else:
        rollout.say("Noon.", {"role": role, "content": said}, user("Well?"))
    rollout.say("Look", result("noon"), calls=1)
    rollout.say("Noon.", user("And then?"))
    rollout.say("Noon.", user("/think"), user("And then?"))
    rollout.say("Noon.", user("And then?"))
    assert set(rollout.starts) == {PromptStart.EXTENDED}
    plain.say("Look", result("noon"), calls=1)
    plain.say("Noon.", user("And then?"))


@pytest.mark.parametrize("said", ["Look.", "/no_think"])
def test_what_a_tools_description_says(said: str) -> None:
    tool = {**TOOLS[0], "function": {**TOOLS[0]["function"], "description": said}}
    rollout = Rollout(ours(TOOL), END, [user("Tide?")], [tool])
    rollout.say("Look", result("noon"), calls=1)
    rollout.say("Noon.", user("And then?"))
    assert ("<think></think>" in rollout.prompt.generation_prompt) == (said == "/no_think")


def test_an_edit_of_the_first_messages_counts() -> None:
    builder = ours(SYSTEM)
    rollout = Rollout(builder, END, [system("Be brief."), user("Tide?")])
    rollout.say("Look", result("noon"), calls=1)
    assert rollout.prompt.generation_prompt == "<|im_start|>assistant\n"
    rollout.history[0]["content"] = "Be brief. /no_think"
    prompt = builder.prompt(rollout.history.nodes())
    assert prompt.generation_prompt == "<|im_start|>assistant\n<think></think>"
    rollout.prompt = prompt
    rollout.say("Noon.", user("And then?"))
    rollout.say("Noon.", user("And then?"))


def test_an_edit_of_a_later_message_counts() -> None:
    rollout = Rollout(ours(LAST_WORD), END, [user("Tide?")])
    rollout.say("Noon.", user("And then? /no_think"))
    rollout.say("Noon.", user("And then?"))
    rollout.history[2]["content"] = "And then?"
    rollout.prompt = rollout.builder.prompt(rollout.history.nodes())
    assert rollout.prompt.generation_prompt == "<|im_start|>assistant\n"
    rollout.say("Noon.", user("And then?"))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("first", [[system("/no_think"), user("Tide?")], [user("/no_think")]])
def test_a_later_message_that_takes_back_what_the_first_said(name: str, first: list[dict[str, Any]]) -> None:
    rollout = Rollout(ours(OURS[name]), END, first)
    rollout.say("Look", result("noon"), calls=1)
    rollout.say("Noon.", user("/think"))
    rollout.say("Look", result("noon"), calls=1)
    rollout.say("Noon.", user("And then?"))


TURNS = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and 'quiet' in m.content %}{% set ns.quiet = true %}{% endif %}{% endfor %}" + BODY
)


def test_a_suffix_that_depends_on_what_the_model_said_is_a_branch_or_an_error() -> None:
    rollout = Rollout(ours(TURNS), END, [user("Tide?")])
    rollout.say("Noon.", user("And then?"))
    rollout.say("Be quiet.", user("And then?"))
    rollout.say("Noon.", user("And then?"))
    assert rollout.starts == [PromptStart.EXTENDED, PromptStart.BRANCH, PromptStart.BRANCH]
    strict = Rollout(ours(TURNS, when_unextendable="error"), END, [user("Tide?")])
    strict.say("Noon.", user("And then?"))
    with pytest.raises(TemplateNotExtendable, match="depends on the content of earlier messages"):
        strict.say("Be quiet.", user("And then?"))


LATER = {
    "third": ("m.role == 'user' and loop.index == 6 and 'quiet' in m.content", user("quiet")),
    "case": ("m.role == 'user' and '/no_think' in m.content | lower", user("/NO_THINK")),
    "a test": ("m.role == 'user' and m.content is eq 'quiet'", user("quiet")),
    "joined": ("m.role == 'user' and '/no' ~ '_think' in m.content", user("/no_think")),
    "a filter": ("m.content and m.content | replace('quiet', '') != m.content", user("Be quiet.")),
    "length": ("m.role == 'user' and m.content | length > 60", user("long " * 20)),
    "kind": ("m.role == 'system' and not loop.first", system("Be brief.")),
    "number": ("loop.index > 7", user("And then?")),
    "equal": ("m.content and m.content == (messages[loop.index0 - 2].content or '')", user("And then?")),
    "name": ("m.role == 'tool' and m.name == 'fetch'", {**result("x", 7), "name": "fetch"}),
    "written": ("m.role == 'assistant' and m.content == 'quiet'", {"role": "assistant", "content": "quiet"}),
}
"""What a template looks for, and a message that has it."""


@pytest.mark.parametrize("name", LATER)
def test_what_else_a_template_may_look_for(name: str) -> None:
    condition, message = LATER[name]
    source = "{% set ns = namespace(quiet=false) %}{% for m in messages %}{% if CONDITION %}{% set ns.quiet = true %}"
    builder = ours(source.replace("CONDITION", condition) + "{% endif %}{% endfor %}" + BODY)
    rollout = Rollout(builder, END, [system("Be brief."), user("Tide?")])
    rollout.say("Noon.", user("And then?"))
    rollout.say("Noon.", message, user("Well?"))
    rollout.say("Look", result("noon"), calls=1)
    rollout.say("Noon.", user("Yes?"))
    rollout.say("Noon.", user("And then?"))
    assert rollout.prompt.generation_prompt.endswith("<think></think>")


def test_a_message_that_came_without_a_suffix_counts() -> None:
    """The prompt after it was rendered as a whole, because the tools had changed."""
    builder = ours(LAST_WORD)
    for said in ("And then?", "/no_think"):
        rollout = Rollout(builder, END, [user("Tide?")])
        rollout.say("Noon.", user(said))
        rollout.tools = TOOLS
        rollout.prompt = builder.prompt(rollout.history.nodes(), TOOLS)
        rollout.say("Noon.", user("Well?"))


def test_what_was_found_may_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: a conversation whose first messages left it is looked at again."""
    monkeypatch.setattr(content_dependence, "_MOST_HEADS", 1)
    builder = PromptBuilder(tokenizer_of("hermes"), chat_template=LAST_WORD)
    one, other = (Rollout(builder, END, [user(said)]) for said in ("Tide?", "Tide? /no_think"))
    one.say("Noon.", user("And then? /no_think"))
    for _ in range(3):
        other.say("Noon.", user("And then?"))
        one.say("Noon.", user("And then?"))
