"""Files: the input's order, nothing lost or doubled after a kill, and errors that name the file and the line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import SettingsError
from lachesis_data.compression import files
from lachesis_data.compression.compressor import MARK, Compressor, Summarizer
from lachesis_data.compression.files import (
    CompressionJob,
    EntrySample,
    compress_file,
    find_jobs,
    left_out,
    read_progress,
)
from lachesis_data.compression.metrics import CompressionTotals, write_metrics
from lachesis_data.compression.settings import CompressionFileSettings
from lachesis_data.compression.summary import Passage, SummaryAnswer, extractive_summary
from lachesis_messages.records.jsonl import JsonlError
from tests.data.compression.examples import Words, agent_entry, extracting, settings_of
from tests.run import some

SETTINGS = settings_of(300, 40)


def run(
    job: CompressionJob,
    summarize: Summarizer | None = None,
    *,
    sample: EntrySample | None = None,
    digest: bytes = b"s",
    **options: Any,
) -> tuple[int, int]:
    """How many entries were finished now, and how many earlier."""
    counts = [0, 0]

    def report(metrics: dict[str, Any], earlier: bool) -> None:
        counts[earlier] += 1

    compressor = Compressor(SETTINGS, Words(), summarize or extracting(Words(), 40))
    options = {"concurrency": 3, "save_over_limit": True, **options}
    asyncio.run(
        compress_file(job, compressor, settings=digest, sample=sample or EntrySample(), report=report, **options)
    )
    return counts[0], counts[1]


@pytest.fixture
def job(tmp_path: Path) -> CompressionJob:
    source = tmp_path / "in.jsonl"
    entries = [{**agent_entry(number % 7 * 3, words=5), "number": number} for number in range(20)]
    source.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return CompressionJob(source, tmp_path / "out" / "in.jsonl")


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_the_output_has_every_entry_in_order(job: CompressionJob) -> None:
    assert run(job) == (20, 0)
    assert numbers(job.output) == list(range(20))
    assert not job.part.exists()
    assert [row["line"] for row in read_progress(job)] == list(range(1, 21))
    assert run(job) == (0, 20)
    assert numbers(job.output) == list(range(20))


def test_a_start_after_any_crash_gives_the_same_file(job: CompressionJob) -> None:
    run(job)
    whole, progress = job.output.read_bytes(), job.progress.read_bytes()

    @settings(max_examples=some(10))
    @given(st.integers(0, len(whole)), st.integers(0, len(progress)))
    def crash(written: int, noted: int) -> None:
        job.output.unlink()
        job.part.write_bytes(whole[:written])
        job.progress.write_bytes(progress[:noted])
        done, earlier = run(job)
        assert done + earlier == 20
        assert job.output.read_bytes() == whole
        assert job.progress.read_bytes() == progress

    crash()


@pytest.mark.parametrize("digests", [True, False])
def test_a_start_after_a_power_loss_compresses_again_what_the_disk_lost(job: CompressionJob, digests: bool) -> None:
    """Progress of older versions has no digests of the output, and is continued."""
    run(job)
    whole, rows = job.output.read_bytes(), [json.loads(line) for line in job.progress.read_text().splitlines()]
    if not digests:
        old = [{name: value for name, value in row.items() if name != "output"} for row in rows]
        job.progress.write_text("".join(json.dumps(row) + "\n" for row in old))
    job.output.rename(job.part)
    with job.part.open("r+b") as file:
        file.seek(rows[11]["offset"] + 10)
        file.write(bytes(rows[12]["offset"] - rows[11]["offset"]))
    assert run(job) == ((8, 12) if digests else (0, 20))
    assert (job.output.read_bytes() == whole) is digests


def run_and_die(job: CompressionJob, lines: int) -> None:
    """Kill this process in the middle of the line of this number, of an entry or of its row."""
    append, left = files._append, lines

    def dying(file: IO[bytes], path: Path, value: Any) -> bytes:
        nonlocal left
        left -= 1
        if not left:
            file.write(b'{"torn')
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return append(file, path, value)

    files._append = dying
    run(job)


def test_kill_9_and_resume_loses_and_doubles_nothing(job: CompressionJob) -> None:
    run(job)
    whole = job.output.read_bytes()
    job.output.unlink()
    job.progress.unlink()
    for lines in (7, 12):
        child = get_context("fork").Process(target=run_and_die, args=(job, lines))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    assert run(job) == (20 - 8, 8)
    assert job.output.read_bytes() == whole


def test_an_edited_input_is_compressed_again_from_the_edit_on(job: CompressionJob) -> None:
    run(job)
    lines = job.source.read_text().splitlines(keepends=True)
    lines[5] = json.dumps({**agent_entry(1), "number": 99}) + "\n"
    job.source.write_text("".join(lines[:8]))
    assert run(job) == (3, 5)
    assert numbers(job.output) == [0, 1, 2, 3, 4, 99, 6, 7]
    assert run(job, digest=b"other settings") == (8, 0)


def test_a_sample_depends_on_the_seed_only(job: CompressionJob) -> None:
    run(job, sample=EntrySample(50, seed=1))
    chosen = numbers(job.output)
    assert 3 < len(chosen) < 17
    assert run(job, sample=EntrySample(50, seed=1)) == (0, len(chosen))
    run(job, sample=EntrySample(50, seed=2), digest=b"2")
    assert numbers(job.output) != chosen


def test_entries_over_the_limit_can_be_left_out(job: CompressionJob) -> None:
    lines = [*job.source.read_text().splitlines(), json.dumps({"number": 20, **agent_entry(1, words=2000)})]
    job.source.write_text("\n".join(lines))
    run(job)
    assert numbers(job.output) == list(range(21))
    run(job, digest=b"2", save_over_limit=False)
    assert numbers(job.output) == list(range(20))
    assert len(list(read_progress(job))) == 21


def test_a_line_that_is_no_json_is_named_and_what_is_before_it_stays(job: CompressionJob) -> None:
    lines = job.source.read_text().splitlines(keepends=True)
    job.source.write_text("".join([*lines[:7], '{"conversations": NaN}\n', *lines[7:]]))
    with pytest.raises(JsonlError, match=r"in\.jsonl, line 8: not JSON"):
        run(job)
    assert numbers(job.part) == list(range(7))
    job.source.write_text("".join(lines))
    assert run(job) == (13, 7)


def test_strange_text_passes_through(job: CompressionJob) -> None:
    entry = {**agent_entry(20), "number": 1 << 70}
    entry["conversations"][9]["value"] = "<tool_response>\n\ud800 \x00 \u2028\n</tool_response>"
    job.source.write_bytes(b"\xef\xbb\xbf" + json.dumps(entry).encode() + b"\r\n\n")
    run(job)
    (line,) = job.output.read_bytes().splitlines()
    done = json.loads(line)
    assert done["number"] == 1 << 70
    assert done[MARK]["was_compressed"]
    assert done["conversations"][-4:] == entry["conversations"][-4:]


def test_an_incomplete_last_line_is_named_and_the_next_start_goes_on(job: CompressionJob) -> None:
    whole = job.source.read_bytes()
    job.source.write_bytes(whole[:-50])
    with pytest.raises(JsonlError, match=r"in\.jsonl, line 20: not JSON.*still writes"):
        run(job)
    job.source.write_bytes(whole)
    assert run(job) == (1, 19)
    assert numbers(job.output) == list(range(20))


def test_what_is_appended_to_the_input_meanwhile_is_compressed_too(job: CompressionJob) -> None:
    more = [json.dumps({**agent_entry(1), "number": number}) + "\n" for number in range(20, 40)]

    async def summarize(passages: Sequence[Passage]) -> SummaryAnswer:
        with job.source.open("a") as file:
            file.writelines(more)
            more.clear()
        return SummaryAnswer(extractive_summary(passages, 40, Words().text))

    assert run(job, summarize) == (40, 0)
    assert numbers(job.output) == list(range(40))


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 16 kB, mounted by root."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("no mounts here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_named_and_the_next_start_goes_on(job: CompressionJob, small_disk: Path) -> None:
    run(job)
    small = CompressionJob(job.source, small_disk / "out.jsonl")
    with pytest.raises(JsonlError, match=r"out\.jsonl.*No space left.*choose a folder"):
        run(small)
    with pytest.raises(JsonlError, match=r"m\.json: cannot be written \(No space left"):
        write_metrics(small_disk / "m.json", CompressionTotals(), read_progress(job))
    assert sorted(path.name for path in small_disk.iterdir()) == ["out.jsonl.part", "out.jsonl.progress"]
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    done, earlier = run(small)
    assert done + earlier == 20
    assert earlier
    assert small.output.read_bytes() == job.output.read_bytes()


def test_a_folder_that_cannot_be_written_is_named(job: CompressionJob, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(JsonlError, match=r"out\.jsonl\.progress: cannot write \(Read-only file system\); choose"):
        run(CompressionJob(job.source, small_disk / "out.jsonl"))
    with pytest.raises(JsonlError, match=r"in\.jsonl\.progress: cannot write \(File exists\); choose"):
        run(CompressionJob(job.source, job.source / "in.jsonl"))


def test_two_processes_do_not_write_one_output(job: CompressionJob) -> None:
    job.progress.parent.mkdir()
    with job.progress.open("w") as file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(JsonlError, match="another process writes it"):
            run(job)


def test_the_names_of_outputs(tmp_path: Path) -> None:
    source = tmp_path / "runs"
    source.mkdir()
    with pytest.raises(SettingsError, match=r"has no \*.jsonl file"):
        find_jobs(source, None, "_compressed")
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (source / name).write_text("")
    assert find_jobs(source, None, "_c") == [
        CompressionJob(source / f"{n}.jsonl", tmp_path / "runs_c" / f"{n}.jsonl") for n in "ab"
    ]
    of_run = ("groups.jsonl", "groups.failed.jsonl", "groups.judge.jsonl", "groups.discarded.jsonl", "judge.jsonl")
    for name in (*of_run, "groups.run.json", "samples.run.json"):
        (source / name).write_text("")
    assert [job.source.name for job in find_jobs(source, None, "_c")] == ["a.jsonl", "b.jsonl"]
    (source / "trajectory_samples.jsonl").write_text("")
    jobs = find_jobs(source, None, "_c")
    assert [job.source.name for job in jobs] == ["trajectory_samples.jsonl"]
    assert [path.name for path in left_out(source, jobs)] == ["a.jsonl", "b.jsonl"]
    (alone := tmp_path / "alone").mkdir()
    for name in ("groups.jsonl", "groups.run.json"):
        (alone / name).write_text("")
    with pytest.raises(SettingsError, match=r"has groups and no trajectories.*lachesis export .* --format hermes"):
        find_jobs(alone, None, "_c")
    assert find_jobs(source / "a.jsonl", None, "_c") == [CompressionJob(source / "a.jsonl", source / "a_c.jsonl")]
    assert find_jobs(source / "a.jsonl", tmp_path, "_c") == [CompressionJob(source / "a.jsonl", tmp_path / "a.jsonl")]
    with pytest.raises(SettingsError, match="is the input itself"):
        find_jobs(source, source, "_c")
    for name in ("d.part", "d.progress"):
        (tmp_path / name).write_text("")
        with pytest.raises(SettingsError, match="is the input itself"):
            find_jobs(tmp_path / name, tmp_path / "d", "_c")
    with pytest.raises(SettingsError, match="there is no file or folder"):
        find_jobs(tmp_path / "none", None, "_c")


def test_the_metrics_file_adds_up(job: CompressionJob, tmp_path: Path) -> None:
    run(job)
    totals = CompressionTotals()
    for row in read_progress(job):
        totals.add(row)
    write_metrics(tmp_path / "m.json", totals, read_progress(job))
    read = json.loads((tmp_path / "m.json").read_text())
    rows = read["trajectories"]
    assert read["summary"]["total_trajectories"] == len(rows) == 20
    for name, total in (("original_tokens", "total_before"), ("compressed_tokens", "total_after")):
        assert read["tokens"][total] == sum(row[name] for row in rows)
    assert read["summary"]["trajectories_compressed"] == sum(row["was_compressed"] for row in rows) > 0
    write_metrics(tmp_path / "m.json", totals, None)
    assert "trajectories" not in json.loads((tmp_path / "m.json").read_text())


def test_the_defaults_in_the_repository_name_every_setting() -> None:
    import yaml

    given = yaml.safe_load((Path(__file__).parents[3] / "configs" / "trajectory_compression.yaml").read_text())
    known = {section: set(values) for section, values in CompressionFileSettings().model_dump().items()}
    assert {section: set(values) for section, values in given.items()} == known
