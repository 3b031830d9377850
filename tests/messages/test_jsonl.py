from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_messages.records import jsonl
from lachesis_messages.records.dataset_entries import load_trajectories, save_trajectory, to_batch_entry
from lachesis_messages.records.jsonl import JsonlError, JsonlWriter, append_line, read_lines
from lachesis_messages.records.sharegpt import to_conversations
from tests.run import some

TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "<think>\n</think>\nhello"}]

WRITE_FOREVER = """
import sys
from lachesis_messages.records.jsonl import JsonlWriter
with JsonlWriter(sys.argv[1]) as writer:
    for n in range(int(sys.argv[2]), 10**9):
        writer.write({"n": n, "text": "x" * int(sys.argv[3])})
"""


def start(script: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stderr=subprocess.PIPE)


def wait_for_size(path: Path, size: int, child: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.stat().st_size < size:
        assert child.poll() is None, child.stderr.read().decode()
        assert time.monotonic() < deadline, "the writer wrote nothing"
        time.sleep(0.001)


def test_a_writer_killed_at_any_instant_loses_no_whole_line(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    for round_number in range(6):
        before = [line["n"] for line in read_lines(path, torn_tail=True)] if path.exists() else []
        size = path.stat().st_size if path.exists() else 0
        child = start(WRITE_FOREVER, path, len(before), 4_000_000)
        wait_for_size(path, size + 4_001_000 + 700_000 * round_number, child)  # one line is whole by then
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stderr.close()
        after = [line["n"] for line in read_lines(path, torn_tail=True)]
        assert after == list(range(len(after)))
        assert len(after) > len(before)
    append_line(path, {"n": "last"})
    assert path.read_bytes().endswith(b'\n{"n": "last"}\n')
    assert [line["n"] for line in read_lines(path)] == [*range(len(after)), "last"]


@pytest.mark.parametrize("torn", [b'{"n": 2, "te', b"{", b'{"n": 2, "t": "\xc3', b"\0" * 200_000, b'{"x": 1}{'])
def test_a_torn_last_line_is_moved_away_before_the_next_is_written(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"n": 1}\n' + torn)
    assert list(read_lines(path, torn_tail=True)) == [{"n": 1}]
    with pytest.raises(JsonlError) as caught:
        list(read_lines(path))
    assert (caught.value.line, caught.value.path) == (2, path)
    assert "torn_tail=True" in str(caught.value)
    append_line(path, {"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n{"n": 3}\n'
    assert (tmp_path / "out.jsonl.torn").read_bytes() == torn + b"\n"


def test_a_file_that_is_torn_from_the_start_is_emptied(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"{" * 300_000)
    JsonlWriter(path).close()
    assert path.read_bytes() == b""
    assert (tmp_path / "out.jsonl.torn").stat().st_size == 300_001


def test_a_whole_last_line_without_a_newline_is_kept(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    assert list(read_lines(path)) == [{"n": 1}, {"n": 2}]
    append_line(path, {"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_open_writer_moves_a_line_that_another_left_torn(tmp_path):
    path = tmp_path / "out.jsonl"
    with JsonlWriter(path, fsync=True) as writer:
        writer.write({"n": 1})
        with path.open("ab") as other:
            other.write(b'{"n": ')
        writer.write({"n": 2})
    assert list(read_lines(path)) == [{"n": 1}, {"n": 2}]


WRITE_SOME = """
import sys
from lachesis_messages.records.jsonl import JsonlWriter
writer = JsonlWriter(sys.argv[1])
sys.stdin.readline()
for n in range(150):
    writer.write({"writer": int(sys.argv[2]), "n": n, "text": "y" * (n * 997 % 70_000)})
"""


def test_writers_in_four_processes_and_threads_write_whole_lines_only(tmp_path):
    path = tmp_path / "out.jsonl"
    children = [
        subprocess.Popen([sys.executable, "-c", WRITE_SOME, str(path), str(number)], stdin=subprocess.PIPE)
        for number in range(4)
    ]
    for child in children:
        child.stdin.write(b"go\n")
        child.stdin.close()
    shared = JsonlWriter(path)
    threads = [
        threading.Thread(target=lambda number=number: [shared.write({"writer": number, "n": n}) for n in range(150)])
        for number in (4, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(timeout=200) for child in children] == [0] * 4
    lines = list(read_lines(path))
    assert len(lines) == 6 * 150
    for number in range(6):
        assert [line["n"] for line in lines if line["writer"] == number] == list(range(150))


FORKED = """
import os, sys, time
from lachesis_messages.records.jsonl import JsonlWriter
writer = JsonlWriter(sys.argv[1])
with writer._exclusive(writer._fd):
    child = os.fork()
    if not child:
        writer.write({"from": "child"})
        os._exit(0)
    time.sleep(0.5)
    os.write(writer._fd, b'{"from": "the parent, which held the lock"}\\n')
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_is_kept_out_while_its_parent_writes(tmp_path):
    path = tmp_path / "out.jsonl"
    subprocess.run([sys.executable, "-c", FORKED, str(path)], check=True, timeout=200)
    assert [line["from"] for line in read_lines(path)] == ["the parent, which held the lock", "child"]


FULL_DISK = """
import resource, sys
from lachesis_messages.records.jsonl import JsonlError, JsonlWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with JsonlWriter(sys.argv[1]) as writer:
    writer.write({"n": 1})
    try:
        writer.write({"n": 2, "text": "x" * 20_000})
    except JsonlError as error:
        print(error)
    writer.write({"n": 3})
"""


def test_a_line_that_no_longer_fits_leaves_no_trace(tmp_path):
    path = tmp_path / "out.jsonl"
    ran = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=True, capture_output=True, text=True)
    assert ran.stdout.startswith(f"{path}: cannot write (File too large)")
    assert path.read_bytes() == b'{"n": 1}\n{"n": 3}\n'


def test_a_folder_that_cannot_be_written_is_named_with_the_reason_and_the_next_step():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.geteuid() == 0  # nothing is read-only for root
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(JsonlError) as caught:
                save_trajectory(TURNS, "m", True, directory=folder)
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)
        message = str(caught.value)
        assert message.startswith(f"{folder}/trajectory_samples.jsonl: cannot open for writing (Permission denied)")
        assert "choose a folder" in message
        assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_a_path_that_is_no_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "out.jsonl"):
        with pytest.raises(JsonlError):
            append_line(path, {})
    with pytest.raises(JsonlError, match="there is no file or folder"):
        list(read_lines(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("obj", [{"x": float("nan")}, {"x": {1}}, {1, 2}])
def test_a_value_that_is_not_json_is_rejected_before_any_write(tmp_path, obj):
    path = tmp_path / "out.jsonl"
    with JsonlWriter(path) as writer:
        with pytest.raises(JsonlError, match="cannot become JSON"):
            writer.write(obj)
        writer.write({"fine": True})
    assert list(read_lines(path)) == [{"fine": True}]


def test_objects_that_are_written_at_once_are_lines_and_all_or_none(tmp_path):
    path = tmp_path / "out.jsonl"
    with JsonlWriter(path) as writer:
        writer.write_all([])
        writer.write_all([{"n": 1}, {"n": 2}])
        with pytest.raises(JsonlError, match="cannot become JSON"):
            writer.write_all([{"n": 3}, {"n": float("nan")}])
    assert path.read_text() == '{"n": 1}\n{"n": 2}\n'


def test_other_threads_run_while_a_large_line_is_encoded(tmp_path):
    lines = [{"role": "tool", "content": "a line of text, and then\n" * 400} for _ in range(4000)]
    path = tmp_path / "large.jsonl"
    shares = []
    with JsonlWriter(path) as writer:
        for _ in range(5):  # other processes may keep this one waiting, too
            thread = threading.Thread(target=writer.encode, args=(lines,))
            began = last = time.process_time()
            longest = 0.0
            thread.start()
            while thread.is_alive():
                time.sleep(0.0005)
                now = time.process_time()
                longest, last = max(longest, now - last), now
            shares.append(longest / (last - began))
        assert min(shares) < 0.5, "in one piece, encoding would keep everybody waiting to its end"
        assert writer.encode(lines) == json.dumps(lines, ensure_ascii=False).encode() + b"\n"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=30,
)


@settings(max_examples=some(60), deadline=None)
@given(JSON, st.sampled_from([1, 2, 5]), st.integers(0, 4))
def test_the_pieces_of_a_line_are_the_text_of_json(value, size, outer):
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("_NUMBERS", size), ("_OBJECTS", size), ("_OUTER", outer)):
            patch.setattr(jsonl, name, number)
        written = b"".join(jsonl._json_pieces(value)).decode()
    expected = json.dumps(value, ensure_ascii=False)
    assert json.loads(written) == json.loads(expected)
    if "e" not in expected:  # 1e-05 and 1e-5 are the same number
        assert written == expected


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), {1}, object()])
def test_no_piece_lets_through_what_is_not_json(bad):
    for value in (bad, [bad], [[1.5, bad]], {"a": {"b": {"c": [*range(5000), bad]}}}, [[[[[{"x": bad}]]]]]):
        with pytest.raises((TypeError, ValueError)):
            b"".join(jsonl._json_pieces(value))


def test_a_line_is_written_in_short_pieces_and_leaves_no_garbage():
    sample = {"tokens": list(range(32768)), "logprobs": [-0.5] * 32768}
    group = {"messages": [[{"content": "x" * 50}] * 500] * 4, "samples": [sample] * 4, "scores": (1.0, 0.5)}
    pieces = list(jsonl._json_pieces(group))
    whole = json.dumps(group).encode()
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) < len(whole) / 40, "a piece holds the interpreter from its begin to its end"
    gc.collect()
    gc.disable()
    try:
        b"".join(jsonl._json_pieces(group))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_file_that_is_deleted_while_it_is_written_takes_no_more_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"a": 1})
        path.unlink()
        with pytest.raises(JsonlError, match=r"out\.jsonl: the file was deleted while it was written"):
            writer.write({"a": 2})
    assert not path.exists()


def test_everything_json_can_say_comes_back(tmp_path):
    path = tmp_path / "out.jsonl"
    objects = [{"a": "é漢🙂\u2028\n"}, {"big": 10**30}, {"half": "\\\ud83d"}, [], {"nested": [[{"x": None}]]}]
    with JsonlWriter(path) as writer:
        for obj in objects:
            writer.write(obj)
    assert list(read_lines(path)) == objects
    assert path.read_bytes().startswith('{"a": "é漢🙂'.encode())


SPELLED = st.one_of(
    st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["NaN", "-Infinity", "true", "null", '"\\ud800"', '"\\ud83d\\ude00"', '"9999999999999999999"', '"\x7f."']
    ),
)
"""Texts of numbers as no writer of ours spells them, and what two readers of JSON read in two ways."""


@given(st.lists(SPELLED, min_size=1), st.sampled_from([",", " , ", ",\t"]))
def test_a_line_is_read_as_json_reads_it(values, between):
    text = f'{{"a": [{between.join(values)}]}}'
    found = jsonl.read_line(text.encode())
    assert repr(found) == repr(json.loads(text))  # NaN is not equal to itself, and 1 is to 1.0


NAMES = st.sampled_from(["id", "a", 'b"id": "', "id\\", "\ud800"])
NESTED = st.recursive(
    st.none() | st.integers() | st.text('id":, \\{}[]') | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=some(300), deadline=None)
@given(st.lists(st.dictionaries(NAMES, NESTED, max_size=5) | NESTED, max_size=4), st.sampled_from([16, 1 << 16]))
def test_one_field_of_each_line_is_what_the_whole_line_says(values, chunk):
    expected = [value.get("id") if isinstance(value, dict) else None for value in values]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "a.jsonl")
        path.write_bytes(b"".join(map(jsonl.encode_line, [path] * len(values), values)))
        patch.setattr(jsonl, "_CHUNK", chunk)  # lines with more after the field are parsed whole
        assert list(read_lines(path, field="id")) == expected


def test_a_field_is_read_without_what_stands_before_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"long": nothing that JSON has, "id": 7, "n": {"m": 1}}\n')
    assert list(read_lines(path, field="id")) == [7]
    with pytest.raises(JsonlError, match="line 1"):
        list(read_lines(path, field="m"))


def test_a_broken_line_is_named_with_its_number(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": \n{"n": 4}\n')
    with pytest.raises(JsonlError, match=r"out\.jsonl, line 3: not JSON") as caught:
        list(read_lines(path, torn_tail=True))
    assert caught.value.line == 3


def test_trajectories_go_to_the_documented_files(tmp_path):
    good = save_trajectory(TURNS, "m", True, directory=tmp_path, score=1.0)
    bad = save_trajectory(TURNS, "m", False, directory=tmp_path)
    mine = save_trajectory(TURNS, "m", True, "mine.jsonl", directory=tmp_path, timestamp="t")
    save_trajectory(TURNS, "m", False, "mine.jsonl", directory=tmp_path)
    assert [path.name for path in (good, bad, mine)] == [
        "trajectory_samples.jsonl",
        "failed_trajectories.jsonl",
        "mine.jsonl",
    ]
    expected = {"conversations": TURNS, "timestamp": "t", "model": "m", "completed": True}
    assert mine.read_text().splitlines()[0] == json.dumps(expected)
    assert next(load_trajectories(good))["score"] == 1.0
    assert [len(list(load_trajectories(mine, completed=wanted))) for wanted in (None, True, False)] == [2, 1, 1]


def test_trajectories_go_to_the_working_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert save_trajectory(TURNS, "m", completed=True).resolve() == tmp_path / "trajectory_samples.jsonl"


def test_a_malformed_conversation_is_never_saved_as_completed(tmp_path):
    asked = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c", "content": "invalid arguments"},
    ]
    path = save_trajectory(to_conversations(messages), "m", True, directory=tmp_path)
    assert path.name == "failed_trajectories.jsonl"
    assert next(load_trajectories(path))["completed"] is False


def test_hugging_face_datasets_loads_the_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    odd = "a \u2028 b </tool_call> \ud83d 漢"
    conversion = to_conversations([{"role": "user", "content": odd}, {"role": "assistant", "content": "x"}])
    for number in range(3):
        path = save_trajectory(conversion, "m", True, directory=tmp_path, score=number / 2)
    loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["score"][:] == [0.0, 0.5, 1.0]
    assert loaded[0]["conversations"] == conversion.conversations

    for number, used in enumerate(["terminal", "read_file"]):
        batch = to_batch_entry(
            [{"role": "user", "content": "x"}],
            prompt_index=number,
            metadata={"prompt_source": "gsm8k"},
            completed=True,
            partial=False,
            api_calls=1,
            toolsets_used=[used],
            tool_stats={used: {"count": 1, "success": 1, "failure": 0}},
            all_tools=["terminal", "read_file"],
        )
        append_line(tmp_path / f"batch_{number}.jsonl", batch.entry)
    files = [str(tmp_path / f"batch_{number}.jsonl") for number in range(2)]
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"), split="train")
    assert [row["tool_stats"]["read_file"]["count"] for row in loaded] == [0, 1]
