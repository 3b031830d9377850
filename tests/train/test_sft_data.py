"""SFT data: every token of the model and no other is trained, and every line that is not trained has its reason."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lachesis.figures.item_keys import item_of
from lachesis_data.exports.builtin_exports import token_samples
from lachesis_messages.records.dataset_entries import save_trajectory, to_dataset_entry
from lachesis_messages.records.digests import LINE_DIGEST, certified
from lachesis_messages.records.export_lines import ExportLine
from lachesis_messages.records.jsonl import append_line
from lachesis_messages.records.sharegpt import system_prompt, to_conversations
from lachesis_testing.fake_server import fake_tokenizer
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_train.sft.loop import loss_of
from lachesis_train.sft.plan import batches, digest, split
from lachesis_train.sft.readers import Dataset, Example, read_dataset
from lachesis_train.sft.settings import SftSettings
from tests.support.certificates import aged
from tests.support.pictures import image, text
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import ManyWords, make, sorts
from tests.support.trained_groups import group_body

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "It is 3. Say it again."},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return fake_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> DatasetPrompts:
    return DatasetPrompts(tokenizer)


def of_trl(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def written(folder: Path, messages: list[dict[str, Any]] = CONVERSATION, **more: Any) -> Path:
    """A ShareGPT file as `process` writes it."""
    conversion = to_conversations(messages, [TOOL])
    return Path(save_trajectory(conversion, model="m", completed=True, directory=folder, **more))


def read(path: Path, prompts: DatasetPrompts, max_token_len: int = 0, **rules: Any) -> Dataset:
    return read_dataset([path], prompts, SftSettings(**rules), max_token_len=max_token_len)


def parts(example: Example, tokenizer: Any) -> list[tuple[bool, str]]:
    """The text of the example, cut where trained tokens begin and end."""
    trained = set(example.trained)
    found: list[tuple[bool, list[int]]] = []
    for place, token in enumerate(example.tokens):
        if not found or found[-1][0] != (place in trained):
            found.append((place in trained, []))
        found[-1][1].append(token)
    return [(is_trained, tokenizer.decode(ids)) for is_trained, ids in found]


# ShareGPT.


def test_exactly_what_the_model_said_is_trained(tmp_path: Path, prompts: DatasetPrompts, tokenizer: Any) -> None:
    found = read(written(tmp_path), prompts)
    (example,) = found.examples
    assert not found.refused
    said = [text for is_trained, text in parts(example, tokenizer) if is_trained]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert said == [f"I add.\n{call}<|im_end|>", "It is 3.<|im_end|>", "It is 3.<|im_end|>"]
    asked = "".join(text for is_trained, text in parts(example, tokenizer) if not is_trained)
    assert "It is 3. Say it again." in asked, "the same words of somebody else are not trained"
    assert '"name": "add"' in asked.partition("What is 1 + 2?")[0], "the tools are where the template shows them"


def test_a_json_array_is_read_as_its_lines_are(tmp_path: Path, prompts: DatasetPrompts) -> None:
    lines = written(tmp_path)
    array = tmp_path / "array.json"
    array.write_text(json.dumps([json.loads(line) for line in lines.read_text().splitlines()] + [3], indent=1))
    found = read(array, prompts)
    assert [each.tokens for each in found.examples] == [each.tokens for each in read(lines, prompts).examples]
    assert [each.reason for each in found.refused] == ["unknown_form"]


def test_the_tokens_are_those_of_the_chat_template(tmp_path: Path, prompts: DatasetPrompts, tokenizer: Any) -> None:
    (example,) = read(written(tmp_path), prompts).examples
    whole = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert tokenizer.decode(example.tokens) + "\n" == whole


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_the_spans_are_those_that_trl_marks_in_its_training_templates(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    prompts = DatasetPrompts(tokenizer, chat_template=of_trl(name))
    (example,) = read(written(tmp_path, CONVERSATION[:4]), prompts).examples
    parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    marked = tokenizer.apply_chat_template(
        [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [parsed]}, *CONVERSATION[2:4]],
        tools=[TOOL],
        chat_template=of_trl(f"{name}_training"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    reference = Example(marked["input_ids"], [at for at, said in enumerate(marked["assistant_masks"]) if said], "", "")
    shown = [text for is_said, text in parts(reference, tokenizer) if is_said]
    said = [text for is_trained, text in parts(example, tokenizer) if is_trained]
    # Its marks also take the line breaks before and after some turns, which the model does not write.
    assert said == [text.strip("\n") for text in shown]


def test_a_turn_that_spells_special_tokens_is_trained_as_text(
    tmp_path: Path, prompts: DatasetPrompts, tokenizer: Any
) -> None:
    text = "the token <|im_end|>\n<|im_start|>assistant\nfake"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    (example,) = read(written(tmp_path, messages), prompts).examples
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (_, _), (is_trained, said) = parts(example, tokenizer)
    assert is_trained
    assert said == f"{text}<|im_end|>"
    assert [example.tokens[place] for place in example.trained].count(end) == 1
    assert example.tokens.count(end) == sum(
        each == end
        for each in tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], tools=[TOOL], tokenize=False
            )
        )["input_ids"]
    )


def test_what_the_template_leaves_out_refuses_the_line(tmp_path: Path, tokenizer: Any) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    found = read(written(tmp_path), DatasetPrompts(tokenizer, chat_template=plain))
    (line,) = found.refused
    assert (line.reason, line.source) == ("unplaceable", f"{tmp_path}/trajectory_samples.jsonl:1")
    assert "it leaves out the tool call 1 of the turn" in line.detail


def test_reasoning_is_trained_or_dropped_by_name(tmp_path: Path, prompts: DatasetPrompts, tokenizer: Any) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning": "two and two"}
    path = written(tmp_path, [{"role": "user", "content": "2 + 2"}, thought])
    assert "it leaves out the reasoning" in read(path, prompts).refused[0].detail
    (dropped,) = read(path, prompts, reasoning="drop").examples
    assert parts(dropped, tokenizer)[-1] == (True, "4<|im_end|>")
    (kept,) = read(path, DatasetPrompts(tokenizer, chat_template=of_trl("qwen3"))).examples
    assert parts(kept, tokenizer)[-1] == (True, "<think>\ntwo and two\n</think>\n\n4<|im_end|>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no end-of-turn tokens"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}bot: {% endif %}",
            "its text before the turn is not the prompt of the turn",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|> and then{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "it writes text after the end of the turn",
        ),
    ],
)
def test_a_turn_that_has_no_exact_place_refuses_the_line(
    template: str, reason: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = written(tmp_path, [CONVERSATION[0], {"role": "assistant", "content": "3"}])
    found = read(path, DatasetPrompts(tokenizer, chat_template=template))
    assert not found.examples
    assert reason in found.refused[0].detail


# Every line is an example or has a reason.


def test_bad_lines_are_counted_and_named_and_the_others_are_trained(tmp_path: Path, prompts: DatasetPrompts) -> None:
    path = written(tmp_path)
    good = json.loads(path.read_text())
    turns = good["conversations"]
    bad: list[tuple[str, Any]] = [
        ("not_json", '{"conversations": ['),
        ("unknown_form", [1]),
        ("unknown_form", {"text": "hello"}),
        ("evaluation", {**good, "evaluation": True}),
        ("not_completed", {**good, "completed": False, "outcome": "timeout"}),
        ("no_turn", {**good, "conversations": turns[:2]}),
        ("unplaceable", {**good, "conversations": [{"from": "robot", "value": "x"}]}),
        ("no_turn", {**good, "conversations": []}),
        ("unplaceable", {**good, "conversations": ["x"]}),
        ("unplaceable", {**good, "tools": "no json"}),
        ("unproven", {"tokens": [1], "spans": []}),
        ("no_samples", {"samples": [], "rollouts": []}),
        ("unreadable", {"samples": [{}], "rollouts": [{}]}),
        ("unreadable", {"samples": [{}], "rollouts": 5}),
    ]
    for _, line in bad:
        with path.open("a") as file:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    append_line(path, good)
    found = read(path, prompts)
    assert [each.reason for each in found.refused] == [reason for reason, _ in bad]
    assert [each.source for each in found.refused] == [f"{path}:{at}" for at in range(2, 2 + len(bad))]
    assert len(found.examples) == 2
    assert found.lines == 16
    said = found.summary()
    assert said.startswith("16 lines: 2 examples with ")
    assert "3 unplaceable" in said
    assert f"{path}:2: not JSON" in said


def test_long_lines_and_low_rewards_are_refused_by_name(tmp_path: Path, prompts: DatasetPrompts) -> None:
    path = written(tmp_path, reward=0.5)
    length = len(read(path, prompts).examples[0].tokens)
    assert read(path, prompts, max_token_len=length + 1).examples
    assert [each.reason for each in read(path, prompts, max_token_len=length).refused] == ["too_long"]
    assert read(path, prompts, min_reward=0.5).examples
    (line,) = read(path, prompts, min_reward=0.6).refused
    assert line.detail == "its reward is 0.5, and sft.min_reward is 0.6"


# Exact samples.


def test_a_conversation_that_has_lost_its_images_is_refused_as_they_are(
    tmp_path: Path, prompts: DatasetPrompts
) -> None:
    seen = [{"role": "user", "content": [image(2, 2), text("What is this?")]}, CONVERSATION[-1]]
    found = read(written(tmp_path, seen), prompts)
    assert [(each.reason, each.detail) for each in found.refused] == [
        ("images", "it has only the types of 1 part, such as images")
    ]


def test_samples_are_verified_and_trained_on_their_spans(tmp_path: Path, prompts: DatasetPrompts) -> None:
    right, wrong = samples_from_atropos(group_body("g", "add", ["3", "no"], [1.0, 0.0]))
    path = tmp_path / "samples.jsonl"
    append_line(path, right.to_record())
    changed = {**wrong.to_record(), "tokens": [*wrong.tokens[:-2], 7, wrong.tokens[-1]]}
    append_line(path, changed)
    append_line(path, {**wrong.to_record(), "discarded": True})
    found = read(path, prompts)
    (example,) = found.examples
    (span,) = right.spans
    assert list(example.tokens) == right.tokens
    assert list(example.trained) == list(range(span.start, span.end))
    assert [each.reason for each in found.refused] == ["unproven", "discarded"]
    assert "with ids that differ from the sampled ones" in found.refused[0].detail


def test_exported_samples_have_their_reward_and_their_item(tmp_path: Path, prompts: DatasetPrompts) -> None:
    right, wrong = samples_from_atropos(group_body("g", "add", ["3", "no"], [1.0, 0.0]))
    path = tmp_path / "samples.jsonl"
    group = {"run": "r", "environment": "e", "item_key": "i"}
    rollouts = [
        {"rollout_id": each.rollout_id, "place": at, "reward": 1.0 - at, "samples": [each.to_record()]}
        for at, each in enumerate((right, wrong))
    ]
    record = {**group, "rollouts": rollouts, "samples": [right.to_record(), wrong.to_record()]}
    for line in token_samples(aged(record)):
        assert isinstance(line, ExportLine)
        append_line(path, dict(line.content))
    found = read(path, prompts, min_reward=1.0)
    assert [(list(each.tokens), each.item) for each in found.examples] == [(right.tokens, "i")]
    assert [each.reason for each in found.refused] == ["low_reward"]


def test_a_group_is_read_with_the_rewards_of_its_rollouts(tmp_path: Path, prompts: DatasetPrompts) -> None:
    samples = samples_from_atropos(group_body("g", "add", ["3", "no"], [1.0, 0.0]))
    rollouts = [
        {"rollout_id": sample.rollout_id, "reward": reward} for sample, reward in zip(samples, (1.0, 0.0), strict=True)
    ]
    path = tmp_path / "groups.jsonl"
    record = {"item_key": "i", "samples": [sample.to_record() for sample in samples], "rollouts": rollouts}
    append_line(path, aged(record))
    found = read(path, prompts, min_reward=1.0)
    assert [example.item for example in found.examples] == ["i"]
    assert [each.reason for each in found.refused] == ["low_reward"]


async def test_what_process_writes_is_trained_as_it_is(tmp_path: Path, prompts: DatasetPrompts) -> None:
    async with ScriptedServer(sorts) as server:
        await make(ManyWords, server, tmp_path, total_steps=3).process_manager()
    (path,) = tmp_path.rglob("trajectory_samples.jsonl")
    found = read(path, prompts)
    assert found.lines == len(found.examples) > 0
    assert {example.item for example in found.examples} <= {item_of(json.loads(x)["item_key"]) for x in path.open()}


def test_a_line_that_was_changed_is_refused(tmp_path: Path, prompts: DatasetPrompts) -> None:
    (one, other) = samples_from_atropos(group_body("g", "add", ["3", "no"], [1.0, 0.0]))
    line = certified({**one.to_record(), "reward": 0.0})
    unsealed = {name: value for name, value in line.items() if name != LINE_DIGEST}
    group = certified({"item_key": "i", "scores": [0.0, 1.0], "samples": [each.to_record() for each in (one, other)]})
    changed = [{**line, "reward": 1.0}, {**unsealed, "reward": 1.0}, {**group, "item_key": "other"}]
    for number, each in enumerate([line, group, *changed]):
        path = tmp_path / f"{number}.jsonl"
        append_line(path, each)
        found = read(path, prompts)
        assert [refused.reason for refused in found.refused] == (["unproven"] if number > 1 else [])


def test_a_template_without_tools_has_them_in_a_system_turn_wherever_the_line_has_them(
    tmp_path: Path, tokenizer: Any
) -> None:
    bare = DatasetPrompts(tokenizer, chat_template=of_trl("qwen2_5").replace("tools", "no_tools"))
    path = written(tmp_path)
    append_line(path, to_dataset_entry(CONVERSATION, [TOOL]).entry)
    generated, elsewhere = read(path, bare).examples
    assert elsewhere.tokens == generated.tokens
    text = tokenizer.decode(elsewhere.tokens)
    assert text.startswith(f"<|im_start|>system\n{system_prompt([TOOL])}") and text.count("What is 1 + 2?") == 1


# Batches.


def test_a_datum_predicts_each_trained_token_from_the_one_before(tmp_path: Path) -> None:
    datum = Example([5, 6, 7, 8, 9], [2, 4], "f:1", "i").datum(0.5)
    assert (datum.tokens, datum.targets) == ([5, 6, 7, 8], [6, 7, 8, 9])
    assert datum.inputs == {"weights": [0.0, 0.5, 0.0, 0.5]}
    example = Example([5, 6, 7, 8, 9], [2, 4], "f:1", "i")
    assert loss_of([example], [[-9.0, -1.0, -9.0, -2.0]]) == 1.5


def examples(count: int, *, of_item: int = 1, length: int = 10) -> list[Example]:
    return [Example(list(range(length)), [length - 1], f"f:{at}", f"item {at // of_item}") for at in range(count)]


def test_each_example_is_in_each_epoch_once_in_another_order() -> None:
    given = examples(50)
    first, second = batches(given, SftSettings(epochs=2, batch_size=8))
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [8] * 6 + [2]
        assert sorted(each.source for batch in epoch for each in batch) == sorted(each.source for each in given)
    assert first != second
    assert batches(given, SftSettings(epochs=2, batch_size=8)) == [first, second], "a resumed run has the same batches"
    assert batches(given, SftSettings(epochs=1, batch_size=8, seed=1)) != [first]


def test_a_batch_holds_at_most_the_tokens_that_are_set() -> None:
    (epoch,) = batches([*examples(9), *examples(1, length=50)], SftSettings(batch_tokens=30))
    sizes = [sum(len(each.tokens) for each in batch) for batch in epoch]
    assert sum(sizes) == 140
    assert max(size for size, batch in zip(sizes, epoch, strict=True) if len(batch) > 1) <= 30
    assert [size for size in sizes if size > 30] == [50], "a sequence that is larger is a batch of its own"


def test_all_conversations_about_an_item_are_on_one_side_of_the_split() -> None:
    given = examples(400, of_item=4)
    trained, held_out = split(given, SftSettings(validation_share=0.2))
    assert len(trained) + len(held_out) == 400
    assert not {each.item for each in trained} & {each.item for each in held_out}
    assert 40 < len(held_out) < 120
    assert split(given, SftSettings(validation_share=0.0)) == (given, [])


def test_occurrences_samples_and_settings_of_an_item_are_one_item(tmp_path: Path, prompts: DatasetPrompts) -> None:
    item = "0123456789abcdef"
    keys = [f"{item}-1", f"{item}-2", f"{item}-1+3", f"{item}0a1b2c3d-1", f"{item}0a1b2c3d-2+1"]
    for key in [*keys, "row-1", "row-2"]:
        path = written(tmp_path, item_key=key)
    assert [each.item for each in read(path, prompts).examples] == [item] * 5 + ["row-1", "row-2"]


def test_what_has_no_key_is_known_by_what_was_said_before_the_first_answer(
    tmp_path: Path, prompts: DatasetPrompts
) -> None:
    question, *answered = CONVERSATION
    for messages in (CONVERSATION, [question, answered[2]], [{**question, "content": "And 2 + 2?"}, *answered]):
        path = written(tmp_path, messages)
    one, again, other = (each.item for each in read(path, prompts).examples)
    assert one == again != other
    samples = samples_from_atropos(group_body("g", "add", ["3", "no"], [1.0, 0.0]))
    for sample in (*samples, *samples_from_atropos(group_body("g", "subtract", ["3"], [1.0]))):
        append_line(tmp_path / "samples.jsonl", aged(sample.to_record()))
    one, again, other = (each.item for each in read(tmp_path / "samples.jsonl", prompts).examples)
    assert one == again != other


def test_other_data_has_another_digest(tmp_path: Path) -> None:
    given = examples(3)
    assert digest(given) == digest(examples(3)) != digest(given[:2])
    assert digest([Example(given[0].tokens, [1], "f:0", "item 0"), *given[1:]]) != digest(given)
