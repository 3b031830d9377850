"""An environment written for the removed stack plays unmodified, from a copy that knows nothing of this tree."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.fake_server import FakeServer, fake_tokenizer
from tests.support.scripted_server import call, say
from tests.support.small_envs import does_nothing, lines, rollouts, served

ENV = Path(__file__).parent / "old_style_env.py"


def writes_the_note(request: dict[str, Any]) -> Any:
    if request["messages"][-1]["role"] == "tool":
        return say("Done.", reasoning_content="It is written.")
    place = re.search(r"the word (\w+)", request["messages"][-1]["content"])
    assert place is not None
    return call(("terminal", {"command": f"echo {place[1]} > ~/note.txt"}))


def start(folder: Path, command: str, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the environment as a script, as its users do."""
    script = folder / "deep" / "er" / "notes_env.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ENV, script)
    script.with_name(".env").write_text(f"NOTES_VERDICTS={folder / 'verdicts'}\nOPENROUTER_API_KEY=of-the-file\n")
    server = ["--openai.base_url", url, "--openai.model_name", "scripted", "--openai.health_check", "false"]
    arguments = [command, "--slurm", "false", "--testing", "False", *server, *flags]
    arguments += ["--env.data_path_to_save_groups", str(folder / "groups.jsonl")]
    arguments += ["--env.data_dir_to_save_evals", str(folder / "eval")]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )


def mean_reward(folder: Path) -> float:
    written = json.loads((folder / "eval" / "metrics.json").read_text())
    return float(written["results"]["all"]["eval/mean_reward"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("policy", "score"), [(writes_the_note, 1.0), (does_nothing, 0.0)])
def test_process_gives_the_score_of_the_agents_work(
    tmp_path: Path, policy: Callable[[dict[str, Any]], Any], score: float
) -> None:
    with served(policy) as server:
        done = start(tmp_path, "process", server.base_url)
    assert done.returncode == 0, done.stderr
    assert [group["scores"] for group in lines(tmp_path / "groups.jsonl")] == [[score, score]] * 2
    assert all(rollout["traceback"] is None for rollout in rollouts(tmp_path / "groups.jsonl"))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer of-the-file"}
    assert "pool of 16" in done.stdout
    said = done.stderr
    assert "no setting not_a_setting: left out" in said
    assert re.search(r"note: .*env.tool_pool_size.*removed stack's pools", said)
    assert "skipped toolsets that have no tools here: web" in said


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("policy", "score"), [(writes_the_note, 1.0), (does_nothing, 0.0)])
def test_evaluate_with_loops_and_contexts_made_by_hand(
    tmp_path: Path, policy: Callable[[dict[str, Any]], Any], score: float
) -> None:
    with served(policy) as server:
        done = start(tmp_path, "evaluate", server.base_url)
    assert done.returncode == 0, done.stderr
    assert mean_reward(tmp_path) == score
    samples = lines(tmp_path / "eval" / "samples.jsonl")
    assert {sample["where"] for sample in samples} == {"/app"}
    assert "images of single tasks have no effect" in done.stderr and "someone/notes:1" in done.stderr


@pytest.mark.slow
def test_a_broken_server_is_no_score_although_the_environment_catches_it(tmp_path: Path) -> None:
    with served(lambda _: 500) as server:
        done = start(tmp_path, "evaluate", server.base_url, "--openai.max_retries", "0")
    assert done.returncode == 1
    assert "the infrastructure failed 2 times during its evaluation" in done.stderr
    assert "500" in done.stderr


def _hermes(texts: Sequence[str]) -> Callable[[Any], str]:
    return lambda ask: texts[min(ask.turn, len(texts) - 1)]


@pytest.mark.slow
async def test_with_exact_tokens_the_last_node_is_the_whole_conversation(tmp_path: Path) -> None:
    tokenizer = fake_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    note = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo north > ~/note.txt"}}\n</tool_call>'
    async with FakeServer(_hermes([note, "Done."]), tokenizer=tokenizer) as fake:
        flags = ["--openai.server_type", "vllm", "--openai.model_name", "fake", "--env.places", "[north]"]
        flags += ["--openai.tokenizer_name", str(tmp_path / "tokenizer")]

        done = await asyncio.to_thread(start, tmp_path, "evaluate", fake.base_url, *flags)
    assert done.returncode == 0, done.stderr
    assert mean_reward(tmp_path) == 1.0
    ((_, trained),) = lines(tmp_path / "eval" / "samples.jsonl")[0]["nodes"]
    sampled = [len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in (note, "Done.")]
    assert trained == sum(sampled)
