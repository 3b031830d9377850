"""Files to examples: every line becomes examples, or is refused with its file, its number and the reason.

A ShareGPT line is text. It is written down as a rollout would have sampled it: each turn of the model is encoded as the
continuation of the ids before it, and `samples` says which ids were the model's, as for any rollout. No text is
searched for in another. Samples of Phase 2 have their ids already; they are verified.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from backends.errors import LachesisError
from backends.text import counted
from lachesis.figures.item_keys import item_digest, item_of
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.history import MessageHistory
from lachesis_messages.images import with_image_data
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.digests import sample_line_problem
from lachesis_messages.records.json_arrays import array_items
from lachesis_messages.records.jsonl import is_array, unreadable
from lachesis_messages.records.loading import from_sharegpt, tools_from_sharegpt
from lachesis_messages.records.sharegpt import PARTS_OMITTED, conversation_tools, system_prompt
from lachesis_messages.responses import ChatResponse, as_message
from lachesis_messages.tokens import SampledTokens
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
from lachesis_tokens.samples.cross_checks import line_problems
from lachesis_tokens.samples.handing_over import without_rollouts
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_tokens.samples.verification import verify
from lachesis_train.sft.settings import SftSettings
from lachesis_train.tinker_sdk import Datum

SHOWN_LINES: Final = 5
"""Refused lines that the summary names; all of them are in `refused.jsonl`."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on."""

    tokens: Sequence[int]
    trained: Sequence[int]
    """The places of the tokens that the model wrote, ascending, each after at least one other token."""
    source: str
    """`FILE:LINE`."""
    item: str
    """What the conversation is about: conversations about one item are held out together."""

    def datum(self, weight: float) -> Datum:
        """For the loss `cross_entropy`: token t predicts token t + 1, with `weight` where that is trained."""
        weights = [0.0] * (len(self.tokens) - 1)
        for place in self.trained:
            weights[place - 1] = weight
        return Datum(self.tokens[:-1], self.tokens[1:], {"weights": weights})


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line, or one sample of it, that is not trained on."""

    source: str
    reason: str
    """A short name that can be counted."""
    detail: str

    def __str__(self) -> str:
        return f"{self.source}: {self.detail}"


@dataclass(slots=True)
class Dataset:
    """The examples of some files, and the lines that were refused."""

    examples: list[Example] = field(default_factory=list)
    refused: list[RefusedLine] = field(default_factory=list)
    lines: int = 0

    def summary(self) -> str:
        """The lines read, the reasons for refused lines, and the first of these lines."""
        trained = sum(len(each.trained) for each in self.examples)
        examples = f"{counted(len(self.examples), 'example')} with {counted(trained, 'token')} of the model"
        said = [f"{counted(self.lines, 'line')}: {examples}"]
        if self.refused:
            reasons = Counter(each.reason for each in self.refused)
            named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            said += [f"refused: {named}", *(f"  {each}" for each in self.refused[:SHOWN_LINES])]
        return "\n".join(said)


class _Refused(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_dataset(
    paths: Iterable[str | Path], prompts: DatasetPrompts, rules: SftSettings, *, max_token_len: int = 0
) -> Dataset:
    """Read files of ShareGPT lines, samples and groups, which may be mixed. CPU-bound.

    Args:
        max_token_len: every sequence must be shorter; 0: any.

    Raises:
        LachesisError: a file cannot be read.
    """
    found = Dataset()
    for path in paths:
        for number, line in _lines(Path(path)):
            found.lines += 1
            source = f"{path}:{number}"
            try:
                for read in _examples(_parsed(line), source, prompts, rules):
                    if isinstance(read, Example) and 0 < max_token_len <= len(read.tokens):
                        limit = f"training.max_token_trainer_length is {max_token_len}"
                        read = _Refused("too_long", f"{len(read.tokens)} tokens, and {limit}")
                    if isinstance(read, Example):
                        found.examples.append(read)
                    else:
                        found.refused.append(RefusedLine(source, read.reason, str(read)))
            except _Refused as error:
                found.refused.append(RefusedLine(source, error.reason, str(error)))
            except MISSHAPEN as error:
                found.refused.append(RefusedLine(source, "unreadable", f"the line cannot be read: {error!r}"))
    return found


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines of a file, or the items of a JSON array, with their numbers."""
    try:
        with path.open("rb") as file:
            if is_array(file):
                yield from array_items(path, file)
                return
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise unreadable(path, error) from error


def _parsed(line: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig")) if isinstance(line, bytes) else line
    except (ValueError, RecursionError) as error:
        raise _Refused("not_json", f"not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise _Refused("unknown_form", f"it is {type(value).__name__}, not an object")
    return value


def _examples(
    record: Mapping[str, Any], source: str, prompts: DatasetPrompts, rules: SftSettings
) -> Iterator[Example | _Refused]:
    if record.get("evaluation"):
        raise _Refused("evaluation", "it measured the model: no training data")
    if isinstance(record.get("conversations"), list):
        if (refused := _refusal(record, record.get("completed") is not False, rules)) is not None:
            raise refused
        if omitted := record.get(PARTS_OMITTED):
            raise _Refused("images", f"it has only the types of {counted(omitted, 'part')}, such as images")
        placed = _placed(record, prompts, rules)
        yield from (_example(sample, source, _item(record, _question(record))) for sample in placed)
    elif isinstance(record.get("samples"), list):
        yield from _of_group(record, source, rules)
    elif "tokens" in record and "spans" in record:
        if (problem := sample_line_problem(record)) is not None:
            raise _Refused("unproven", problem)
        facts = {name: record.get(name) for name in ("reward", "item_key")}
        yield _of_record(record, facts, source, rules)
    else:
        keys = ", ".join(list(record)[:6])
        raise _Refused("unknown_form", f"neither conversations, nor samples, nor a sample; it has {keys or 'no keys'}")


def _item(record: Mapping[str, Any], question: Any) -> str:
    """What a line is about: the item of its key, or `question`, what was said before the first answer."""
    return item_of(str(record.get("item_key") or item_digest(question)))


def _question(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The turns before the first of the model, without a generated system turn: it belongs to the format."""
    turns = record["conversations"][conversation_tools(record["conversations"]) is not None :]
    return [(turn["from"], turn["value"]) for turn in takewhile(lambda turn: turn["from"] != "gpt", turns)]


def _refusal(record: Mapping[str, Any], completed: bool, rules: SftSettings) -> _Refused | None:
    """Why a rollout is not trained on, by what its record says; None where it is."""
    if rules.completed_only and not completed:
        return _Refused("not_completed", f"the rollout ended with {record.get('outcome') or 'an unknown outcome'}")
    reward = record.get("reward")
    if rules.min_reward is not None and not (isinstance(reward, int | float) and reward >= rules.min_reward):
        return _Refused("low_reward", f"its reward is {reward!r}, and sft.min_reward is {rules.min_reward:g}")
    return None


def _placed(record: Mapping[str, Any], prompts: DatasetPrompts, rules: SftSettings) -> list[TokenSample]:
    """The samples that the conversation would have given, had the model sampled its turns."""
    try:
        messages = from_sharegpt(record)
        tools = tools_from_sharegpt(record)
        if tools and not prompts.template_report.shows_tools and messages[0]["role"] != "system":
            turns = record["conversations"]
            generated = conversation_tools(turns) is not None
            said = turns[0]["value"] if generated else system_prompt(tools)
            messages = [{"role": "system", "content": said}, *messages]
        history = MessageHistory()
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                history.append(message)
                continue
            if rules.reasoning == "drop":
                message = {name: value for name, value in message.items() if name != "reasoning"}
            said = as_message(message, index)
            after = MessageHistory([*history, message])
            prompt = prompts.prompt(history.nodes(), tools)
            ids = prompts.turn(after.nodes(), tools)
            tokens = SampledTokens.sample(
                prompt.prefix, ids, [0.0] * len(ids), end_of_turn=prompts.end_of_turn, context=prompt.context
            )
            reason = FinishReason.TOOL_CALLS if said.tool_calls else FinishReason.STOP
            history.append(ChatResponse(said, reason, tokens=tokens))
        if not history.completions():
            raise _Refused("no_turn", "it has no turn of the model")
        return samples(history)
    except (AttributeError, LookupError, TypeError, ValueError, LachesisError) as error:  # turns of any shape
        raise _Refused("unplaceable", str(error) or repr(error)) from error


def _of_group(record: Mapping[str, Any], source: str, rules: SftSettings) -> Iterator[Example | _Refused]:
    rollouts = {each["rollout_id"]: each for each in record.get("rollouts") or () if isinstance(each, Mapping)}
    if not record["samples"]:
        raise _Refused("no_samples", "the group has no samples: it was played in Phase 1; take its ShareGPT lines")
    read = []
    for each in record["samples"]:
        with suppress(MalformedSample):  # refused below
            read.append(read_sample(each))
    for rollout_id, reason in line_problems(record, read):
        raise _Refused("unproven", f"rollout {rollout_id}: {reason}" if rollout_id else reason)
    left_out = {name for name, each in rollouts.items() if _refusal(each, each.get("outcome") == "completed", rules)}
    for each in with_image_data(without_rollouts(record, left_out) if left_out else record["samples"]):
        try:
            of_rollout = rollouts.get(each.get("rollout_id"), {}) if isinstance(each, Mapping) else {}
            yield _of_record(each, {**of_rollout, "item_key": record.get("item_key")}, source, rules)
        except _Refused as error:
            yield error


def _of_record(record: Any, facts: Mapping[str, Any], source: str, rules: SftSettings) -> Example:
    """`facts`: of its rollout, and its `item_key`."""
    try:
        sample = read_sample(record)
    except MalformedSample as error:
        raise _Refused("unproven", f"the sample {error}") from None
    refused = _refusal({"outcome": sample.outcome, **facts}, sample.outcome == "completed", rules)
    if refused is not None:
        raise refused
    if sample.discarded:
        raise _Refused("discarded", "a completion that the agent could not use and sampled again")
    if reasons := verify(sample, on_policy=False):
        raise _Refused("unproven", f"rollout {sample.rollout_id}: {reasons[0]}")
    if sample.images:
        raise _Refused("images", "it has images, which the engine does not take")
    question = sample.tokens[: min((span.start for span in sample.spans), default=0)]
    return _example(sample, source, _item(facts, question))


def _example(sample: TokenSample, source: str, item: str) -> Example:
    places = [place for span in sample.spans for place in range(span.start, span.end) if place]
    return Example(sample.tokens, places, source, item)
