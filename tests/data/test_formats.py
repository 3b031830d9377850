"""The formats of trajectory files: seeds, validators, conversions, and the libraries that read them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jinja2.sandbox import ImmutableSandboxedEnvironment
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from pydantic import TypeAdapter

from lachesis.cli import main
from lachesis_data.exports.chat_exports import openai_line, trl_line
from lachesis_data.exports.exports import export_group, load_export, write_export
from lachesis_data.exports.parquet import ParquetWriter, parquet_row, read_rows
from lachesis_data.files.entry_files import convert_entries, digest, read_entries
from lachesis_data.files.formats import CONVERTIBLE, UnknownFormat, converter, dataset_features, format_of, read_chat
from lachesis_data.files.validation import VALIDATORS, validate_entry
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import NotJson, load_json, think_block, write_json
from lachesis_messages.records.dataset_entries import to_batch_entry, to_dataset_entry
from lachesis_messages.records.entries import to_trajectory_entry
from lachesis_messages.records.export_lines import Chat, ExportTotals, Unsuitable
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_testing.export_suite import example_groups
from tests.support.conversation_strategies import conversations, hostile_text
from tests.support.pictures import image, text
from tests.support.token_trees import UNTIMED

DATA = Path(__file__).parents[1] / "support" / "entries"
ANSWERED = "<tool_response>\na\n</tool_response>"
FORMATS = ("hermes", "batch", "sharegpt-tools", "openai", "trl", "dpo")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": parameters}}


def call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TERMINAL = tool("terminal", command={"type": "string"})
SEARCH = tool("web_search", query={"type": ["string", "null"], "default": 3}, sites={"type": "array", "items": {}})
SHELL: list[dict[str, Any]] = [
    {"role": "user", "content": "Which files are there?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "List them.",
        "tool_calls": [call("terminal", '{"command": "ls"}')],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"output": "a\\u0000b", "exit_code": 0}'},
    {"role": "assistant", "content": "One.", "reasoning": "Clear."},
]
LOOKED_UP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "", "tool_calls": [call("web_search", '{"query": "author", "sites": []}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "[1, 2"},
    {"role": "assistant", "content": "Nobody knows."},
]
DOTTED: list[dict[str, Any]] = [
    {"role": "user", "content": "What does it say?"},
    {"role": "assistant", "content": "", "tool_calls": [call("files.read", '{"path": "a.txt"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Hello."},
    {"role": "assistant", "content": "Hello."},
]
PLAIN: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]

SEEN: list[dict[str, Any]] = [
    {"role": "user", "content": [image(2, 2), text("What is this?")]},
    {"role": "assistant", "content": "A square."},
]


def group(number: int, messages: Sequence[Any], tools: list[Any], rewards: Sequence[float | None] = (1.0, 0.0)) -> Any:
    """A group of `process` whose rollouts end with different words."""
    (example, *_) = example_groups()
    last = messages[-1]
    played = [[*messages[:-1], {**last, "content": f"{last['content']} {index}"}] for index in range(len(rewards))]
    turns = [[None if each["role"] != "assistant" else place for place, each in enumerate(messages)]] * len(rewards)
    scored = [place for place, reward in enumerate(rewards) if reward is not None]
    rollouts = [
        {
            **example["rollouts"][0],
            "rollout_id": f"r-{number}-{index}",
            "index": index,
            "reward": reward,
            "place": scored.index(index) if reward is not None else None,
            "messages": played[index],
            "message_turns": turns[index],
            "tool_stats": {},
        }
        for index, reward in enumerate(rewards)
    ]
    return {
        **example,
        "item_key": f"{number}-1",
        "tools": tools,
        "scores": [reward for reward in rewards if reward is not None],
        "messages": [played[place] for place in scored],
        "samples": [],
        "rollouts": rollouts,
    }


ALL: dict[str, dict[str, Any]] = {"batch": {"keep_without_reasoning": True}}
"""Options with which an export leaves out nothing for what it says."""


def exported(name: str, groups: Sequence[Any], path: Path, **options: Any) -> Path:
    write_export(load_export(name, {**ALL.get(name, {}), **options}), groups, path)
    return path


def lines_of(name: str, groups: Sequence[Any], **options: Any) -> list[Any]:
    export = load_export(name, {**ALL.get(name, {}), **options})
    return [line.content for each in groups for line in export_group(export, each, ExportTotals())]


# The examples of the specification.


def test_the_documented_files_are_reproduced_byte_for_byte_by_a_conversion_there_and_back() -> None:
    for name, form in (("trajectory_entry", "hermes"), ("dataset_entry", "sharegpt-tools")):
        entry = json.loads((DATA / f"{name}.json").read_text())
        if form == "sharegpt-tools":  # its definition is shortened to {...} in the documentation
            entry["tools"] = json.dumps([tool("web_search", query={"type": "string"})])
        assert validate_entry(entry) == []
        assert format_of(entry) == form
        as_messages = converter("openai", {"reasoning": "think"}).convert(entry, set())
        assert validate_entry(as_messages, "openai") == []
        for through in ("parquet", "trl"):
            between = converter(through).convert(entry, set())
            assert validate_entry(between, through) == []
            options = {"timestamp": entry["timestamp"], "model": entry["model"]} if form == "hermes" else {}
            back = converter(form, options)
            assert json.dumps(back.convert(between, set())) == json.dumps(entry)


def test_the_documented_messages_are_an_openai_line_byte_for_byte() -> None:
    text = (
        '{"messages": [{"role": "system", "content": "You are a helpful assistant with tools..."}, '
        '{"role": "user", "content": "Search for Python tutorials"}, '
        '{"role": "assistant", "content": null, "tool_calls": [{"id": "call_abc123", "type": "function", '
        '"function": {"name": "web_search", "arguments": "{\\"query\\": \\"Python tutorials\\"}"}}]}, '
        '{"role": "tool", "tool_call_id": "call_abc123", "content": "{\\"results\\": [...]}"}, '
        '{"role": "assistant", "content": "Here\'s what I found..."}]}'
    )
    messages = json.loads(text)["messages"]
    assert json.dumps(openai_line(Chat(messages, []))) == text
    with_reasoning = [*messages[:-1], {**messages[-1], "reasoning": "Let me think about this step by step..."}]
    assert json.dumps(openai_line(chat := Chat(with_reasoning, []))) == text
    assert chat.warnings == {"reasoning_dropped"}


def test_the_documented_batch_entry_has_its_keys_in_their_order_and_is_valid() -> None:
    stats = {
        "terminal": {"count": 3, "success": 3, "failure": 0},
        "read_file": {"count": 2, "success": 2, "failure": 0},
    }
    entry, _ = to_batch_entry(
        SHELL,
        [TERMINAL],
        prompt_index=42,
        metadata={"prompt_source": "gsm8k", "difficulty": "hard"},
        completed=True,
        partial=False,
        api_calls=7,
        toolsets_used=["code_tools", "file_tools"],
        tool_stats=stats,
        all_tools=["terminal", "read_file", "write_file"],
    )
    documented = (
        '{"prompt_index": 42, "conversations": [...], '
        '"metadata": {"prompt_source": "gsm8k", "difficulty": "hard"}, "completed": true, "partial": false, '
        '"api_calls": 7, "toolsets_used": ["code_tools", "file_tools"], '
        '"tool_stats": {"terminal": {"count": 3, "success": 3, "failure": 0}, '
        '"read_file": {"count": 2, "success": 2, "failure": 0}, '
        '"write_file": {"count": 0, "success": 0, "failure": 0}}, '
        '"tool_error_counts": {"terminal": 0, "read_file": 0, "write_file": 0}}'
    )
    assert json.dumps({**entry, "conversations": [...]}, default=lambda _: 0).replace("[0]", "[...]") == documented
    assert validate_entry(entry, "batch") == []


# Validators.


@pytest.mark.parametrize(
    ("format", "broken", "problem"),
    [
        ("hermes", {"completed": "yes"}, "completed is str, not bool"),
        ("hermes", {"model": None}, "model is NoneType"),
        ("hermes", {"conversations": [{"from": "human", "value": "a"}]}, "it has no gpt turn"),
        ("hermes", {"conversations": [{"from": "gpt", "value": "a"}]}, "turn 0: a gpt turn begins with a think block"),
        ("hermes", {"conversations": [{"from": "bot", "value": "a"}]}, "unknown turn 'bot'"),
        ("hermes", {"conversations": [{"from": "gpt", "value": 3}]}, "without a text value"),
        ("hermes", {"conversations": [{"role": "user", "content": "a"}]}, "its keys are 'role', 'content'"),
        ("hermes", {"conversations": [{"from": "tool", "value": ANSWERED}]}, "no gpt turn before"),
        ("sharegpt-tools", {"tools": []}, "tools is not JSON text"),
        ("sharegpt-tools", {"tools": '[{"name": "a"}]'}, "tools[0] is not a function"),
        ("batch", {"prompt_index": True}, "prompt_index is bool, not int"),
        ("batch", {"tool_stats": {"a": {"count": 2, "success": 1, "failure": 0}}}, "count is not success plus failure"),
        ("batch", {"tool_error_counts": {"other": 0}}, "name different tools"),
        ("openai", {"messages": SHELL}, "OpenAI knows no key 'reasoning'"),
        ("openai", {"messages": PLAIN[:1]}, "does not end with an assistant message"),
        ("openai", {"messages": [*LOOKED_UP[:3], LOOKED_UP[4]]}, "no result for 'call_1'"),
        ("openai", {"messages": [PLAIN[0], {**PLAIN[1], "weight": 2}]}, "weight is 2"),
        ("openai", {"messages": [PLAIN[0], {**PLAIN[1], "tool_calls": [call("a", "{")]}]}, "not the text of a JSON"),
        ("openai", {"tools": [tool("no spaces")]}, "no tool called 'no spaces'"),
        ("openai", {"messages": [*SHELL[:1], *DOTTED[1:]]}, "no tool called 'files.read'"),
        ("trl", {"tools": json.dumps([tool("")])}, "tools[0] is not a function with a name"),
        ("trl", {"messages": [3]}, "messages[0] is int"),
        ("dpo", {"chosen": []}, "chosen is not a list of messages"),
        ("dpo", {"score_chosen": "high"}, "score_chosen is str"),
        ("atif", {"steps": [{"step_id": 2, "source": "user", "message": ""}]}, "step 1 has the step_id 2"),
        ("samples", {"tokens": None}, "the sample tokens is"),
        ("parquet", {"tools": "["}, "tools is not JSON text"),
    ],
)  # fmt: skip
def test_a_validator_names_what_is_broken(format: str, broken: dict[str, Any], problem: str) -> None:
    groups = example_groups() if format == "samples" else [group(0, SHELL, [TERMINAL])]
    good = lines_of(format, groups)[0]
    assert validate_entry(good, format) == []
    problems = validate_entry({**good, **broken}, format)
    assert any(problem in each for each in problems), problems


@pytest.mark.parametrize("name", VALIDATORS)
def test_every_export_is_valid_and_recognised(name: str, tmp_path: Path) -> None:
    groups = [*example_groups(), group(7, SHELL, [TERMINAL]), group(8, LOOKED_UP, [SEARCH, TERMINAL])]
    path = exported(name, groups, tmp_path / "out")
    written = list(read_rows(path)) if name == "parquet" else list(read_lines(path))
    assert len(written) >= 2
    for entry in written:
        assert (validate_entry(entry, name), format_of(entry)) == ([], name)
        assert validate_entry(entry) == []


def test_an_entry_without_its_images_is_valid_and_stays_known_as_such() -> None:
    groups = [group(0, SEEN, [])]
    for name in ("hermes", "batch", "sharegpt-tools"):
        for entry in lines_of(name, groups):
            assert entry["parts_omitted"] == 1 and validate_entry(entry, name) == []
            assert {converter(to).convert(entry, set())["parts_omitted"] for to in ("hermes", "sharegpt-tools")} == {1}


def test_a_think_block_that_is_not_closed_is_a_problem() -> None:
    entry, _ = to_trajectory_entry(PLAIN, model="m", completed=False)
    entry["conversations"][-1]["value"] = "<think>\n</think>\n<think>cut"
    assert validate_entry(entry) == ["turn 2: a think block is not closed"]


@pytest.mark.parametrize("entry", [[], 3, None, {}, {"a": 1}, example_groups()[0]])
def test_what_is_no_entry_is_said_to_be_none(entry: Any) -> None:
    assert "matches no known format" in validate_entry(entry)[0]
    with pytest.raises(Unsuitable, match=r"no known format|a group of a run, which `lachesis export` converts"):
        converter("openai").convert(entry, set())
    with pytest.raises(UnknownFormat, match="there is no format 'harmes'"):
        validate_entry(entry, "harmes")


@pytest.mark.parametrize("junk", [None, 3, "x", [], [None], {"from": 3}, {"role": []}, [{"from": "gpt"}], {"name": {}}])
@pytest.mark.parametrize("name", VALIDATORS)
def test_no_content_breaks_a_validator_or_a_conversion(name: str, junk: Any) -> None:
    groups = example_groups() if name == "samples" else [group(0, LOOKED_UP, [SEARCH])]
    good = lines_of(name, groups)[0]
    for key in good:
        nested = good[key]
        for broken in (junk, [junk], [*nested, junk] if isinstance(nested, list) else {"x": junk}):
            entry = {**good, key: broken}
            assert all(isinstance(problem, str) for problem in validate_entry(entry, name))
            with suppress(Unsuitable, MessageError):
                converter("hermes").convert(entry, set())


# What a line holds.


def test_preference_pairs_are_the_best_and_the_worst_of_a_group_and_say_by_which_rule() -> None:
    (pair,) = lines_of("dpo", [group(0, SHELL, [TERMINAL], rewards=(0.5, None, 0.0, 1.0, 0.0))])
    assert (pair["chosen_id"], pair["rejected_id"]) == ("r-0-3", "r-0-2")
    assert (pair["score_chosen"], pair["score_rejected"]) == (1.0, 0.0)
    assert pair["rule"] == "highest and lowest reward of the group; of equal ones the first"
    assert [message["content"] for message in pair["prompt"]] == ["Which files are there?"]
    assert (pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) == ("One. 3", "One. 2")
    assert pair["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    assert lines_of("dpo", [group(0, SHELL, [], rewards=(1.0, 0.75))], margin=0.25) == []
    assert lines_of("dpo", [group(0, SHELL, [], rewards=(None, 1.0))]) == []


def test_an_answer_that_the_model_did_not_sample_has_the_weight_0() -> None:
    shown = group(0, [*PLAIN, *SHELL], [TERMINAL])
    for rollout in shown["rollouts"]:
        rollout["message_turns"] = [None, None, None, 0, None, 1]
    (line, _) = lines_of("openai", [shown])
    assert [message.get("weight") for message in line["messages"]] == [None, 0, None, None, None, None]
    (line, _) = lines_of("trl", [shown], columns="prompt-completion")
    assert [message.get("weight") for message in line["prompt"]] == [None, 0, None]
    assert [message.get("weight") for message in line["completion"]] == [1, None, 1]
    (pair,) = lines_of("dpo", [shown])
    assert [message["role"] for message in pair["prompt"]] == ["user", "assistant", "user"]


def test_a_format_that_cannot_mark_an_answer_the_model_did_not_sample_says_so() -> None:
    shown = group(0, [*PLAIN, *SHELL], [TERMINAL], rewards=(1.0, 0.0))
    for rollout in shown["rollouts"]:
        rollout["message_turns"] = [None, None, None, 0, None, 1]
        rollout["discarded"] = [{"reason": "compaction", "at": 1, "attempt": False, "edit": True, "messages": []}]

    def warnings(name: str, **options: Any) -> set[str]:
        list(export_group(load_export(name, options), shown, totals := ExportTotals()))
        return set(totals.warnings)

    for name in ("hermes", "sharegpt-tools", "trl"):
        assert warnings(name) >= {"answers_not_sampled", "branches_omitted"}, name
    for name, options in (("openai", {}), ("parquet", {}), ("dpo", {}), ("trl", {"columns": "prompt-completion"})):
        assert "answers_not_sampled" not in warnings(name, **options), name
        assert "branches_omitted" in warnings(name, **options), name
    (row, _) = lines_of("parquet", [shown])
    back = converter("openai").convert(row, set())
    assert [message.get("weight") for message in back["messages"]] == [None, 0, None, None, None, None]
    for to in ("hermes", "sharegpt-tools", "trl"):
        converter(to).convert(row, found := set[str]())
        assert "answers_not_sampled" in found
    for rollout in shown["rollouts"]:
        rollout["message_turns"] = [None] * 6
    for name in ("openai", "trl", "dpo"):
        assert lines_of(name, [shown]) == []
    assert validate_entry({**back, "messages": [PLAIN[0], {**PLAIN[1], "weight": 0}]}, "openai") != []


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("atif", {"steps": [{"step_id": 1, "source": "agent", "message": "", "tool_calls": 3}]}),
        ("atif", {"steps": [{"step_id": 1, "source": "agent", "message": "", "observation": {"results": ["x"]}}]}),
        ("parquet", {"messages": [{"content": "a"}]}),
        ("parquet", {"messages": [{"role": "user", "content": 3}]}),
        ("parquet", {"messages": [{"role": "assistant", "content": "", "tool_calls": 3}]}),
        ("sharegpt-tools", {"conversations": [{"from": "human", "value": "a"}]}),
        ("hermes", {"conversations": [{"from": "human", "value": "a"}], "timestamp": {}}),
        ("dpo", {"prompt": [3]}),
    ],
)
def test_a_part_of_another_type_is_a_problem_of_its_entry(name: str, broken: dict[str, Any]) -> None:
    entry = {**lines_of(name, [group(0, SHELL, [TERMINAL])])[0], **broken}
    assert validate_entry(entry, name)
    for to in ("hermes", "sharegpt-tools", "openai", "trl"):
        with pytest.raises((Unsuitable, MessageError)):
            converter(to).convert(entry, set())
    if name in ("dpo", "parquet"):
        with suppress(Unsuitable):
            digest(entry, "conversation")


@pytest.mark.parametrize("of", [{"prompt_index": 0}, {"evaluation": True}])
def test_the_samples_of_a_prompt_are_one_group_of_pairs(of: dict[str, Any], tmp_path: Path) -> None:
    (example,) = [group(0, SHELL, [TERMINAL], rewards=(1.0,))]
    scores = {"a-1": 0.5, "b-1": 0.0, "a-1+2": 1.0, "b-1+1": None, "a-1+1": 0.0, "b-1+2": 1.0, "a-2": 0.25}
    with JsonlWriter(tmp_path / "groups.jsonl") as writer:
        for key, reward in scores.items():
            (rollout,) = example["rollouts"]
            (messages,) = example["messages"]
            own = [*messages[:-1], {**messages[-1], "content": key}]
            unscored = {"reward": None, "place": None, "messages": own}
            played = {
                **rollout,
                "rollout_id": key,
                "reward": reward,
                "place": 0,
                **(unscored if reward is None else {}),
            }
            scored = {"scores": [] if reward is None else [reward], "messages": [] if reward is None else [own]}
            writer.write({**example, **scored, "item_key": key, **of, "rollouts": [played]})
    out = tmp_path / "dpo.jsonl"
    assert main(["export", str(tmp_path / "groups.jsonl"), "--format", "dpo", "--out", str(out)]) == 0
    pairs = {pair["chosen_id"]: pair for pair in read_lines(out)}
    assert {chosen: pair["rejected_id"] for chosen, pair in pairs.items()} == {"a-1+2": "a-1+1", "b-1+2": "b-1"}
    for pair in pairs.values():
        assert (pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) == (
            pair["chosen_id"],
            pair["rejected_id"],
        )


def test_text_that_no_file_can_hold_is_replaced_and_counted() -> None:
    odd = [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": "b", "reasoning": "\udc00"}]
    for line in (openai_line, trl_line):
        json.dumps(line(chat := Chat(odd, [])), ensure_ascii=False).encode()
        assert "character_replaced" in chat.warnings
    escaped = [PLAIN[0], {"role": "assistant", "content": "", "tool_calls": [call("a", '{"x": "\\ud83d"}')]},
               {"role": "tool", "tool_call_id": "call_1", "content": ""}, PLAIN[1]]  # fmt: skip
    json.dumps(trl_line(Chat(escaped, [])), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", [name for name in VALIDATORS if name != "samples"])
def test_a_tool_has_any_name_but_at_openai(name: str) -> None:
    named = group(0, DOTTED, [tool("files.read", path={"type": "string"})])
    lines = list(export_group(load_export(name, ALL.get(name)), named, totals := ExportTotals()))
    assert [validate_entry(line.content, name) for line in lines] == [[]] * len(lines)
    reasons = {"OpenAI takes names of tools of 1 to 64 letters, digits, _ and - only": 2} if name == "openai" else {}
    assert (bool(lines), totals.left_out) == (name != "openai", reasons)


def test_tools_that_are_bare_functions_are_read() -> None:
    entry, _ = to_dataset_entry(SHELL, [TERMINAL])
    bare = {**entry, "tools": json.dumps([TERMINAL["function"]])}
    for to in ("openai", "trl", "sharegpt-tools"):
        assert converter(to).convert(bare, set()) == converter(to).convert(entry, set())


def test_a_conversion_leaves_out_what_its_options_do_not_want() -> None:
    (row, other) = lines_of("parquet", [group(0, SHELL, [TERMINAL], (1.0, 0.25))])
    wanting = converter("trl", {"min_reward": 0.5, "completed_only": True})
    assert wanting.convert(row, set())["messages"]
    with pytest.raises(Unsuitable, match=r"reward below 0\.5"):
        wanting.convert(other, set())
    with pytest.raises(Unsuitable, match="not completed"):
        wanting.convert({**row, "completed": False}, set())
    assert converter("trl").convert({**row, "completed": False}, set())["messages"]


def test_a_system_message_that_gives_way_to_the_generated_one_is_counted() -> None:
    line = openai_line(Chat(LOOKED_UP, [SEARCH]))
    warnings: set[str] = set()
    entry = converter("hermes").convert(line, warnings)
    assert warnings == {"system_replaced"}
    assert entry["conversations"][0]["value"].startswith("You are a function calling AI model.")
    warnings.clear()
    kept = converter("hermes", {"system": "actual"}).convert(line, warnings)
    assert (kept["conversations"][0]["value"], warnings) == ("Be brief.", set())


@pytest.mark.parametrize("through", CONVERTIBLE)
@pytest.mark.parametrize("messages", [SHELL, LOOKED_UP, PLAIN])
def test_a_conversation_survives_each_format(messages: list[Any], through: str) -> None:
    start, _ = to_dataset_entry(messages, [TERMINAL, SEARCH])
    options = {"openai": {"reasoning": "think"}, "hermes": {"system": "actual"}}.get(through, {})
    between = converter(through, options).convert(start, set())
    if through == "hermes":  # without its generated prompt it has no tools
        start, _ = to_dataset_entry(messages, [])
    assert converter("sharegpt-tools").convert(between, set()) == start


def told(messages: Sequence[Any]) -> list[Any]:
    """What a conversation holds in any format: roles, texts, calls with arguments, and the call of each result."""
    calls: dict[str, int] = {}
    found = []
    for message in messages:
        text, thought = message.get("content") or "", message.get("reasoning") or ""
        if message["role"] == "tool":
            with suppress(NotJson):  # its spacing is not kept
                text = write_json(load_json(text, unique_keys=True)) if text.startswith(("{", "[")) else text
            found.append(["tool", calls[message["tool_call_id"]], text])
            continue
        asked = [(each["id"], each["function"]) for each in message.get("tool_calls") or ()]
        calls |= {call_id: len(calls) + place for place, (call_id, _) in enumerate(asked)}
        if message["role"] == "assistant":
            text = ((think_block(thought) if thought.strip() else "") + text).strip()
        given = [(function["name"], json.loads(function["arguments"])) for _, function in asked]
        found.append([message["role"], text, given])
    return found


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("hermes", {"system": "actual"}),
    ("sharegpt-tools", {}),
    ("openai", {"reasoning": "think"}),
    ("trl", {}),
    ("trl", {"arguments": "text", "reasoning": "thinking"}),
    ("trl", {"columns": "prompt-completion", "reasoning": "think"}),
    ("parquet", {}),
]
untagged = hostile_text.filter(lambda text: not re.search("</?(think|REASONING_SCRATCHPAD)>", text))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
@UNTIMED
@given(messages=conversations(text=untagged))
def test_no_message_call_or_result_is_lost_on_the_way_through_a_format(
    name: str, options: dict[str, Any], messages: list[Any]
) -> None:
    start = parquet_row(Chat(messages, [TERMINAL, SEARCH]))
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source.parquet", Path(folder) / f"out{'.parquet' if name == 'parquet' else ''}"
        with ParquetWriter(source) as writer:
            writer.write(start)
        totals = convert_entries(read_entries([source]), out, converter(name, options))
        (line,) = read_entries([out])
    assert totals.warnings.keys() <= {"text_escaped"}
    assert validate_entry(line.entry) == [] and format_of(line.entry) == name
    chat = read_chat(line.entry)
    assert told(chat.messages) == told(messages)
    if name != "hermes":  # without the generated prompt it has no place for tools
        assert chat.tools == [TERMINAL, SEARCH]


# The libraries that load them.


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()

    def loaded(paths: Sequence[Path], kind: str = "json", **more: Any) -> list[Any]:
        files = list(map(str, paths))
        found = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(tmp_path / "cache"), **more)
        return list(found)

    return loaded


OF_DIFFERENT_TOOLSETS = (
    group(0, PLAIN, [], (1.0, 0.5)),
    group(1, SHELL, [TERMINAL]),
    group(2, LOOKED_UP, [SEARCH, TERMINAL]),
)


def files_of_different_toolsets(name: str, folder: Path, **options: Any) -> list[Path]:
    groups = enumerate(OF_DIFFERENT_TOOLSETS)
    return [exported(name, [each], folder / f"{number}.{name}", **options) for number, each in groups]


@pytest.mark.parametrize("name", ["hermes", "sharegpt-tools", "trl"])
@pytest.mark.parametrize("backwards", [False, True])
def test_files_of_different_toolsets_load_together_in_any_order(
    name: str, backwards: bool, load: Any, tmp_path: Path
) -> None:
    paths = files_of_different_toolsets(name, tmp_path)[:: -1 if backwards else 1]
    written = [line for path in paths for line in read_lines(path)]
    assert load(paths) == written
    empty = {} if name == "trl" else {"parts_omitted": None}
    assert load(paths, features=dataset_features(name)) == [{**line, **empty} for line in written]


@pytest.mark.parametrize("name", FORMATS)
def test_with_the_features_of_a_format_its_files_load_together_whatever_they_hold(
    name: str, load: Any, tmp_path: Path
) -> None:
    paths = files_of_different_toolsets(name, tmp_path)
    if name in ("hermes", "batch"):  # a file without a single reward, first
        paths = [exported(name, [group(3, PLAIN, [], (None, None))], tmp_path / "unscored"), *paths]
    if name in ("hermes", "batch", "sharegpt-tools"):
        paths.append(exported(name, [group(4, SEEN, [])], tmp_path / "seen"))
    written = [line for path in paths for line in read_lines(path)]
    if name in ("hermes", "batch", "sharegpt-tools"):
        for line in written:
            line.setdefault("parts_omitted", None)
    if name == "openai":
        for line in written:
            line.setdefault("tools", None)
    if name == "batch":  # as a batch run with an environment writes them
        paths.append(tmp_path / "scored")
        written.append({**written[-1], "metadata": {"level": 2, "note": [1]}, "reward": 0.5})
        JsonlWriter(paths[-1]).write(written[-1])
        for line in written:
            line.setdefault("reward", None)
    for files in (paths, paths[::-1]):
        found = load(files, features=dataset_features(name))
        in_order = partial(sorted, key=partial(json.dumps, sort_keys=True))
        assert in_order(found) == in_order(written)


def test_parquet_files_of_different_toolsets_load_together(load: Any, tmp_path: Path) -> None:
    paths = files_of_different_toolsets("parquet", tmp_path)
    rows = [row for path in paths for row in read_rows(path)]
    loaded = load(paths, "parquet")
    for row in loaded:
        for message in row["messages"]:
            for key in [key for key, value in message.items() if value is None and key != "content"]:
                del message[key]
    assert loaded == rows
    assert rows[2]["messages"][1]["tool_calls"][0]["function"] == {"name": "terminal", "arguments": '{"command": "ls"}'}


def test_openai_reads_every_line_with_its_own_types() -> None:
    messages = TypeAdapter(list[ChatCompletionMessageParam])
    tools = TypeAdapter(list[ChatCompletionFunctionToolParam])
    for options in ({}, {"reasoning": "think"}):
        for line in lines_of("openai", OF_DIFFERENT_TOOLSETS, **options):
            messages.validate_python(line["messages"])
            tools.validate_python(line.get("tools", []))


def templates() -> dict[str, str]:
    """Chat templates that come with TRL, by name."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    found = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text("utf-8") for path in found}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_8", "glm4moe", "llama3_1", "gptoss", "deepseekv3"])
def test_templates_of_trl_write_every_part_of_its_columns(name: str, load: Any, tmp_path: Path) -> None:
    known = templates()
    if name not in known:
        pytest.skip("trl is not installed")
    options = {"deepseekv3": {"arguments": "text"}, "gptoss": {"reasoning": "thinking"}}.get(name, {})
    dotted = exported(
        "trl", [group(3, DOTTED, [tool("files.read", path={"type": "string"})])], tmp_path / "3", **options
    )
    loaded = load([*files_of_different_toolsets("trl", tmp_path, **options), dotted])
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)

    def stop(message: str) -> None:
        raise AssertionError(message)

    environment.globals.update(raise_exception=stop, strftime_now=lambda form: "today")
    template = environment.from_string(re.sub(r"{%-? *(end)?generation *-?%}", "", known[name]))
    for line in loaded:
        text = template.render(
            messages=line["messages"], tools=json.loads(line["tools"]) or None, bos_token="", eos_token=""
        )
        for message in line["messages"]:
            assert message["role"] == "tool" or message["content"] in text
        for message in line["messages"]:
            for each in message.get("tool_calls") or ():
                arguments = each["function"]["arguments"]
                values = json.loads(arguments) if isinstance(arguments, str) else arguments
                assert each["function"]["name"] in text
                assert all(str(value) in text for value in values.values() if isinstance(value, str))
                assert '\\"' not in text.partition(each["function"]["name"])[2][:60], "arguments encoded twice"
