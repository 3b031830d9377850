"""The registry, token ids, and misuse, for every format."""

import json
import subprocess
import sys
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import BPE, spelled

from lachesis_testing.parser_checks import event_problems
from tests.run import ALL, some
from tool_call_parsers import (
    CallStatus,
    ContentDelta,
    Finish,
    Format,
    UnknownParser,
    UnknownReasoning,
    formats,
    get_parser,
    list_parsers,
    register_parser,
)
from tool_call_parsers.formats import NAMES, fold, load_format
from tool_call_parsers.json_blocks import JsonBlocks
from tool_call_parsers.model_names import EXACT, MODELS

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


# -- names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Hermes", "hermes"),
        ("DEEPSEEK-V3.1", "deepseek_v31"),
        ("deepseek_v3_1", "deepseek_v31"),
        ("deepseekv31", "deepseek_v31"),
        ("qwen", "qwen3_json"),
        ("qwen3_xml", "qwen3_coder"),
        ("Kimi-K2", "kimi_k2"),
        ("llama3", "llama3_json"),
        ("gpt-oss", "openai"),
        ("minimax-m2", "minimax_m2"),
        ("apertus2509", "apertus"),
        ("interns1", "internlm"),
        ("glm", "glm45"),
        ("hunyuan", "hy_v3"),
        ("granite-20b-fc", "granite-20b-fc"),
    ],
)
def test_names_are_found_however_they_are_spelled(spelling, name):
    assert get_parser(spelling).name == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3_coder_next", "qwen3_coder"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3_coder"),
        ("Qwen3-4B-Instruct-2507-Q4_K_M", "qwen3_json"),
        ("Qwen3.5-397B-A17B", "qwen3_coder"),
        ("qwen3:8b", "qwen3_json"),
        ("zai-org/GLM-4.5-Air-FP8", "glm45"),
        ("glm5.2", "glm47"),
        ("kimi_k2.5", "kimi_k2"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi_k2"),
        ("minimax_m2.5", "minimax_m2"),
        ("step3.5", "step3p5"),
        ("devstral2", "mistral"),
        ("Mistral-7B-Instruct-v0.3", "mistral_v3"),
        ("granite_4.1", "granite4"),
        ("command_a", "cohere_command3"),
        ("c4ai-command-a-03-2025", "cohere_command3"),
        ("command-a-reasoning-08-2025", "cohere_command4"),
        ("exaone4", "hermes"),
        ("smollm3", "hermes"),
        ("ling", "ling3"),
        ("Ring-2.5-1T", "ling3"),
        ("hermes4", "hermes"),
        ("Hermes-3-Llama-3.1-8B", "hermes"),
        ("DeepSeek-V3.2-Exp", "deepseek_v31"),
        ("DeepSeek-V3.2", "deepseek_v32"),
        ("Hunyuan-A13B-Instruct-FP8", "hunyuan_a13b"),
        ("NVIDIA-Nemotron-Nano-9B-v2", "nemotron_json"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_v3"),
        ("Llama-4-Scout-17B-16E-Instruct", "llama4_json"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3_json"),
        ("upstage/Solar-Open-100B", "solar_open"),
        ("functionary-medium-v3.2", "functionary"),
    ],
)
def test_names_of_models_find_their_format(typed, name):
    assert get_parser(typed).name == name


@pytest.mark.parametrize(
    "typed",
    [
        "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-V3.2-Speciale", "kimi_k2.9", "qwen-7b-chat", "qwen4",
        "Meta-Llama-3-8B-Instruct", "llama-7b", "GLM-4-9B-0414", "gemma-3-27b-it", "granite-4.5", "Hunyuan-7B-Instruct",
        "solar-10.7b-instruct", "phi-4-reasoning", "command-r-plus", "MiniMax-Text-01", "gpt-4o", "instruct", "8b", "/",
    ],
)  # fmt: skip
def test_a_name_of_another_generation_or_of_no_format_is_an_error(typed):
    with pytest.raises(UnknownParser, match=r"is unknown; .*known: "):
        get_parser(typed)


def test_names_of_models_are_no_aliases_and_belong_to_formats():
    named = [(fold(model), name) for name, models in MODELS.items() for model in models.split()]
    taken = {fold(name) for names in NAMES.values() for name in names}
    assert {name for _, name in named} <= NAMES.keys()
    assert len(dict(named)) == len(named)
    assert not taken & dict(named).keys()
    assert EXACT - {"step"} <= taken


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_names_is_that_of_the_rows(name):
    row = load_format(name)
    assert (row.name, *row.aliases) == NAMES[name] == NAMES[get_parser(row.name).name]


@pytest.mark.parametrize(
    ("listed", "wrong"),
    [
        ({"hermes": ("hermes",)}, "lacks the lines .'json_blocks hermes qwen25 qwen2.5'., and has .. without"),
        ({"hermes2": ("hermes2",)}, "lacks the lines .., and has .'hermes2'. without a row"),
    ],
)
def test_a_name_that_differs_from_its_row_is_an_error(monkeypatch, listed, wrong):
    monkeypatch.setattr(formats, "NAMES", {**NAMES, **listed})
    monkeypatch.setattr(formats, "_MODULES", {**formats._MODULES, **dict.fromkeys(listed, "json_blocks")})
    with pytest.raises(ImportError, match=wrong):
        load_format("granite")


FAMILIES = {"channels", "delimited", "json_blocks.named", "python_calls", "tag_blocks"}


@pytest.mark.parametrize(
    ("program", "families"),
    [
        ("get_parser('qwen2.5', reasoning='auto').parse(CALL, TOOLS)", set()),
        ("get_parser('kimi_k2')", {"json_blocks.named"}),
        ("get_parser('glm46')", {"tag_blocks"}),
        ("get_parser('openai')", {"channels", "json_blocks.named", "tag_blocks"}),
        ("list_parsers()", set()),
        ("detect_parser('{{ tools }}<tool_call>', render=render)", set()),
    ],
)
def test_a_parser_loads_the_lexers_of_its_own_family_only(program, families):
    code = f"""
import sys
from tool_call_parsers import *
CALL, TOOLS = {CALL!r}, {TOOLS!r}
def render(messages, tools, add_generation_prompt):
    text = "".join(f"<|im_start|>{{message['role']}}\\n{{said(message)}}<|im_end|>\\n" for message in messages)
    return text + "<|im_start|>assistant\\n" * add_generation_prompt
def said(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [get_parser("hermes").render(None, None, [call]) for call in calls]
    return "\\n".join(filter(None, [message["content"], *written]))
result = {program}
assert "detect" not in {program!r} or result.tool_parser == "hermes", result
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("tool_call_parsers.") for name in done.stdout.split()}
    assert loaded & FAMILIES == families


def test_every_name_of_the_engines_is_known():
    vllm = """
        apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4
        deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite4 granite-20b-fc
        hermes hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3
        llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse
        musespark1x muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder
        qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam
    """
    sglang = """
        apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41 dots gemma4
        gigachat3 gigachat35 glm glm45 glm47 gpt-oss hermes hunyuan inkling interns1 iquest_q1 k2_horizon kimi_k2
        kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3 mistral muse nanbeige poolside_v1
        pythonic qwen qwen25 qwen3_coder spark25 step3 step3p5 trinity
    """
    hermes_agent = """
        hermes qwen qwen3_coder deepseek_v3 deepseek_v3_1 deepseek_v31 glm45 glm47 kimi_k2 llama llama3_json
        longcat mistral
    """
    for name in [*vllm.split(), *sglang.split(), *hermes_agent.split()]:
        assert get_parser(name).name in list_parsers()


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(UnknownParser, match=r"'qwen3_codr' is unknown; similar names: qwen3_coder.*known: .*hermes"):
        get_parser("qwen3_codr")
    with pytest.raises(UnknownParser, match="comes with the checkpoint"):
        get_parser("hf")
    with pytest.raises(UnknownReasoning, match="qwen3"):
        get_parser("hermes", reasoning="qwen4")
    with pytest.raises(TypeError, match="name must be a str"):
        get_parser(None)


def test_a_registered_row_is_a_format():
    row = Format("test_of_a_row", JsonBlocks(opens=("<c>",), closes=("</c>",), frame=("<c>", "</c>")), "none", ("tr",))
    assert register_parser(row) is row
    parsed = get_parser("TR").parse('Hi<c>{"name": "bash", "arguments": {}}</c>', TOOLS)
    assert (parsed.content, [call.name for call in parsed.tool_calls]) == ("Hi", ["bash"])
    with pytest.raises(ValueError, match="'hermes' is already registered"):
        register_parser(Format("hermes", row.grammar, "none"))
    with pytest.raises(ValueError, match="'tr' is already registered, as test_of_a_row"):
        register_parser("tr")(object)


def test_a_registered_class_is_a_parser():
    @register_parser("test_of_a_class")
    class Mine:
        def parse(self, text, tools=None):
            return get_parser("hermes").parse(text.upper(), tools)

    assert get_parser("test-of-a-class").parse("a").content == "A"
    with pytest.raises(ValueError, match="is registered as a class"):
        get_parser("test_of_a_class", reasoning="qwen3")


def test_auto_reads_the_chat_template():
    class Tokenizer:
        chat_template = None

    with pytest.raises(ValueError, match="'auto' needs a tokenizer with a chat template"):
        get_parser("auto", tokenizer=Tokenizer())
    BPE.chat_template = "{{ tools }}<tool_call>\n<function=name>\n<parameter=key>\n</parameter></function></tool_call>"
    assert get_parser("auto", tokenizer=BPE).name == "qwen3_coder"
    BPE.chat_template = {"default": "{{ messages }}", "tool_use": BPE.chat_template}
    assert get_parser("auto", tokenizer=BPE).name == "qwen3_coder"
    BPE.chat_template = "{{ messages }}"
    with pytest.raises(UnknownParser, match=r"'auto': .*name one: "):
        get_parser("auto", tokenizer=BPE)


def test_importing_loads_no_lexer():
    code = "import sys, tool_call_parsers; print([m for m in sys.modules if m.startswith('tool_call_parsers.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tool_call_parsers.lazy']"


# -- token ids


def ids_of(*pieces):
    """The ids of a text made of pairs (text, whether its markers consist of ordinary tokens)."""
    ids = []
    for text, ordinary in pieces:
        ids += spelled(text) if ordinary else BPE.encode(text, add_special_tokens=False)
    return ids, "".join(text for text, _ in pieces)


def test_a_marker_of_ordinary_tokens_is_text():
    parser = get_parser("hermes", tokenizer=BPE)
    ids, text = ids_of((f"The format is {CALL}.", True), (CALL, False))
    parsed = parser.parse(text, TOOLS, token_ids=ids)
    (call,) = parsed.tool_calls
    assert parsed.content == f"The format is {CALL}."
    assert text[call.span.start : call.span.end] == call.raw == CALL
    assert BPE.decode(ids[call.span.token_start : call.span.token_end]) == CALL
    assert len(parser.parse(text, TOOLS).tool_calls) == 2, "without ids the text decides"


def test_a_marker_of_ordinary_tokens_inside_an_argument_is_that():
    parser = get_parser("qwen3_coder", tokenizer=BPE)
    value = "see </tool_call> and <tool_call>"
    ids, text = ids_of(
        ("<tool_call>", False), (f"\n<function=bash>\n<parameter=c>\n{value}\n</parameter>\n</function>\n", True),
        ("</tool_call>", False),
    )  # fmt: skip
    (call,) = parser.parse(text, TOOLS, token_ids=ids).tool_calls
    assert call.arguments == {"c": value}
    assert call.raw == text


def test_events_of_tokens_are_in_the_words_of_the_text():
    ids, _ = ids_of(
        ("<tool_call>", False), ('{"name": "f<think>", "arguments": {"a": "<|\"|>"}}', True), ("</tool_call>", False)
    )  # fmt: skip
    stream = get_parser("hermes", tokenizer=BPE).stream(TOOLS)
    events = [event for token in ids for event in stream.feed(BPE.decode([token]), [token])]
    found = stream.finish()
    events += stream.last_events
    assert found.attempts[0].error == "no tool named 'f<think>' was offered"
    assert event_problems(events, found) == []


def test_text_none_is_what_the_ids_decode_to():
    ids, text = ids_of((CALL, False))
    assert get_parser("hermes", tokenizer=BPE).parse(None, TOOLS, token_ids=ids).attempts[0].raw == text


@settings(max_examples=some(40))
@given(st.data())
def test_a_stream_of_tokens_ends_in_what_parse_returns(data):
    parser = get_parser("hermes", tokenizer=BPE)
    markup = st.sampled_from([CALL, "<tool_call>", "</tool_call>", "Tromsø 🙂 ", "<|im_end|>", '{"name": "bash"', " "])
    ids, text = ids_of(*data.draw(st.lists(st.tuples(markup, st.booleans()), max_size=6)))
    whole = parser.parse(text, TOOLS, token_ids=ids)
    stream, events, sent = parser.stream(TOOLS), [], ""
    size = data.draw(st.integers(1, 5))
    for start in range(0, len(ids), size):
        decoded = BPE.decode(ids[: start + size])
        if decoded.endswith("\ufffd"):  # part of a character: servers wait for the rest
            decoded = sent
        events += stream.feed(decoded.removeprefix(sent), ids[start : start + size])
        sent = decoded
    finished = stream.finish()
    assert finished == whole
    events += stream.last_events
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == (whole.content or "")


def test_ids_that_are_not_the_text_are_an_error():
    ids, text = ids_of((CALL, False))
    with pytest.raises(ValueError, match="token_ids"):
        get_parser("hermes", tokenizer=BPE).parse(text + "x", TOOLS, token_ids=ids)
    with pytest.raises(ValueError, match="token_ids: the parser was made without a tokenizer"):
        get_parser("hermes").parse(text, TOOLS, token_ids=ids)
    with pytest.raises(TypeError, match="tokenizer"):
        get_parser("hermes", tokenizer=object())
    with pytest.raises(TypeError, match="text must be a str"):
        get_parser("hermes", tokenizer=BPE).parse(5, TOOLS, token_ids=ids)
    with pytest.raises(TypeError, match="text must be a str"):
        get_parser("hermes", tokenizer=BPE).stream().feed(None, ids)
    stream = get_parser("hermes", tokenizer=BPE).stream()
    stream.feed("a")
    with pytest.raises(ValueError, match="token_ids: given for this piece, missing for the first"):
        stream.feed(text, ids)


# -- misuse, and texts without calls


@pytest.mark.parametrize("name", list_parsers())
def test_bad_input_gets_a_result_or_names_the_argument(name):
    parser = get_parser(name, reasoning="auto")
    with pytest.raises(TypeError, match="text must be a str, not NoneType"):
        parser.parse(None)
    with pytest.raises(TypeError, match="text must be a str, not bytes"):
        parser.parse(b"")
    with pytest.raises(TypeError, match="text must be a str"):
        parser.stream().feed(None)
    with pytest.raises(TypeError, match="tools"):
        parser.parse("", "tools")
    with pytest.raises(TypeError, match="tools"):
        parser.parse("", [1])
    empty = parser.parse("")
    assert (empty.content, empty.reasoning, empty.attempts, empty.finish) == (None, None, (), Finish.STOP)
    call = parser.render(None, None, [{"function": {"name": "bash", "arguments": {"command": "ls"}}}])
    for text in ("\0", "\ud800\udc00 half \udfff", call.replace("ls", "\0\ud83c"), f"\0{call}"):
        parsed = parser.parse(text)
        json.dumps([parsed.content, *(attempt.to_openai() for attempt in parsed.attempts)]).encode()
        (parsed.content or "").encode()
    no_schemas = (
        {},
        {"name": 3},
        {"function": None},
        {"function": {"name": "bash", "parameters": [1]}},
        {"name": "bash", "parameters": {"properties": {"command": {"type": {"$ref": "#"}, "anyOf": 1}}}},
    )
    for schema in no_schemas:
        assert [c.arguments for c in parser.parse(call, [schema, *TOOLS]).tool_calls] == [{"command": "ls"}]


@pytest.mark.slow
def test_megabytes_of_openers_are_text():
    text = "<tool_call>" * (1_000_000 if ALL else 200_000)
    parsed = get_parser("hermes").parse(text)
    assert [attempt.status for attempt in parsed.attempts] == [CallStatus.INCOMPLETE]
    assert parsed.content == text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "gemma4"])
def test_floods_of_half_tags_are_text(name):
    for text in ("<|im_end|>" * 50_000 + "x", " " * 250_000 + "{" * 250_000, "\n" * 250_000 + "[" * 250_000):
        found = get_parser(name).parse(text)
        assert (found.content, found.attempts) == (text, ())


def test_blanks_that_come_one_by_one_wait_for_text():
    stream = get_parser("hermes").stream()
    events = [event for _ in range(300_000) for event in stream.feed(" ")]
    assert events == []
    assert stream.feed("x") == [ContentDelta(" " * 300_000 + "x")]


def test_reasoning_that_is_never_closed_is_searched_once():
    drafts = 3000
    found = get_parser("hermes", reasoning="auto").parse(f"<think>{CALL}" * drafts)
    assert [call.status for call in found.tool_calls] == [CallStatus.OK] * drafts
    assert not found.content


def test_the_wrapper_around_the_answer_is_markup_and_its_words_are_text():
    parser = get_parser("ernie45", reasoning="auto")
    for text, content in (
        ("<think>\na\n</think>\n\n<response>\nhi\n</response>\n", "hi"),
        (
            "<think>\na\n</think>\n\n<response>\na <response> b </response> c\n</response>",
            "a <response> b </response> c",
        ),
        ("Close `<response>` with `</response>`.", "Close `<response>` with `</response>`."),
    ):
        assert parser.parse(text).content == content
        stream = parser.stream()
        for character in text:
            stream.feed(character)
        assert stream.finish().content == content


def test_reasoning_that_keeps_its_markers_is_content():
    parser = get_parser("minimax_m2", reasoning="minimax_m2_append_think")
    found = parser.parse("<think>a</think>b")
    assert (found.content, found.reasoning) == ("<think>a</think>b", None)


def test_an_error_of_render_names_the_argument():
    hermes = get_parser("bare_json")
    for calls, reason in (
        ([{"function": {"arguments": {}}}], r"tool_calls\[0\] names no function"),
        ([{"function": {"name": "f", "arguments": "{"}}], r"tool_calls\[0\]\.function\.arguments is not JSON"),
        ([{"function": {"name": "f", "arguments": [1]}}], r"tool_calls\[0\]\.function\.arguments is not an object"),
        ([{"name": "f", "arguments": "[" * 100_000}], r"tool_calls\[0\]\.function\.arguments is not JSON"),
        ([{"name": "f", "arguments": '{"a": NaN}'}], r"tool_calls\[0\]\.function\.arguments is not JSON"),
        ([{"name": "f", "arguments": {"a": {1}}}], r"tool_calls\[0\]\.function\.arguments is not JSON"),
    ):
        with pytest.raises(ValueError, match=reason):
            hermes.render(None, None, calls)
    with pytest.raises(ValueError, match="reasoning: format 'bare_json' has none"):
        hermes.render("x", "y")
    for calls in (["f"], [None], [{"function": "f"}]):
        with pytest.raises(TypeError, match=r"tool_calls\[0\] must be"):
            hermes.render(None, None, calls)
    with pytest.raises(TypeError, match="content must be a str"):
        hermes.render(5)


def test_arguments_of_any_mapping_are_written_as_json_holds_them():
    arguments = MappingProxyType({5: (1, True)})
    assert get_parser("pythonic").render(tool_calls=[{"name": "f", "arguments": arguments}]) == "[f(5=[1, True])]"


def test_only_parsers_are_registered():
    with pytest.raises(TypeError, match="a Format or a name"):
        register_parser(5)
    with pytest.raises(TypeError, match="callable"):
        register_parser("no_parser")(5)
    with pytest.raises(UnknownParser):
        get_parser("no_parser")
    with pytest.raises(TypeError, match="reasoning must be a str"):
        get_parser("hermes", reasoning=[])


def test_a_finished_stream_takes_no_more():
    stream = get_parser("hermes").stream()
    assert stream.finish() is stream.finish()
    with pytest.raises(ValueError, match="the stream is finished"):
        stream.feed("a")
