"""Prompts of conversations that go on, for every chat template at hand, compared with what the template renders.

A turn is "sampled" by taking what the template itself would write for it, or random ids. Where the report on a
continuation says PREFIX, the ids decode to the template's rendering of the whole conversation; where it says DIVERGES,
the rendering ends with the suffix of the sampled ids.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from template_tokenizers import ends, sources, tokenizer_of

from lachesis_client.errors import TemplateError
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens
from lachesis_tokens.prompts.prompts import PromptBuilder, PromptStart, TemplateNotExtendable
from lachesis_tokens.templates.chat_template import read_template
from lachesis_tokens.templates.template_cases import Pattern
from lachesis_tokens.templates.template_report import Extension, TemplateDifference
from tests.run import ALL

NAMES = list(sources())
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
WORDS = min(tokenizer_of("hermes").added_tokens_decoder)
"""Ids of ordinary tokens."""
GOES_ON = (Extension.PREFIX, Extension.DIVERGES)
FEW = settings(
    max_examples=3 if ALL else 2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking a failure takes minutes and shows nothing more
    suppress_health_check=list(HealthCheck),
)

texts = st.sampled_from(
    [
        "The tide is high.",
        "Zürich 東京 🙂 naïve",
        "a\n\n  b",
        "x",
        "{not json",
        "<|im_end|><end_of_turn> spelled </s>",
        "noon ",
    ]
)
thoughts = st.none() | st.sampled_from(["Look it up.", "First.\n\nThen."])


@st.composite
def turns(draw: Any, number: int) -> list[dict[str, Any]]:
    """An assistant turn, and what follows it."""
    called = draw(st.integers(0, 2))
    turn: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if thought := draw(thoughts):
        turn["reasoning"] = thought
    if not called:
        return [turn, {"role": "user", "content": draw(texts)}]
    turn["content"] = draw(st.just("") | texts)
    arguments = draw(
        st.sampled_from([{}, {"query": "tide"}, {"query": 'Zürich "x"\n', "limit": 3, "deep": {"a": [1]}}])
    )
    turn["tool_calls"] = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for place, name in enumerate(["search", "ping"][:called])
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": draw(texts)}
        for call in turn["tool_calls"]
    ]
    user = [{"role": "user", "content": draw(texts)}]
    return [turn, *draw(st.sampled_from([results, results, results, results + user, user]))]


@st.composite
def conversations(draw: Any, most: int = 30) -> list[list[dict[str, Any]]]:
    """The first messages, then turns."""
    first = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    first.append({"role": "user", "content": draw(texts)})
    length = draw(st.integers(1, most))
    return [first, *(draw(turns(number)) for number in range(length))]


@cache
def builder_of(name: str) -> PromptBuilder:
    return PromptBuilder(tokenizer_of(name), special_tokens_in_text="as_is")  # as transformers encodes


def whole(name: str, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = True, tokenize: bool = False) -> Any:
    """The rendering of transformers for messages in the template's form."""
    template = builder_of(name)._template
    return tokenizer_of(name).apply_chat_template(
        [template.prepare(message) for message in messages],
        tools=tools,
        add_generation_prompt=prompt,
        tokenize=tokenize,
        return_dict=False,
    )


def written(name: str, messages: list[dict[str, Any]], turn: dict[str, Any], follows: str, tools: Any) -> str | None:
    """What the template would have the model sample, its end of turn included; None where it rewrites the prompt."""
    prompt, text = whole(name, messages, tools), whole(name, [*messages, turn], tools, prompt=False)
    if not text.startswith(prompt):
        return None
    end = ends(name)[bool(turn.get("tool_calls"))]
    if not end:
        words = text[len(prompt) :].removesuffix("<|observation|>").removesuffix("<|user|>")
        return words + ("<|observation|>" if follows == "tool" else "<|user|>")
    at = text.rfind(end)
    return text[len(prompt) : at + len(end)] if at >= len(prompt) else None


def response(builder: PromptBuilder, prompt: Any, turn: dict[str, Any], ids: list[int]) -> ChatResponse:
    tokens = SampledTokens.sample(
        prompt.prefix, ids, [-0.5] * len(ids), end_of_turn=builder.end_of_turn, context=prompt.context
    )
    return ChatResponse(Message.from_openai(turn), FinishReason.STOP, tokens=tokens)


def finding(builder: PromptBuilder, turn: dict[str, Any], following: list[dict[str, Any]]) -> Any:
    return builder._validator.find(Pattern.of(turn, following))


def start(builder: PromptBuilder, first: list[dict[str, Any]], tools: Any) -> tuple[MessageHistory, Any]:
    """The first prompt, without a system message if the template rejects one."""
    try:
        history = MessageHistory(first)
        return history, builder.prompt(history.nodes(), tools)
    except TemplateError:
        history = MessageHistory(first[-1:])
        return history, builder.prompt(history.nodes(), tools)


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", NAMES)
@FEW
@given(conversation=conversations(), offered=st.booleans(), data=st.data())
def test_a_chain_of_extensions_is_what_the_template_renders(
    name: str, conversation: list[list[dict[str, Any]]], offered: bool, data: st.DataObject
) -> None:
    builder, tokenizer, tools = builder_of(name), tokenizer_of(name), TOOLS if offered else None
    history, prompt = start(builder, conversation[0], tools)
    exact = True
    for number, (turn, *following) in enumerate(conversation[1:]):
        found = finding(builder, turn, following)
        if found.extension not in GOES_ON:
            continue
        plain = history.to_openai("reasoning")
        try:
            text = written(name, plain, turn, following[0]["role"], tools)
        except Exception:  # the template rejects this turn, e.g. content and reasoning beside a call
            turn = {**turn, "content": "" if turn.get("tool_calls") else "Plain."}
            text = written(name, plain, turn, following[0]["role"], tools)
        exact = exact and text is not None and found.extension is Extension.PREFIX
        said = text if text is not None else turn["content"] + (ends(name)[bool(turn.get("tool_calls"))] or "<|user|>")
        ids = tokenizer.encode(said, add_special_tokens=False)
        sampled = response(builder, prompt, turn, ids)
        history.append(sampled)
        history.extend(following)
        nodes = history.nodes()
        prompt = builder.prompt(nodes, tools)
        assert prompt.start is PromptStart.EXTENDED
        assert sampled.tokens is not None and prompt.prefix.parent is sampled.tokens.after
        assert not (prompt.prefix.own_ids and prompt.prefix.own_ids[0] == ids[-1])
        last = number == len(conversation) - 2
        if exact and (last or number < 3):
            assert prompt.prefix.ids == whole(name, history.to_openai("reasoning"), tools, tokenize=True)
        elif last and not (TemplateDifference.BESIDE_CALLS in found.differences and turn["content"]):
            rendering = whole(name, history.to_openai("reasoning"), tools)
            assert rendering.endswith(tokenizer.decode(prompt.prefix.own_ids))
        assert tokenizer.decode(prompt.prefix.own_ids).endswith(prompt.generation_prompt)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
@FEW
@given(conversation=conversations(6), data=st.data())
def test_random_ids_stay_as_they_were_sampled(
    name: str, conversation: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    """Cut off anywhere, ended by any token, empty: the prompt only grows, and an end of turn is there exactly once."""
    builder, tokenizer = builder_of(name), tokenizer_of(name)
    history, prompt = start(builder, conversation[0], None)
    for turn, *following in conversation[1:]:
        found = finding(builder, turn, following)
        if found.extension not in GOES_ON:
            continue
        ids = data.draw(st.lists(st.integers(0, WORDS - 1), max_size=8))
        ended = data.draw(st.none() | st.sampled_from(builder.end_of_turn))
        ids += [] if ended is None else [ended]
        sampled = response(builder, prompt, turn, ids)
        history.append(sampled)
        history.extend(following)
        before, prompt = prompt, builder.prompt(history.nodes(), None)
        assert prompt.prefix.ids[: before.prefix.length + len(ids)] == before.prefix.ids + ids
        own = prompt.prefix.own_ids
        if ended is not None:
            assert own[:1] != [ended]
        elif found.suffix_template.end:
            assert tokenizer.decode(own).startswith(
                (found.suffix_template.end, found.suffix_template.lead + found.suffix_template.end)
            )
        for message in following:
            assert message["content"].strip() in readable(tokenizer.decode(own))


def readable(text: str) -> str:
    """Some templates write results as JSON text."""
    return text + text.replace("\\n", "\n").replace('\\"', '"')


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(conversation=conversations(5), offered=st.booleans(), prompted=st.booleans())
def test_rendered_as_transformers_renders(
    name: str, conversation: list[list[dict[str, Any]]], offered: bool, prompted: bool
) -> None:
    """The same text, the same ids, and a refusal where transformers raises."""
    template = builder_of(name)._template
    messages = [message for part in conversation for message in part]
    tools = TOOLS if offered else None
    prepared = [template.prepare(message) for message in messages]
    try:
        wanted = whole(name, messages, tools, prompt=prompted)
    except Exception:
        with pytest.raises(TemplateError):
            template.render(prepared, tools, add_generation_prompt=prompted)
        return
    text = template.render(prepared, tools, add_generation_prompt=prompted)
    assert text == wanted
    assert builder_of(name)._encoder.encode(text) == whole(name, messages, tools, prompt=prompted, tokenize=True)


def test_template_reports() -> None:
    """The reports, so that a change is noticed. Most templates extend most continuations."""
    counts: dict[str, int] = {}
    for name in NAMES:
        if name in ("hermes", "smollm2"):
            continue
        for found in builder_of(name).template_report.findings:
            counts[found.extension] = counts.get(found.extension, 0) + 1
    if len(NAMES) < 70:
        pytest.skip("trl with its chat templates is not installed")
    assert counts["prefix"] >= 180 and counts["prefix"] + counts["diverges"] >= 300
    extension = {
        (name, str(found.pattern)): found.extension
        for name in NAMES
        for found in builder_of(name).template_report.findings
    }
    for pattern in ("user after text", "tool after a call", "tool+ after calls", "tool, user after a call"):
        for name in ("hermes", "qwen2_5", "qwen3_instruct_2507", "qwen3_training", "qwen3_8", "muse_glimmer"):
            assert extension[name, pattern] is Extension.PREFIX, (name, pattern)
    assert extension["smollm2", "tool after a call"] is Extension.PREFIX
    assert extension["qwen3", "user after text"] is Extension.DIVERGES
    assert extension["gptoss", "user after text"] is Extension.DIVERGES
    assert extension["gemma4_v5", "tool after a call"] is Extension.DIVERGES
    assert extension["llama3_1", "tool+ after calls"] is Extension.REJECTED
    assert extension["gemma3", "tool after a call"] is Extension.REJECTED
    assert extension["phi3", "tool after a call"] is Extension.OMITS
    assert extension["deepseekv3", "tool after a call"] is Extension.UNEXTENDABLE


@pytest.mark.parametrize("name", NAMES)
def test_ends_of_turns(name: str) -> None:
    """All that a model may end a turn with is known from tokenizer and template."""
    builder, tokenizer = builder_of(name), tokenizer_of(name)
    known = {tokenizer.convert_ids_to_tokens(token_id) for token_id in builder.end_of_turn}
    text, calls = ends(name)
    by_name = {"glm4moe": {"<|user|>", "<|observation|>", "<|endoftext|>"}}
    extra = {tokenizer.eos_token} if name.startswith("phi3") else set()
    wanted = next((found for start, found in by_name.items() if name.startswith(start)), {text, calls} | extra)
    assert known == wanted


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("deepseek")])
def test_a_turn_without_a_suffix_template_is_a_branch_or_an_error(name: str) -> None:
    """DeepSeek's template opens the list of results for the first result of a conversation only."""
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    branching = builder_of(name)
    strict = PromptBuilder(tokenizer_of(name), when_unextendable="error")
    assert branching.template_report.describe() == strict.template_report.describe().replace(
        "policy: error", "policy: branch"
    )
    history = MessageHistory([{"role": "user", "content": "Tide?"}])
    sampled = response(branching, branching.prompt(history.nodes()), turn, [5, 6, branching.end_of_turn[0]])
    history.append(sampled)
    history.append(result)
    prompt = branching.prompt(history.nodes())
    assert prompt.start is PromptStart.BRANCH
    assert prompt.prefix.ids == whole(name, history.to_openai("reasoning"), None, tokenize=True)
    with pytest.raises(TemplateNotExtendable, match="tool after a call cannot be extended"):
        strict.prompt(history.nodes())
    assert sampled.tokens in [found.tokens for found in history.completions()]


def test_templates_of_the_package_are_read_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert "<tool_call>" in read_template("hermes_short") and "<tool_call>" not in read_template("pythonic_short")
    assert read_template("mine.jinja") == "{{ messages }}"
    with pytest.raises(FileNotFoundError):
        read_template("hermes_long")
