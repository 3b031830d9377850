"""The exports of the project pass the suite that is offered to others, and the suite fails what breaks a promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lachesis_data.exports.exports import EXPORTS, load_export
from lachesis_data.exports.parquet import read_rows
from lachesis_messages.records.export_lines import ExportLine, LeftOutRollout
from lachesis_messages.records.groups import rollout_messages, rollout_samples
from lachesis_testing.export_suite import ExportSuite, example_groups
from lachesis_tokens.samples.verification import verify_records
from tests.support.eval_logs import read_samples

HERE = f"{__name__}:"


class TestTrajectory(ExportSuite):
    export = "trajectory"


class TestTrajectoryWithTheSystemPrompt(ExportSuite):
    export = "trajectory"
    options: ClassVar = {"system": "actual"}


class TestBatch(ExportSuite):
    export = "batch"
    options: ClassVar = {"toolsets": ["terminal"]}


class TestDataset(ExportSuite):
    export = "dataset"
    options: ClassVar = {"min_reward": 0.5}


class TestHermes(ExportSuite):
    export = "hermes"


class TestShareGptTools(ExportSuite):
    export = "sharegpt-tools"


class TestOpenAi(ExportSuite):
    export = "openai"
    options: ClassVar = {"reasoning": "think"}


class TestTrl(ExportSuite):
    export = "trl"
    options: ClassVar = {"columns": "prompt-completion"}


class TestDpo(ExportSuite):
    export = "dpo"


class TestParquet(ExportSuite):
    export = "parquet"

    def read(self, path: Path) -> list[Any]:
        return list(read_rows(path))


class TestSamples(ExportSuite):
    export = "samples"


class TestAtif(ExportSuite):
    export = "atif"


class TestInspect(ExportSuite):
    export = "inspect"

    def read(self, path: Path) -> list[Any]:
        return read_samples(path)


def test_every_export_of_the_project_is_tried_here() -> None:
    suites = [value for value in globals().values() if isinstance(value, type) and issubclass(value, ExportSuite)]
    assert {suite.export for suite in suites if suite is not ExportSuite} == set(EXPORTS.names())


def ids(group: Any) -> list[str]:
    return [rollout["rollout_id"] for rollout in group["rollouts"]]


def whole(group: Any) -> Iterator[ExportLine]:
    if group["rollouts"]:
        yield ExportLine({"item": group["item_key"]}, tuple(ids(group)))


def loses_one(group: Any) -> Iterator[ExportLine]:
    for each in ids(group)[1:]:
        yield ExportLine({"id": each}, (each,))


def writes_tuples(group: Any) -> Iterator[ExportLine]:
    for each in ids(group):
        yield ExportLine({"ids": (each,)}, (each,))


def writes_nan(group: Any) -> Iterator[ExportLine]:
    for each in ids(group):
        yield ExportLine({"score": float("nan")}, (each,))


def edits(group: Any) -> Iterator[ExportLine]:
    group["item_key"] += "!"
    yield from whole(group)


def edits_messages(group: Any) -> Iterator[ExportLine]:
    """Edits copies only, which is allowed."""
    for rollout in group["rollouts"]:
        messages, tokens = rollout_messages(group, rollout), rollout_samples(group, rollout)
        for message in messages:
            message.pop("reasoning", None)
            for call in message.get("tool_calls", ()):
                call["function"].pop("arguments")
        for sample in tokens:
            sample.pop("logprobs")
        yield ExportLine({"messages": messages, "samples": tokens}, (rollout["rollout_id"],))


def leaves_out_without_a_reason(group: Any) -> Iterator[ExportLine | LeftOutRollout]:
    first, *others = ids(group) or [None]
    if first is not None:
        yield LeftOutRollout(first, " ")
    for each in others:
        yield ExportLine({}, (each,))


def writes_and_leaves_out(group: Any) -> Iterator[ExportLine | LeftOutRollout]:
    for each in ids(group):
        yield ExportLine({}, (each,))
        yield LeftOutRollout(each, "twice")


def names_strangers(group: Any) -> Iterator[ExportLine]:
    yield ExportLine({}, ("nobody",))


def writes_nothing(group: Any) -> Iterator[LeftOutRollout]:
    for each in ids(group):
        yield LeftOutRollout(each, "not wanted")


class Counts:
    """Its lines depend on how often the module was used before."""

    calls = 0

    def __call__(self, group: Any) -> Iterator[ExportLine]:
        Counts.calls += 1
        for each in ids(group):
            yield ExportLine({"call": Counts.calls}, (each,))


def failed_tests(export: str, folder: Any) -> set[str]:
    class Suite(ExportSuite):
        pass

    Suite.export = export
    failed = set()
    for name in dir(Suite):
        if name.startswith("test_"):
            inner = folder / name
            inner.mkdir()
            try:
                test = getattr(Suite(), name)
                test(inner) if "file" in name else test()
            except Exception:
                failed.add(name)
    return failed


@pytest.mark.parametrize(
    ("export", "broken"),
    [
        ("whole", None),
        ("edits_messages", None),
        ("loses_one", "test_every_rollout_is_in_a_line_or_left_out_with_a_reason"),
        ("writes_tuples", "test_every_line_is_a_json_object_that_reads_back_as_it_is"),
        ("writes_nan", "test_every_line_is_a_json_object_that_reads_back_as_it_is"),
        ("edits", "test_the_groups_are_not_changed"),
        ("leaves_out_without_a_reason", "test_every_rollout_is_in_a_line_or_left_out_with_a_reason"),
        ("writes_and_leaves_out", "test_every_rollout_is_in_a_line_or_left_out_with_a_reason"),
        ("names_strangers", "test_every_rollout_is_in_a_line_or_left_out_with_a_reason"),
        ("writes_nothing", "test_it_writes_something"),
        ("Counts", "test_the_same_groups_give_the_same_lines"),
    ],
)
def test_the_suite_fails_an_export_that_breaks_a_promise(export: str, broken: str | None, tmp_path: Any) -> None:
    found = failed_tests(HERE + export, tmp_path)
    assert broken in found if broken else found == set()


def test_exported_samples_verify() -> None:
    export = load_export("samples")
    lines = [line.content for group in example_groups() for line in export(group) if isinstance(line, ExportLine)]
    totals = verify_records(lines)
    assert totals.ok, totals.problems
    assert totals.delivered == 6
    assert [line["reward"] for line in lines] == [1.0, 0.5]
