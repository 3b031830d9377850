"""`lachesis trajectories`: every line is accounted for, and a failure names its line and leaves no half a file."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli import main
from lachesis_data.exports.parquet import read_rows
from lachesis_data.files.file_statistics import NAMES, OTHERS, FileStatistics, Spread
from lachesis_data.files.validation import validate_entry
from lachesis_messages.records.dataset_entries import load_trajectories
from lachesis_messages.records.entries import to_trajectory_entry
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_testing.export_suite import example_groups
from tests.data.test_formats import LOOKED_UP, PLAIN, SEARCH, SHELL, TERMINAL, call
from tests.support.pictures import image, text


def entry(messages: Any = SHELL, number: int = 0, **more: Any) -> dict[str, Any]:
    tools = [TERMINAL, SEARCH]
    return to_trajectory_entry(messages, tools, model="m", completed=True, rollout_id=f"r-{number}", **more).entry


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with JsonlWriter(path) as writer:
        writer.write_all([entry(reward=1.0), entry(LOOKED_UP, 1, reward=0.5), entry(PLAIN, 2, reward=None)])
    return path


def run(*arguments: object) -> int:
    return main(["trajectories", *map(str, arguments)])


def test_figures_of_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["entries"], found["completed"], found["unreadable_lines"]) == (3, 3, 0)
    assert (found["answers"], found["answers_with_reasoning"], found["entries_without_reasoning"]) == (5, 2, 2)
    assert found["tool_calls"] == {"terminal": 1, "web_search": 1}
    assert found["turns"] == {"assistant": 5, "system": 3, "user": 3, "tool": 2}
    assert found["reward"] == {"count": 2, "mean": 0.75, "min": 0.5, "p50": 0.5, "p90": 1.0, "max": 1.0}
    assert run("stats", file) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"answers 5", "answers with reasoning 2", "tool calls terminal 1, web_search 1"} <= set(shown)
    assert "reward mean 0.75, median 0.5, 90th percentile 1, maximum 1" in shown


def test_the_prompt_is_all_that_comes_before_the_first_answer(tmp_path: Path) -> None:
    """Examples in a prompt are no answers, whatever says that they are examples."""
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    ask, one, out = {"role": "user", "content": "Q"}, tmp_path / "1.jsonl", tmp_path / "out.jsonl"

    def asks(number: int) -> dict[str, Any]:
        return {**ask, "content": f"Q{number}"}

    said = {"role": "assistant", "content": "A"}
    weighed = [example[0], {**example[1], "weight": 0}]
    for make in (
        lambda n: {"prompt": [*example, asks(n)], "completion": [said]},
        lambda n: {"prompt": [*example, asks(n)], "chosen": [said], "rejected": [example[1]]},
        lambda n: {"messages": [*weighed, asks(n), said]},
        lambda n: {"messages": [{"role": "developer", "content": "Be brief."}, asks(n), said]},
        lambda n: {"conversations": [{"from": "gpt", "value": f"Hello {n}."}]},
        lambda n: {"messages": [ask, said], "tools": json.dumps([{"name": f"tool_{n}"}])},
    ):
        entries = [make(number) for number in (1, 2, 1)]
        one.write_text("".join(json.dumps(each) + "\n" for each in entries))
        for by in ("prompt", "conversation"):
            assert run("dedup", one, "--by", by, "--out", out) == 0
            assert list(read_lines(out)) == entries[:2], (by, entries)
    other = {"prompt": [*example, asks(1)], "completion": [{**said, "content": "B"}]}
    one.write_text("".join(json.dumps(each) + "\n" for each in ({**other, "completion": [said]}, other)))
    assert run("dedup", one, "--by", "prompt", "--out", out) == 0 and len(list(read_lines(out))) == 1


def test_calls_of_other_writers_are_counted_by_their_names() -> None:
    found = FileStatistics()
    calls = ['{"arguments": {"a": 1}, "name": "f"}', '{"name": "g", "arguments": {}}', "{oops", '{"arguments": {}}']
    text = "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in calls)
    found.add({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": text}]})
    assert dict(found.counts["tool_calls"]) == {"f": 1, "g": 1, "(unreadable)": 2}


def test_percentiles_are_near_and_names_are_bounded() -> None:
    spread = Spread()
    for number in range(100_000):
        spread.add(number)
    for share in (0.01, 0.5, 0.9):
        assert spread.percentile(share) == pytest.approx(share * 100_000, rel=0.06)
    assert len(spread._buckets) < 600
    found = FileStatistics()
    for number in range(NAMES + 500):
        turn = {"role": "assistant", "tool_calls": [call(f"tool_{number}", "{}")]}
        found.add({"messages": [turn], "tools": []})
    assert found.counts["tool_calls"][OTHERS] == 500
    assert len(found.counts["tool_calls"]) == NAMES + 1


def test_a_conversion_there_and_back_through_every_kind_of_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"openai": "a.jsonl", "trl": "b.jsonl", "parquet": "c.parquet", "sharegpt-tools": "d.jsonl"}
    source = file
    for to, name in names.items():
        out = file.with_name(name)
        options = "{reasoning: think}" if to == "openai" else "{}"
        assert run("convert", source, "--to", to, "--options", options, "--out", out) == 0
        assert f"3 of 3 entries: {out}" in capsys.readouterr().out
        source = out
    assert run("validate", file, *map(file.with_name, names.values())) == 0
    assert capsys.readouterr().out.startswith(
        "15 entries: 0 break the rules of their format; valid: 3 hermes, 3 openai"
    )
    back = file.with_name("e.jsonl")
    rows = file.with_name("c.parquet")  # the last file has no ids of calls
    assert run("convert", rows, "--to", "hermes", "--options", "{model: m}", "--out", back) == 0
    expected = [each["conversations"] for each in load_trajectories(file)]
    assert [each["conversations"] for each in load_trajectories(back)] == expected
    assert [row["rollout_id"] for row in read_rows(rows)] == [None] * 3, "OpenAI's files have no place for it"


def test_the_first_of_equal_conversations_is_kept_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other_id = json.loads(json.dumps(SHELL).replace("call_1", "call_9"))
    other_answer = [*SHELL[:-1], {**SHELL[-1], "content": "Two."}]
    one, two, out = tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "out.jsonl"
    one.write_text(json.dumps(entry()) + "\n\n" + json.dumps(entry(other_id, 1), separators=(",", ":")) + "\n")
    two.write_text("\ufeff" + json.dumps(entry(other_answer, 2), ensure_ascii=True))
    assert run("dedup", one, two, "--out", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"2 of 3 entries: {out}",
        "  left out: 1, the same conversation as an earlier entry",
    ]
    assert out.read_text() == one.read_text().splitlines()[0] + "\n" + two.read_text().removeprefix("\ufeff") + "\n"
    assert run("dedup", one, two, "--by", "prompt", "--out", out) == 0
    assert [each["rollout_id"] for each in read_lines(out)] == ["r-0"]
    # Pairs of one prompt, and results that hold the id of another call, are not equal.
    pairs = [{"prompt": PLAIN[:1], "chosen": SHELL[-1:], "rejected": [{**PLAIN[1], "content": n}]} for n in "aba"]
    results = [[*SHELL[:2], {**SHELL[2], "content": json.dumps({"tool_call_id": n, "x": 1})}, SHELL[3]] for n in "aba"]
    for entries in (pairs, [entry(messages) for messages in results]):
        one.write_text("".join(json.dumps(each) + "\n" for each in entries))
        assert run("dedup", one, "--out", out) == 0
        assert list(read_lines(out)) == entries[:2]


@pytest.mark.parametrize("to", ["hermes", "sharegpt-tools", "trl", "parquet"])
@pytest.mark.parametrize("by", ["conversation", "prompt"])
def test_what_may_differ_in_the_images_that_it_lacks_is_no_duplicate(
    to: str, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [[{"role": "user", "content": [image(2, 2, shade), text("Which?")]}, PLAIN[1]] for shade in (0, 9)]
    source, form, out = (
        tmp_path / "in.jsonl",
        tmp_path / f"form{'.parquet' * (to == 'parquet')}",
        tmp_path / "out.jsonl",
    )
    with JsonlWriter(source) as writer:
        writer.write_all(entry(messages) for messages in [*asked, PLAIN, PLAIN])
    assert run("convert", source, "--to", to, "--out", form) == 0
    capsys.readouterr()
    assert run("dedup", form, "--by", by, "--out", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"3 of 4 entries: {out}",
        f"  left out: 1, the same {by} as an earlier entry",
        "  kept: 2, without their images, in which they may differ",
    ]
    assert len([*read_lines(out)]) == 3


def test_an_entry_is_shown_without_characters_that_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    odd = [{"role": "user", "content": "a\x1b]0;title\x07\u202eb\x00"}, {"role": "assistant", "content": "x" * 5000}]
    path.write_text(json.dumps(entry()) + "\n" + json.dumps(entry(odd, 7)) + "\n")
    assert run("show", path, "--id", "r-7") == 0
    shown = capsys.readouterr().out
    assert "a\\u001b]0;title\\u0007\\u202eb\\u0000" in shown
    assert "... 3000 more characters (--width 0: all)" in shown
    assert run("show", path) == 0
    assert '[call] terminal {"command": "ls"}' in capsys.readouterr().out
    assert run("show", path, "--line", "3") == 2
    path.write_text(json.dumps(entry() | {"outcome": "context_exhausted"}) + "\n")
    for verb, said in (("show", "outcome: out of tokens"), ("stats", "out of tokens 1")):
        assert run(verb, path) == 0 and said in capsys.readouterr().out, "as a run says it"


HOSTILE = {
    "no JSON": b"oops\n",
    "a list": b"[1]\n",
    "NaN": b'{"conversations": NaN}\n',
    "a key twice": b'{"conversations": [], "conversations": []}\n',
    "a key twice inside": b'{"conversations": [{"from": "gpt", "value": "a", "value": "b"}]}\n',
    "binary": bytes(range(256)).replace(b"\n", b"") + b"\n",
    "half a character": b'{"conversations": "\xf0\x9f"}\n',
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a huge number": b'{"a": ' + b"1" * 5000 + b"}\n",
    "10 MB without an end": b'{"conversations": "' + b"x" * 10_000_000 + b"\n",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_is_no_entry_is_named_and_nothing_is_written(
    line: bytes, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = file.with_name("out.jsonl")
    out.write_text("what was there before\n")
    good = file.read_bytes()
    file.write_bytes(good + line + good)
    for verb in (("convert", "--to", "openai"), ("dedup",)):
        assert run(verb[0], file, *verb[1:], "--out", out) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {file}, line 4: not an entry: ")
        assert len(error) < 1000
        assert out.read_text() == "what was there before\n"
    assert run("validate", file) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{file}, line 4: not an entry: ")
    assert "7 entries: 1 break" in printed
    assert run("stats", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["unreadable_lines"] == 1
    assert run("convert", file, "--to", "openai", "--skip-invalid", "--out", out) == 0
    assert "6 of 7 entries" in capsys.readouterr().out
    assert [validate_entry(each, "openai") for each in read_lines(out)] == [[]] * 6
    assert {path.name for path in file.parent.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_an_entry_that_a_format_cannot_hold_is_named_or_counted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.with_name("out.jsonl")
    with file.open("a") as open_file:
        open_file.write(json.dumps({**entry(), "conversations": [{"from": "robot", "value": "a"}]}) + "\n")
        open_file.write(json.dumps(example_groups()[0]) + "\n")
    assert run("convert", file, "--to", "openai", "--out", out) == 2
    assert f"{file}, line 4: message 0: unknown turn 'robot'" in capsys.readouterr().err.replace(
        "turn 0:", "message 0:"
    )
    assert not out.exists()
    assert run("convert", file, "--to", "openai", "--skip-invalid", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "left out: 1, no valid conversation (UnknownRole)" in printed
    assert "left out: 1, it is a group of a run, which `lachesis export` converts" in printed
    assert run("convert", file, "--to", "dpo", "--out", out) == 2
    assert "`lachesis export` writes the other formats" in capsys.readouterr().err
    assert run("convert", file, "--to", "trl", "--options", "{arguments: 3}", "--out", out) == 2
    assert run("convert", file, "--to", "trl", "--out", file) == 2


def test_a_torn_last_line_is_left_out_with_a_note(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.with_name("out.jsonl")
    file.write_bytes(file.read_bytes() + b'{"conversations": [{"fr')
    assert run("convert", file, "--to", "trl", "--out", out) == 0
    said = capsys.readouterr()
    assert "its last line is incomplete and was skipped" in said.err
    assert "3 of 3 entries" in said.out
    assert run("validate", file) == 1
    assert "line 4: not an entry" in capsys.readouterr().out


def test_a_line_of_10_mb_and_halves_of_characters_convert(file: Path) -> None:
    out = file.with_name("out.jsonl")
    long = [{"role": "user", "content": "é" * 5_000_000 + "\ud83d"}, {"role": "assistant", "content": "\x00\x7f"}]
    file.write_text(json.dumps(entry(long)).replace("\ufffd", "\\ud83d") + "\n")
    assert run("convert", file, "--to", "trl", "--out", out) == 0
    (line,) = read_lines(out)
    assert line["messages"][0]["content"] == "é" * 5_000_000 + "\ufffd"
    assert line["messages"][1]["content"] == "\x00\x7f"


def test_nothing_is_no_success(file: Path) -> None:
    empty, out = file.with_name("empty.jsonl"), file.with_name("out.jsonl")
    empty.write_text("\n")
    assert run("convert", empty, "--to", "trl", "--out", out) == 1
    assert run("convert", file, "--to", "openai", "--skip-invalid", "--options", "{min_reward: 9}", "--out", out) == 1
    assert run("dedup", empty, "--out", out) == 1
    assert run("validate", empty) == 1


def test_an_output_that_cannot_be_written_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, reason in (
        (file.parent, "is not a regular file"),
        (file / "out.jsonl", "cannot be written (File exists)"),
        (Path("/proc/out.jsonl"), "cannot"),
    ):
        for to in ("trl", "parquet"):
            assert run("convert", file, "--to", to, "--out", out) == 1
            error = capsys.readouterr().err
            assert f"error: {out.resolve()}: " in error
            assert reason in error
    assert run("stats", file.with_name("missing.jsonl")) == 2
    assert "error: there is no file or folder" in capsys.readouterr().err
    assert run("stats", file.with_name("missing.parquet")) == 2
    (packed := file.with_name("in.jsonl.gz")).write_bytes(gzip.compress(file.read_bytes()))
    assert run("stats", packed) == 2
    assert "is compressed; decompress it with gunzip" in capsys.readouterr().err
    (broken := file.with_name("broken.parquet")).write_bytes(b"PAR1 no")
    assert run("stats", broken) == 2
    assert "broken.parquet: cannot be read as Parquet" in capsys.readouterr().err


FULL = """
import resource, signal, sys
from lachesis.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for verb in ["convert", "--to", "trl"], ["convert", "--to", "parquet"], ["dedup"]:
    print(main(["trajectories", *verb, sys.argv[1], "--out", sys.argv[2]]))
"""


def test_a_disk_that_fills_up_leaves_the_earlier_file_whole(file: Path) -> None:
    out = file.with_name("out")
    out.write_text("what was there before\n")
    with JsonlWriter(file) as writer:
        for number in range(400):
            noise = os.urandom(500).hex()
            writer.write(entry([{"role": "user", "content": noise}, PLAIN[1]], number))
    ran = subprocess.run([sys.executable, "-c", FULL, file, out], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["1", "1", "1"]
    errors = ran.stderr.splitlines()
    assert len(errors) == 3
    assert all(error.startswith(f"error: {out}: ") and "File too large" in error for error in errors)
    assert out.read_text() == "what was there before\n"
    assert {path.name for path in file.parent.iterdir()} == {"in.jsonl", "out"}


def test_the_figures_of_a_file_without_entries_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "x.csv").write_text("a,b\n1,2\n")
    assert run("stats", path) == 2
    said = capsys.readouterr()
    assert not said.out and f"no line of {path} is a trajectory" in said.err
