"""Runs of the first version are read, exported, checked and continued by this one, without a byte of them changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILES = Path(__file__).with_name("files.tar.xz")
EXPORTS = ("hermes", "sharegpt-tools", "openai", "trl", "parquet", "atif", "trajectory", "dataset", "inspect")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def lachesis(*arguments: str, at: Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "lachesis", *arguments]
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def serving(*arguments: str, at: Path) -> Iterator[str]:
    """The URL that a verb prints in its first line."""
    command = [sys.executable, "-m", "lachesis", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://[\w.]+:\d+", line)
            assert address, line
            yield address[0]
        finally:
            process.terminate()


def finished(folder: Path) -> list[str]:
    return (folder / "groups.jsonl").read_text(encoding="utf-8").splitlines()


def test_samples_are_checked(first: Path) -> None:
    (checked,) = json.loads(lachesis("verify", "--json", "data/tokens/groups.jsonl", at=first))["files"]
    assert checked["sampled"] == checked["delivered"] == 676


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", EXPORTS)
def test_a_run_is_exported(first: Path, form: str) -> None:
    out = {"inspect": "out.eval", "parquet": "out.parquet"}.get(form, "out.jsonl")
    lachesis("export", "data/terminal-test", "--format", form, "--out", out, at=first)
    assert (first / out).stat().st_size > 0


def test_a_run_with_tokens_is_exported_as_samples(first: Path) -> None:
    lachesis("export", "data/tokens", "--format", "samples", "--out", "out.jsonl", at=first)
    assert len((first / "out.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_reports_and_comparisons_are_made(first: Path) -> None:
    lachesis("report", "data/tokens/groups.jsonl", at=first)
    assert "terminal-test" in (first / "data/tokens/groups.html").read_text(encoding="utf-8")
    compared = lachesis("eval", "compare", "data/terminal-test/eval", "data/terminal-test/eval", at=first)
    assert "1.000" in compared


@pytest.mark.parametrize("verb", ["process", "eval"])
def test_a_run_goes_on(first: Path, verb: str) -> None:
    folder, name = first / "data/terminal-test", "groups.jsonl"
    if verb == "eval":
        folder, name = folder / "eval", "samples.jsonl"
    before = (folder / name).read_bytes()
    printed = lachesis(verb, "terminal", "-n", "3", "-r", "2", "-m", "reference", at=first)
    assert f"continuing data/{(folder / name).relative_to(first / 'data')}" in printed
    assert (folder / name).read_bytes().startswith(before)


@pytest.mark.slow
def test_a_run_with_tokens_and_a_batch_go_on(first: Path) -> None:
    runs = {run: finished(first / "data" / run) for run in ("tokens", "batch")}
    with (first / "prompts.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"prompt": "What is here?"}\n')
    with serving("fake-server", "--policy", "tools", "--save-tokenizer", "elsewhere", at=first) as url:
        server = ("-m", "fake", "-b", f"{url}/v1")
        tokens = ("--openai.server_type", "vllm", "--openai.tokenizer_name", "elsewhere")
        lachesis("process", "terminal", "-n3", "-r2", *server, *tokens, "-o", "data/tokens", at=first)
        lachesis(
            *("batch", "--dataset_file", "prompts.jsonl", "--batch_size", "1", "--run_name", "batch"),
            *("--model", "fake", "--base_url", f"{url}/v1", "--distribution", "terminal_only"),
            "--keep_without_reasoning",
            at=first,
        )
    for run, before in runs.items():
        now = finished(first / "data" / run)
        assert (now[:2], len(now)) == (before, 3), run


def test_a_trainer_gets_the_groups_that_wait(first: Path) -> None:
    with serving("api", "--db", "data/api.db", at=first) as url:
        with urllib.request.urlopen(f"{url}/status", timeout=60) as answer:
            assert json.load(answer)["queue_size"] == 4
        with urllib.request.urlopen(f"{url}/batch", timeout=60) as answer:
            batch = json.load(answer)["batch"]
    assert sum(len(group["tokens"]) for group in batch) == 8


def test_the_viewer_shows_every_run(first: Path) -> None:
    missing = {"batch", "tokens", "terminal-test", "terminal-test/eval"}
    with serving("view", "data", at=first) as url:
        for _ in range(100):  # the folder is read while the first pages are shown
            with urllib.request.urlopen(url, timeout=60) as page:
                shown = page.read().decode()
            missing = {run for run in missing if f'href="/run/{run}"' not in shown}
            if not missing:
                break
            time.sleep(0.2)
    assert missing == set()
