"""The ids of prompts: which ids a prompt extends, which sampled ids it keeps, and which conversations it rejects."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("transformers")

from template_tokenizers import OURS, tokenizer_of
from transformers import PreTrainedTokenizerFast

from lachesis_client.errors import PromptError, TemplateError, TurnRejected
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.prompts.prompts import Prompt, PromptBuilder, PromptStart, TemplateNotExtendable
from lachesis_tokens.templates.forced_calls import ToolChoiceError, forced_opening
from lachesis_tokens.templates.template_cases import USUAL
from lachesis_tokens.templates.template_report import Extension
from tool_call_parsers import ParsedCompletion, get_parser, list_parsers

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "Tide?"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def hermes() -> PromptBuilder:
    return PromptBuilder(tokenizer_of("hermes"))


def with_template(source: str, **settings: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer_of("hermes"), chat_template=source, **settings)


def call(number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": "look", "content": content}


def sampled(
    builder: PromptBuilder, prompt: Prompt, text: str, *calls: dict[str, Any], prefix: TokenPrefix | None = None
) -> ChatResponse:
    """A completion of `text`, end of turn and all."""
    ids = builder.encode(text)
    tokens = SampledTokens.sample(
        prefix or prompt.prefix, ids, [-0.5] * len(ids), end_of_turn=builder.end_of_turn, context=prompt.context
    )
    message = {"role": "assistant", "content": text.partition("<|")[0], "tool_calls": list(calls)}
    return ChatResponse(Message.from_openai(message), FinishReason.STOP, tokens=tokens)


def say(
    builder: PromptBuilder, history: MessageHistory, text: str, *calls: dict[str, Any], tools: Any = None
) -> Prompt:
    prompt = builder.prompt(history.nodes(), tools)
    history.append(sampled(builder, prompt, text, *calls))
    return prompt


def text_of(builder: PromptBuilder, prompt: Prompt) -> str:
    return str(builder.tokenizer.decode(prompt.prefix.ids))


def whole_ids(builder: PromptBuilder, messages: list[dict[str, Any]], tools: Any = None) -> Any:
    return builder.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_the_first_prompt_is_what_apply_chat_template_gives(hermes: PromptBuilder) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    prompt = hermes.prompt(MessageHistory(messages).nodes(), TOOLS)
    assert prompt.prefix.ids == whole_ids(hermes, messages, TOOLS)
    assert prompt.start is PromptStart.ROOT and prompt.prefix.parent is None
    assert prompt.generation_prompt == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("At noon.<|im_end|>", "\n"),  # the newline belongs to what follows, and the end of turn is not repeated
        ("At no", "<|im_end|>\n"),  # cut off: the end of turn belongs to what follows
        ("At noon. \n\n<|im_end|>", "\n"),
        ("At <|im_end|> noon", "<|im_end|>\n"),
        ("", "<|im_end|>\n"),
    ],
)
def test_the_end_of_a_turn_is_neither_missing_nor_doubled(hermes: PromptBuilder, text: str, end: str) -> None:
    history = MessageHistory([USER])
    first = say(hermes, history, text)
    history.append({"role": "user", "content": "And tomorrow?"})
    prompt = hermes.prompt(history.nodes())
    follows = f"{end}<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.start is PromptStart.EXTENDED
    assert text_of(hermes, prompt) == text_of(hermes, first) + text + follows


def test_a_turn_that_was_cut_off_inside_a_call(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    first = say(hermes, history, '<tool_call>\n{"name": "look", "argu', call())
    history.append(result("noon"))
    follows = "<|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    text = text_of(hermes, first) + '<tool_call>\n{"name": "look", "argu' + follows
    assert text_of(hermes, hermes.prompt(history.nodes())) == text


def test_a_stop_inside_the_end_of_a_turn_does_not_double_it() -> None:
    builder = PromptBuilder(tokenizer_of("cohere2"))
    history = MessageHistory([USER])
    first = say(builder, history, "At noon.<|END_RESPONSE|>")
    history.append(USER)
    found = text_of(builder, builder.prompt(history.nodes()))
    assert found.startswith(text_of(builder, first) + "At noon.<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN")


def test_the_token_that_was_sampled_ends_the_turn() -> None:
    """gpt-oss ends answers with `<|return|>`, and its template writes `<|end|>` in their place."""
    builder = PromptBuilder(tokenizer_of("gptoss"))
    history = MessageHistory([USER])
    say(builder, history, "<|channel|>final<|message|>Noon.<|return|>")
    history.append(USER)
    own = builder.tokenizer.decode(builder.prompt(history.nodes()).prefix.own_ids)
    assert own == "<|start|>user<|message|>Tide?<|end|><|start|>assistant"


def test_a_token_that_opens_the_next_message_is_still_to_come() -> None:
    """Gemma 4 opens the result with the token that ends a call; a turn that another token ended has yet to get it."""
    builder = PromptBuilder(tokenizer_of("gemma4_v5"))
    for end, opening in (("<|tool_response>", ""), ("<turn|>", "<|tool_response>"), ("", "<|tool_response>")):
        history = MessageHistory([USER])
        say(builder, history, "<|tool_call>call:look{}<tool_call|>" + end, call())
        history.append(result("noon"))
        prompt = builder.prompt(history.nodes())
        assert builder.tokenizer.decode(prompt.prefix.own_ids).startswith(opening + "response:look{")
        assert prompt.generation_prompt == ""


def test_attempts_share_the_turns_before_them(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    say(hermes, history, "Look.<|im_end|>", call())
    history.append(result("noon"))
    one, other = hermes.prompt(history.nodes()), hermes.prompt(history.nodes())
    assert one.prefix is not other.prefix and one.prefix.parent is other.prefix.parent is not None


def test_copies_after_an_edit_keep_their_ids(hermes: PromptBuilder) -> None:
    """What was sampled is put into the new prompt as it was sampled, though the template would write it otherwise."""
    history = MessageHistory([USER])
    say(hermes, history, "Look:   one<|im_end|>", call(0))
    history.append(result("low"))
    say(hermes, history, "  Look:\n\n two ", call(1))  # cut off
    history.append(result("high", 1))
    say(hermes, history, "Noon.<|im_end|>")
    history.append(USER)
    anchor = history.nodes()[1].origin
    history[2]["content"] = "middling"
    prompt = hermes.prompt(history.nodes())
    assert prompt.start is PromptStart.EXTENDED and prompt.prefix.parent is anchor.tokens.after
    assert hermes.tokenizer.decode(prompt.prefix.own_ids) == (
        "\n<|im_start|>user\n<tool_response>\nmiddling\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "  Look:\n\n two <|im_end|>\n<|im_start|>user\n<tool_response>\nhigh\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nNoon.<|im_end|>\n<|im_start|>user\nTide?<|im_end|>\n<|im_start|>assistant\n"
    )
    history[0]["content"] = "Tide, please?"
    prompt = hermes.prompt(history.nodes())
    assert prompt.start is PromptStart.ROOT and prompt.prefix.parent is None
    text = text_of(hermes, prompt)
    assert text.startswith("<|im_start|>user\nTide, please?<|im_end|>\n<|im_start|>assistant\nLook:   one<|im_end|>\n")
    assert "<|im_start|>assistant\n  Look:\n\n two <|im_end|>\n<|im_start|>user\n" in text


def test_an_edited_turn_is_what_the_template_writes(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    first = say(hermes, history, "Look.<|im_end|>", call())
    history.append(result("noon"))
    history[1]["content"] = "I look."
    prompt = hermes.prompt(history.nodes())
    assert prompt.start is PromptStart.ROOT
    assert prompt.prefix.ids == whole_ids(hermes, history.to_openai())
    assert "I look.\n<tool_call>" in text_of(hermes, prompt)
    assert first.prefix.parent is None


def test_a_summary_in_the_place_of_old_turns(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    for number in range(4):
        say(hermes, history, f"Look {number}<|im_end|>", call(number))
        history.append(result(f"result {number}", number))
    kept = history.nodes()[1].origin
    history[3:7] = [{"role": "user", "content": "Summary: it rose."}]
    prompt = hermes.prompt(history.nodes())
    assert prompt.prefix.parent is kept.tokens.after
    assert hermes.tokenizer.decode(prompt.prefix.own_ids) == (
        "\n<|im_start|>user\n<tool_response>\nresult 0\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nSummary: it rose.<|im_end|>\n<|im_start|>assistant\nLook 3<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nresult 3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_forced_opening_stays_before_a_copy(hermes: PromptBuilder) -> None:
    """Ids between the generation prompt and the sampled ones belong to the turn, though nobody sampled them."""
    history = MessageHistory([USER])
    prompt = hermes.prompt(history.nodes())
    opened = prompt.prefix.extend(hermes.encode('<tool_call>\n{"name": "look", '))
    history.append(sampled(hermes, prompt, '"arguments": {}}\n</tool_call><|im_end|>', call(), prefix=opened))
    history.append(result("noon"))
    turn = '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n'
    assert turn in text_of(hermes, hermes.prompt(history.nodes()))
    history[0]["content"] = "Tide, please?"
    assert turn in text_of(hermes, hermes.prompt(history.nodes()))


@pytest.mark.parametrize("name", ["look", "a", "arguments", 'a"b', "a\nb", "a\\b", "a&b", "placeholder_key", "", "f"])
def test_a_forced_opening_ends_after_the_name_of_the_tool(name: str) -> None:
    """Whatever the name is: what the format would write after it is no part of the opening."""
    tools = [{"type": "function", "function": {"name": name}}]
    opened = 0
    for parser in map(get_parser, list_parsers()):
        call = {"id": "call_00001", "function": {"name": name, "arguments": {"x": 1, "y": "a"}}}
        try:
            opening = forced_opening(parser, tools, tools[0])
        except ToolChoiceError:
            continue
        written = parser.render(None, None, [call])
        assert written.startswith(opening), parser.name
        if name.isalpha():  # and has no escapes
            other = forced_opening(parser, [{"function": {"name": "zebra_9"}}], {"function": {"name": "zebra_9"}})
            assert opening == other.replace("zebra_9", name), parser.name
        assert [call.name for call in parser.parse(written, tools).tool_calls] == [name], parser.name
        opened += 1
    assert opened > 20 or not name or "\n" in name


def test_threads_validate_a_template_together() -> None:
    """Long prompts are built beside the event loop."""
    expected = PromptBuilder(tokenizer_of("hermes")).template_report
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            validator = PromptBuilder(tokenizer_of("hermes"))._validator
            with ThreadPoolExecutor(len(USUAL)) as threads:
                assert tuple(threads.map(validator.find, USUAL)) == expected.findings
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("tool_choice", ["required", TOOLS[0]])
def test_a_parser_that_only_reads_forces_no_call(tool_choice: Any) -> None:
    """A registered class needs no more than `parse`."""

    class ReadsOnly:
        def parse(self, text: str, tools: Any = None) -> ParsedCompletion:
            return ParsedCompletion(text)

    with pytest.raises(ToolChoiceError, match="'ReadsOnly' have no fixed opening"):
        forced_opening(ReadsOnly(), TOOLS, tool_choice, reasoning_is_open=True)  # type: ignore[arg-type]


def test_other_tools_make_another_context(hermes: PromptBuilder) -> None:
    swapped = [{"function": dict(reversed(list(TOOLS[0]["function"].items()))), "type": "function"}]
    assert hermes.context(TOOLS) == hermes.context(swapped) != hermes.context(None) == hermes.context([])
    assert hermes.context(None) != with_template(CHATML).context(None)
    assert with_template(CHATML).context(None) != with_template(CHATML, template_kwargs={"x": 1}).context(None)
    assert PromptBuilder(tokenizer_of("phi3"), chat_template=CHATML).context(None) == with_template(CHATML).context(
        None
    )
    history = MessageHistory([USER])
    say(hermes, history, "Noon.<|im_end|>", tools=TOOLS)
    history.append(USER)
    assert hermes.prompt(history.nodes(), TOOLS).start is PromptStart.EXTENDED
    prompt = hermes.prompt(history.nodes(), None)
    assert prompt.start is PromptStart.ROOT and prompt.prefix.ids == whole_ids(hermes, history.to_openai())


def test_a_conversation_may_contain_the_words_of_the_placeholder(hermes: PromptBuilder) -> None:
    said = "placeholder-turn-0 placeholder-turn-1 <|im_end|> probe-mark-0 placeholder"
    history = MessageHistory([USER])
    first = say(hermes, history, "Noon.<|im_end|>")
    history.append({"role": "user", "content": said})
    text = text_of(hermes, first) + f"Noon.<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(hermes, hermes.prompt(history.nodes())) == text


def test_a_result_with_words_of_a_placeholder_where_the_template_writes_no_calls() -> None:
    """The words of the turn were taken for those of the result, and the result began after them."""
    builder = PromptBuilder(tokenizer_of("llama3"))
    history = MessageHistory([USER])
    first = say(builder, history, "Noon.<|eot_id|>", call())
    history.append({"role": "tool", "tool_call_id": "c00000000", "content": "low placeholder-turn-0 high"})
    assert "low placeholder-turn-0 high" in text_of(builder, builder.prompt(history.nodes())).partition("Noon.")[2]
    assert text_of(builder, builder.prompt(history.nodes())).startswith(text_of(builder, first))


def test_a_turn_after_a_turn(hermes: PromptBuilder) -> None:
    """Nothing new was said: the last turn is closed, and a new one begins."""
    history = MessageHistory([USER])
    first = say(hermes, history, "No")
    prompt = hermes.prompt(history.nodes())
    assert text_of(hermes, prompt) == text_of(hermes, first) + "No<|im_end|>\n<|im_start|>assistant\n"


def test_messages_that_nobody_sampled_after_a_sampled_one(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    say(hermes, history, "Noon.<|im_end|>")
    history.extend([USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, result("low"), result("x")])
    prompt = hermes.prompt(history.nodes())
    assert prompt.start is PromptStart.EXTENDED
    assert prompt.prefix.ids == whole_ids(hermes, history.to_openai())


def test_hundreds_of_turns(hermes: PromptBuilder) -> None:
    history = MessageHistory([USER])
    for number in range(400):
        prompt = say(hermes, history, f"Look {number}.<|im_end|>", call(number))
        history.append(result("noon", number))
        assert prompt.prefix.own_length < 100
    assert len(list(prompt.prefix.lineage())) == 799


# Templates of other kinds


def test_the_tail_shows_reasoning_that_the_prompt_opens() -> None:
    thinking = PromptBuilder(tokenizer_of("qwen3_5_think"))
    silent = PromptBuilder(tokenizer_of("qwen3_5_think"), template_kwargs={"enable_thinking": False})
    for builder, tail in (
        (thinking, "<|im_start|>assistant\n<think>\n"),
        (silent, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ):
        history = MessageHistory([{"role": "user", "content": "What does <think> mean?"}])
        assert say(builder, history, "Noon.<|im_end|>", call()).generation_prompt == tail
        history.append(result("<think>"))
        assert builder.prompt(history.nodes()).generation_prompt == tail


def test_a_tail_that_the_conversation_decides() -> None:
    source = CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if '/quiet' in messages[-1].content %}<think></think>{% endif %}{% endif %}",
    )
    builder = with_template(source)
    history = MessageHistory([USER])
    assert say(builder, history, "Noon.<|im_end|>").generation_prompt == "<|im_start|>assistant\n"
    history.append({"role": "user", "content": "Tide? /quiet"})
    assert builder.prompt(history.nodes()).generation_prompt == "<|im_start|>assistant\n<think></think>"


LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.last %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}: {% endif %}"
    "{% endif %}{{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_a_suffix_that_depends_on_system_prompt_and_tools_has_a_placeholder_with_them() -> None:
    builder = with_template(LAST_USER)
    (found, *_) = builder.template_report.findings
    assert found.extension is Extension.DIVERGES
    assert found.placeholder is not None and found.placeholder.system and found.placeholder.tools
    history = MessageHistory([{"role": "system", "content": "Brief"}, USER])
    say(builder, history, "Noon.</s>", tools=TOOLS)
    history.append(USER)
    own = builder.tokenizer.decode(builder.prompt(history.nodes(), TOOLS).prefix.own_ids)
    assert own.startswith('[INST] [{"') and own.endswith("Brief: Tide? [/INST]")


NUMBERED = CHATML.replace("{{ m.role }}", "{{ loop.index }} {{ m.role }}")


def test_a_branch_hangs_on_what_is_the_same() -> None:
    builder = with_template(NUMBERED)
    assert {found.extension for found in builder.template_report.findings} == {Extension.UNEXTENDABLE}
    assert "policy: branch" in builder.template_report.describe()
    history = MessageHistory([USER])
    say(builder, history, "Noon.<|im_end|>")
    history.append(USER)
    prompt = builder.prompt(history.nodes())
    # The template numbers the turn itself, which the generation prompt did not: the ids part there.
    assert prompt.start is PromptStart.BRANCH and prompt.prefix.parent is None
    same = with_template(NUMBERED.replace("<|im_start|>assistant", "<|im_start|>{{ messages | length + 1 }} assistant"))
    history = MessageHistory([USER])
    for text in ("Noon.<|im_end|>", "Six.<|im_end|>"):
        say(same, history, text)
        history.append(USER)
    prompt = same.prompt(history.nodes())
    assert prompt.start is PromptStart.BRANCH and prompt.prefix.parent is history.nodes()[3].origin.tokens.after
    assert text_of(same, prompt).endswith("<|im_start|>5 user\nTide?<|im_end|>\n<|im_start|>6 assistant\n")


def test_the_policy_error() -> None:
    builder = with_template(NUMBERED, when_unextendable="error")
    history = MessageHistory([USER])
    say(builder, history, "Noon.<|im_end|>")
    history.append(USER)
    with pytest.raises(
        TemplateNotExtendable, match=r'user after text cannot be extended.*when_unextendable to "branch"'
    ):
        builder.prompt(history.nodes())


def test_a_template_that_hides_results_is_rejected() -> None:
    builder = PromptBuilder(tokenizer_of("phi3"))
    history = MessageHistory([USER])
    say(builder, history, "Look.<|end|>", call())
    history.append(result("noon"))
    with pytest.raises(TemplateError, match=r"leaves out tool results; set chat_template to one that writes them"):
        builder.prompt(history.nodes())


def test_a_refusal_says_the_templates_words_and_names_the_message() -> None:
    builder = PromptBuilder(tokenizer_of("gemma3"))
    history = MessageHistory([USER])
    say(builder, history, "Look.<end_of_turn>", call())
    history.append(result("noon"))
    with pytest.raises(TemplateError, match=r"message 2, role 'tool'\): Conversation roles must alternate"):
        builder.prompt(history.nodes())


@pytest.mark.parametrize(("name", "calls", "own"), [("llama3_1", 2, True), ("gemma3", 2, False), ("gemma3", 1, False)])
def test_calls_that_a_template_takes_one_by_one_are_the_turns_fault(name: str, calls: int, own: bool) -> None:
    """And a template that takes no calls at all is not."""
    builder = PromptBuilder(tokenizer_of(name))
    history = MessageHistory([USER])
    say(builder, history, "Look.", *(call(number) for number in range(calls)))
    for number in range(calls):
        history.append(result("noon", number))
    with pytest.raises(TemplateError) as error:
        builder.prompt(history.nodes())
    assert isinstance(error.value, TurnRejected) == own


def test_what_cannot_be_used() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("hermes").backend_tokenizer)
    with pytest.raises(TemplateError, match=r"no chat template; set chat_template"):
        PromptBuilder(bare)
    with pytest.raises(TemplateError, match="line 1 is not valid Jinja"):
        with_template("{% if %}")
    with pytest.raises(PromptError, match="the conversation is empty"):
        with_template(CHATML).prompt([])


def test_content_in_the_form_that_a_template_reads() -> None:
    """Vision templates read parts only, and write nothing at all of a text."""
    parts = PromptBuilder(tokenizer_of("smolvlm"))
    assert "User: Tide?" in text_of(parts, parts.prompt(MessageHistory([USER]).nodes()))
    listed = {"role": "user", "content": [{"type": "text", "text": "Ti"}, {"type": "text", "text": "de?"}]}
    plain = with_template(CHATML)
    assert "user\nTide?<|im_end|>" in text_of(plain, plain.prompt(MessageHistory([listed]).nodes()))


@pytest.mark.parametrize("name", ["qwen3", "llava_next", "smolvlm", "gemma3"])
def test_an_image_is_rejected_and_not_left_out(name: str) -> None:
    """These write the text alone, nothing of the message at all, or a sign for an image that nobody sends."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = {"role": "user", "content": [image, {"type": "text", "text": "What is on it?"}]}
    builder = PromptBuilder(tokenizer_of(name))
    with pytest.raises(PromptError, match="a message contains image_url, and only text becomes token ids"):
        builder.prompt(MessageHistory([shown]).nodes())
    history = MessageHistory([USER])
    say(builder, history, "Look.")
    history.append(shown)
    with pytest.raises(PromptError, match="image_url"):
        builder.prompt(history.nodes())


def test_what_is_recorded(hermes: PromptBuilder) -> None:
    record = hermes.template_report.to_record()
    assert record["shows_tools"] is True and record["when_unextendable"] == "branch"
    assert {"continuation": "tool after a call", "extension": "prefix"} in record["continuations"]
    assert "tool after a call: prefix" in hermes.template_report.describe()
    assert hermes.template_report.summary() == ""
    assert "does not show tools" in with_template(CHATML).template_report.summary()


def test_further_ends_of_turns() -> None:
    tokenizer = tokenizer_of("hermes")
    (other,) = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    builder = PromptBuilder(tokenizer, end_of_turn=[other])
    assert builder.end_of_turn == (tokenizer.eos_token_id, other)
    history = MessageHistory([USER])
    say(builder, history, "Noon.<|endoftext|>")
    history.append(USER)
    own = builder.tokenizer.decode(builder.prompt(history.nodes()).prefix.own_ids)
    assert own.startswith("\n<|im_start|>user\n")


# Tokenizers of other kinds


def spaced() -> Any:
    """Arranged like Llama 2's: a blank is written before each text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["▁", *"abcdefghijklmnopqrstuvwxyz.?[]/INSTU:", "▁t", "▁n"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *words]))}
    raw = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("▁", "n")], unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def test_no_blank_that_nobody_wrote() -> None:
    """The ids of a suffix equal its ids in the whole conversation."""
    tokenizer = spaced()
    tokenizer.chat_template = INST
    builder = PromptBuilder(tokenizer)
    blank = tokenizer.convert_tokens_to_ids("▁")
    assert tokenizer.encode("tide", add_special_tokens=False)[0] == tokenizer.convert_tokens_to_ids("▁t")
    assert builder.encode("ide") == tokenizer.convert_tokens_to_ids(["i", "d", "e"])
    messages = [
        {"role": "user", "content": "tide?"},
        {"role": "assistant", "content": "noon."},
        {"role": "user", "content": "no"},
    ]
    history = MessageHistory(messages[:1])
    first = builder.prompt(history.nodes())
    whole = whole_ids(builder, messages)
    turn = whole[len(first.prefix) : whole.index(tokenizer.eos_token_id) + 1]
    for ids, rest in ((turn, []), (turn[:-2], [blank, tokenizer.eos_token_id])):
        history = MessageHistory(messages[:1])
        tokens = SampledTokens.sample(first.prefix, ids, [-0.5] * len(ids), context=first.context)
        history.append(ChatResponse(Message("assistant", "noon."), FinishReason.STOP, tokens=tokens))
        history.append(messages[2])
        prompt = builder.prompt(history.nodes())
        assert prompt.prefix.ids == first.prefix.ids + ids + rest + whole[len(first.prefix) + len(turn) :]


def test_whitespace_that_a_token_takes_with_it() -> None:
    """Phi 3's `<|end|>` swallows the newline after it, in the whole conversation and in a suffix."""
    from tokenizers import AddedToken, Tokenizer

    raw = Tokenizer.from_str(tokenizer_of("phi3").backend_tokenizer.to_str())
    raw.add_special_tokens([AddedToken("<|swallows|>", special=True, normalized=False, rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|swallows|>")
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|swallows|>")
    builder = PromptBuilder(tokenizer)
    history = MessageHistory([USER])
    say(builder, history, "Noon.<|swallows|>")
    history.append(USER)
    assert builder.prompt(history.nodes()).prefix.ids == whole_ids(builder, history.to_openai())
    assert "\n" not in builder.tokenizer.decode(builder.prompt(history.nodes()).prefix.own_ids)[:3]


def test_settings_that_another_caller_left_on_the_tokenizer() -> None:
    """A tokenizer remembers the truncation of its last call; a prompt is never cut short by it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("hermes").backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (OURS / "hermes.jinja").read_text(encoding="utf-8")
    builder = PromptBuilder(tokenizer)
    nodes = MessageHistory([USER]).nodes()
    wanted = builder.prompt(nodes).prefix.ids
    tokenizer("a text", truncation=True, max_length=2, padding="max_length")
    assert builder.prompt(nodes).prefix.ids == wanted
