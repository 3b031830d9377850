"""What a recording makes of conversations, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tokenizers.processors import TemplateProcessing

from lachesis.loop.outcome import Outcome
from lachesis_messages.records.export_lines import ExportLine, LeftOutRollout, trajectory
from lachesis_testing.fake_server import Ask, Scripted, fake_tokenizer
from lachesis_tokens.endpoint import Recording, RecordingEndpoint
from lachesis_tokens.prompts.prompts import PromptBuilder
from tests.support.exactness import Stack, assert_exact, stack

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TWO_CALLS = "\n".join(
    f'<tool_call>\n{{"name": "look", "arguments": {{"path": "{name}", "n": 1.0}}}}\n</tool_call>' for name in "ab"
)


IDS = (
    "{% for m in messages %}{% set ids = (m.tool_calls or [])|map(attribute='id')|list + [m.tool_call_id or 9 * '*'] %}"
    "{% for id in ids %}{% if id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS] [{{ c.function|tojson }}]{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes the ids of results and checks their length."""


class Client:
    """Asks the chat route and fails where it does."""

    def __init__(self, recording: Recording, http: aiohttp.ClientSession) -> None:
        self.recording, self.http = recording, http

    async def post(self, messages: list[Any], **more: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": messages, **more}
        async with self.http.post(f"{self.recording.base_url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def ask(self, messages: list[Any], **more: Any) -> Any:
        status, answer = await self.post(messages, **more)
        assert status == 200, answer
        return answer["choices"][0]["message"]


@asynccontextmanager
async def opened(world: Stack, **options: Any) -> AsyncIterator[Client]:
    async with RecordingEndpoint(world.tokens) as endpoint, aiohttp.ClientSession() as http:
        yield Client(endpoint.open(**options), http)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def result(call_id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@pytest.mark.parametrize("ids", [("x", "y"), ("same", "same"), ("swapped", "")])
async def test_call_ids_that_a_client_changes_are_matched_by_position(ids: tuple[str, str]) -> None:
    async with stack(policy=Scripted(TWO_CALLS, "Done.", by_turn=True)) as world, opened(world) as client:
        first = await client.ask([user("?")], tools=TOOLS)
        own = [call["id"] for call in first["tool_calls"]]
        new = own[::-1] if ids[0] == "swapped" else list(ids)
        calls = [{**call, "id": name} for call, name in zip(first["tool_calls"], new, strict=True)]
        for call in calls:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        results = [result(new[0], "in a"), result(new[1], "in b")]
        await client.ask([user("?"), {"role": "assistant", "tool_calls": calls}, *results], tools=TOOLS)
        history = client.recording.history()
        assert len(assert_exact(world, history)) == 1
        assert [message["tool_call_id"] for message in history if message["role"] == "tool"] == own


async def test_of_two_equal_answers_the_one_with_the_continuation_is_found_without_its_reasoning() -> None:
    thoughts = iter(["first", "second"])

    def say(ask: Ask) -> str:
        return "Done." if ask.turn else f"<think>\n{next(thoughts)}\n</think>\n\nThe same."

    async with stack(policy=say) as world, opened(world) as client:
        await client.ask([user("?")])
        second = await client.ask([user("?")])
        assert second["reasoning_content"] == "second"
        talk = [user("?"), {"role": "assistant", "content": "The same."}, user("And?")]
        third = await client.ask([talk[0], second, talk[2]])
        await client.ask([*talk, third, user("So?")])
        history = client.recording.history()
        assert [response.message.reasoning for response in history.responses()] == ["second", None, None]
        assert len(assert_exact(world, history)) == 2


async def test_the_path_is_the_main_conversation_and_all_others_are_branches() -> None:
    async with stack() as world, opened(world) as client:
        for said in ("One.", "Two.", "Three.", "Four.", "Five."):
            world.says.next = (said,)
            match said:
                case "One.":
                    main: list[Any] = [system("Work."), user("?")]
                case "Two.":
                    await client.ask([system("Find a title."), user("?")])
                    continue
                case "Four.":
                    await client.ask([system("Search."), user("Where?")])
                    continue
            main += [await client.ask(main), user("Go on.")]
        outcome = client.recording.result(Outcome.COMPLETED, "the program ended")
        assert [response.message.text for response in outcome.history.responses()] == ["One.", "Three.", "Five."]
        assert outcome.final_response == "Five." and outcome.turns_used == 3 and outcome.api_calls == 5
        branches = [[node.message.text for node in branch.nodes] for branch in outcome.history.discarded]
        assert branches == [["Find a title.", "?", "Two."], ["Search.", "Where?", "Four."]]
        assert [response.message.text for response in outcome.history.completions()] == [
            *("One.", "Two.", "Three.", "Four.", "Five.")
        ]
        assert len(assert_exact(world, outcome.history)) == 3
        assert "Five." in outcome.history.to_mermaid()


@pytest.mark.parametrize(
    ("turns", "head"),
    [
        ("abbbba", 5),  # a sub-agent with more turns than the agent
        ("tabbbat", 5),  # titles before and after
        ("aaaAbbbA", 7),  # a compaction, then a sub-agent
        ("ab", 1),  # a plan, then its execution
        ("stuv", 3),  # a system message that always changes
    ],
)
async def test_the_main_conversation_encloses_those_of_its_sub_agents(turns: str, head: int) -> None:
    talks: dict[str, list[Any]] = {}
    async with stack() as world, opened(world) as client:
        for turn, name in enumerate(turns):
            if name not in talks or name == "t":
                talks[name] = [system(name.lower())]
            world.says.next = (f"Answer {turn}.",)
            talks[name] += [user(f"Now {turn}.")]
            talks[name] += [await client.ask(talks[name])]
        history = client.recording.history()
        assert history[-1]["content"] == f"Answer {head}."
        assert assert_exact(world, history)[0].spans[-1].turn == head


async def exported(client: Client) -> tuple[list[Any], list[str]]:
    """The trajectory lines of a group with this rollout, and the reasons why it has none."""
    rollout = client.recording.result(Outcome.COMPLETED, "the program ended")
    record: Any = {
        "environment": "e",
        "item_key": "k",
        "model": "m",
        "timestamp": "2026-01-01T00:00:00",
        "tools": TOOLS,
        "messages": [],
        "rollouts": [
            {
                "rollout_id": "r",
                "place": None,
                "outcome": "completed",
                "reward": 1.0,
                "completed": True,
                "messages": rollout.recorded_messages,
            }
        ],
    }
    found = list(trajectory(record))
    lines = [line.content for line in found if isinstance(line, ExportLine)]
    return lines, [each.reason for each in found if isinstance(each, LeftOutRollout)]


async def test_a_conversation_that_ends_with_calls_is_a_trajectory_that_is_not_complete() -> None:
    async with stack(policy=Scripted(TWO_CALLS)) as world, opened(world) as client:
        await client.ask([user("?")], tools=TOOLS)
        ((line,), left_out) = await exported(client)
        assert line["completed"] is False and line["conversations"][-1]["from"] == "gpt" and not left_out
        history = client.recording.history()
        history.append(user("More."))  # an environment may go on with it
        assert len(history) == 3


async def test_a_conversation_that_breaks_the_rules_of_a_format_is_left_out_with_the_reason() -> None:
    async with stack(policy=Scripted("Fine.")) as world, opened(world) as client:
        await client.ask([user("?"), result("nobody_asked", "x"), user("So?")])
        assert await exported(client) == ([], ["no valid conversation (UnexpectedToolResult)"])
        assert len(assert_exact(world, client.recording.history())) == 1


@pytest.mark.slow
async def test_a_conversation_of_several_megabytes_is_answered() -> None:
    prompts = PromptBuilder(fake_tokenizer())
    async with stack(prompts.tokenizer, prompts=prompts, context_length=10**7) as world, opened(world) as client:
        large = "x" * 5_000_000
        first = await client.ask([user(large)], max_tokens=5)
        await client.ask([user(large), first, user("And?")], max_tokens=5)
        assert len(assert_exact(world, client.recording.history())) == 1


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on() -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as client:
        body = {"messages": [user("?")]}
        url = f"{client.recording.base_url}/v1/chat/completions"
        async with asyncio.timeout(60), client.http.post(url, json=body, expect100=True) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "Hi."


@pytest.mark.parametrize("wait", [0.0, 60.0])
async def test_closing_cancels_or_waits_for_what_is_in_flight(wait: float) -> None:
    async with stack(policy=Scripted("Hi."), latency=1.0 if wait else 60.0) as world, opened(world) as client:
        asked = asyncio.create_task(client.post([user("?")]))
        await until(lambda: world.fake.requests)
        await client.recording.close(wait=wait)
        assert (await asked)[0] == (200 if wait else 410)
        assert len(client.recording.completions()) == (1 if wait else 0)
        assert (await client.post([user("?")]))[0] == 410


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    async with stack(policy=Scripted("Hi."), latency=60.0) as world, opened(world) as client:
        asked = asyncio.create_task(client.ask([user("?")], stream=stream))
        await until(lambda: world.fake.requests)
        asked.cancel()
        await until(lambda: world.fake.stats["cancelled"])
        assert world.fake.stats["cancelled"] == 1 and not client.recording.completions()
        assert client.recording.error is None


async def test_the_sampled_tokens_of_a_rollout_have_a_limit() -> None:
    async with stack(policy=Scripted("word " * 50)) as world, opened(world, rollout_token_budget=30) as client:
        assert (await client.post([user("?")], max_tokens=20))[0] == 200
        assert (await client.post([user("?")]))[0] == 200
        status, answer = await client.post([user("?")])
        assert status == 403 and "30 sampled tokens" in answer["error"]["message"]
        assert sum(len(response.tokens or ()) for response in client.recording.completions()) == 30
        assert client.recording.limit


@pytest.mark.parametrize(
    ("error", "of_the_machine"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (MemoryError(), True),
        (OSError("not an image"), False),  # as pillow says of the bytes of a request
        (KeyError("role"), False),
    ],
)
async def test_a_machine_that_fails_is_told_from_a_request_that_cannot_be_read(
    error: Exception, of_the_machine: bool
) -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as recording:
        assert (await recording.post([user("?")]))[0] == 200
        recording.recording.failed(error)
        assert (recording.recording.error is error) is of_the_machine


async def test_only_requests_that_are_answered_count_as_such() -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world, max_requests=2) as client:
        assert (await client.post([user("?")], n=2))[0] == 200
        for _ in range(3):
            assert (await client.post([user("?")], tool_choice="required"))[0] == 400
        assert (await client.post([user("!")]))[0] == 200 and client.recording.requests == 2
        assert (await client.post([user("!")]))[0] == 403 and client.recording.limit


async def test_requests_at_once_share_the_limit_and_none_is_cut_off_for_another() -> None:
    policy = Scripted("word " * 10)
    async with stack(policy=policy, latency=0.1) as world, opened(world, rollout_token_budget=60) as client:
        asked = (client.post([user(f"{n}?")], max_tokens=25) for n in range(9))
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        answers = [len(response.tokens or ()) for response in client.recording.completions()]
        assert sum(answers) == 60 and client.recording.limit, "as if they had come one after the other"
        assert statuses.count(200) == len(answers) and statuses.count(403) == 9 - len(answers)
        assert answers[:-1] == [answers[0]] * (len(answers) - 1), "only the last one had less than it asked for"


async def test_a_conversation_that_the_template_cannot_write_leaves_the_rollout_without_a_score() -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    prompts = PromptBuilder(fake_tokenizer(), chat_template=template)
    async with stack(prompts.tokenizer, prompts=prompts) as world, opened(world) as client:
        status, answer = await client.post([system("Work."), user("?")])
        assert status == 400 and "no system" in answer["error"]["message"]
        assert client.recording.result(Outcome.COMPLETED, "ended").outcome is Outcome.INFRA_ERROR


@pytest.mark.parametrize(
    "messages",
    [
        *([], "hi", [{"role": "king", "content": "?"}], [{"role": "user"}], [{"role": "user", "content": 3}]),
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}],
    ],
)
async def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    async with stack() as world, opened(world) as client:
        status, answer = await client.post(messages)
        assert status == 400 and answer["error"]["message"]
        assert client.recording.refused and not client.recording.completions()


async def test_a_request_whose_body_comes_after_the_closing_is_refused() -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as client:
        begun, closed = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            begun.set()
            await closed.wait()
            yield json.dumps([user("?")]).encode() + b"}"

        async def post() -> int:
            url = f"{client.recording.base_url}/v1/chat/completions"
            async with client.http.post(url, data=body()) as response:
                return response.status

        asked = asyncio.create_task(post())
        await begun.wait()
        await asyncio.sleep(0.05)
        await client.recording.close()
        closed.set()
        assert await asked == 410 and not client.recording.completions()


async def test_closed_recordings_are_forgotten_and_their_keys_still_known() -> None:
    async with stack() as world, RecordingEndpoint(world.tokens) as endpoint, aiohttp.ClientSession() as http:
        recordings = [endpoint.open() for _ in range(50)]
        for recording in recordings:
            await recording.close()
        kept = [value for value in vars(endpoint).values() if isinstance(value, (dict, set, list))]
        assert kept and not any(kept)
        for key, status in ((recordings[7].key, 410), ("sk-lachesis-other", 401)):
            async with http.get(f"{endpoint.root_url}/v1/models", headers={"Authorization": f"bearer {key}"}) as answer:
                assert answer.status == status


async def test_a_program_with_one_client_names_its_rollouts_by_session() -> None:
    async with stack() as world, RecordingEndpoint(world.tokens) as endpoint, aiohttp.ClientSession() as http:
        one, other = endpoint.open(), endpoint.open()
        endpoint.accept_session("one", one)
        endpoint.accept_session("also-one", one)
        endpoint.accept_session("other", other)

        async def ask(session: str, **headers: str) -> int:
            body = {"model": "m", "messages": [user(f"I am {session}.")]}
            headers |= {"X-Session-ID": session}
            async with http.post(f"{endpoint.root_url}/v1/chat/completions", json=body, headers=headers) as answer:
                return answer.status

        key = {"Authorization": f"Bearer {other.key}"}
        asked = [ask("one"), ask("also-one"), ask("other"), ask("nobody"), ask("one", **key)]
        assert await asyncio.gather(*asked) == [200, 200, 200, 401, 200], "a key has precedence"
        assert [len(each.completions()) for each in (one, other)] == [2, 2]
        await one.close()
        assert [await ask("one"), await ask("other")] == [401, 200]


async def test_a_body_that_cannot_be_unpacked_is_refused_in_the_form_of_the_route() -> None:
    async with stack() as world, opened(world) as client:
        url, headers = f"{client.recording.base_url}/v1/messages", {"Content-Encoding": "gzip"}
        async with client.http.post(url, data=b"{}", headers=headers, compress=False) as response:
            assert response.status == 400 and (await response.json())["type"] == "error"
        assert client.recording.refused and client.recording.error is None


@pytest.mark.parametrize("packing", ["gzip", "deflate"])
async def test_compressed_bodies_are_unpacked_one_at_a_time_and_up_to_the_limit(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_tokens.endpoint.endpoint._LARGEST_REQUEST", 1 << 20)
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as client:

        async def sent(raw: bytes) -> int:
            url, headers = f"{client.recording.base_url}/v1/chat/completions", {"Content-Encoding": packing}
            async with client.http.post(url, data=raw, headers=headers) as response:
                return response.status

        pack = gzip.compress if packing == "gzip" else zlib.compress
        raw = pack(json.dumps({"messages": [user("?")]}).encode())
        async with client.recording.reading:
            waiting = asyncio.create_task(sent(raw))
            await asyncio.sleep(0.2)
            assert not waiting.done() and not world.fake.requests
        assert await waiting == 200
        assert await sent(pack(b" " * (1 << 20) + b"{}")) == 413
        assert await sent(raw[:-6]) == 400
        assert client.recording.error is None


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": []}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": []}]}),
        ("/v1/chat/completions", {"messages": [user("?")], "stream": True, "stream_options": [1]}),
        ("/v1/chat/completions", {"messages": [{**user("?"), "more": nested(900)}]}),
        ("/v1/completions", {"prompt": "?", "stream": True, "stream_options": 5}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/responses", {"input": "?", "text": {"format": "x"}}),
        ("/generate", {"text": ""}),
        ("/v1/completions", {"prompt": [2**32]}),
        ("/v1/completions", {"prompt": [[5], [2**70]]}),
        ("/generate", {"input_ids": [2**31 - 1]}),
    ],
)
async def test_what_a_client_writes_wrongly_is_no_failure_of_the_infrastructure(route: str, body: Any) -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as client:
        async with client.http.post(client.recording.base_url + route, json=body) as response:
            assert response.status == 400, await response.text()
        assert client.recording.refused and client.recording.error is None and not world.fake.requests


async def test_a_defect_that_a_request_meets_is_logged_and_the_rollout_keeps_its_score(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(policy=Scripted("Hi.")) as world, opened(world) as client:
        await client.ask([user("?")])
        with monkeypatch.context() as broken:
            broken.setattr(PromptBuilder, "prompt", lambda *_: [][1])
            for _ in range(2):
                status, answer = await client.post([user("!")])
                assert status == 500 and "IndexError" in answer["error"]["message"]
        await client.ask([user("?")])
        outcome = client.recording.result(Outcome.COMPLETED, "").outcome
    assert outcome is Outcome.COMPLETED
    assert caplog.text.count("Traceback") == 1 and "IndexError" in caplog.text


async def test_of_equal_answers_the_one_that_a_client_names_is_continued() -> None:
    tokens = iter([["Th", "e same."], ["The", " same."], ["Done."]])

    def say(ask: Ask) -> Any:
        return ask.ended([index for part in next(tokens) for index in ask.codec.encode(part)])

    async with stack(policy=say) as world, opened(world) as client:

        async def respond(**body: Any) -> str:
            async with client.http.post(f"{client.recording.base_url}/v1/responses", json=body) as response:
                return str((await response.json())["id"])

        await respond(input="?")
        second = await respond(input="?")
        await respond(input="And?", previous_response_id=second)
        first, other, last = (seen.call and list(seen.call.prompts[0]) for seen in world.fake.requests)
        sampled = [seen.completions[0].ids for seen in world.fake.requests]
        assert first == other and sampled[0] != sampled[1]
        assert last and other and last[: len(other) + len(sampled[1])] == [*other, *sampled[1]]
        assert len(assert_exact(world, client.recording.history())) == 2


async def test_results_name_the_call_ids_that_the_model_wrote() -> None:
    """The template writes ids, of one length, and the model writes the same id every turn."""
    call = '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "abcdefghi"}]'
    prompts, says = PromptBuilder(fake_tokenizer(), chat_template=IDS), Scripted(call, call, "Done.")
    async with stack(policy=says, prompts=prompts, parser="mistral") as world, opened(world) as client:
        talk: list[Any] = [user("?")]
        told = []
        for _ in range(3):
            talk.append(answer := await client.ask(talk, tools=TOOLS))
            for each in answer.get("tool_calls") or ():
                told.append(each["id"])
                talk.append(result(each["id"], "here"))
        assert len(told) == len(set(told)) == 2 and {len(each) for each in told} == {9}
        assert len(assert_exact(world, client.recording.history())) == 1
        assert world.text(world.last_prompt).count("(abcdefghi)here") == 2


async def test_a_text_is_continued_after_a_token_that_the_tokenizer_put_before_it() -> None:
    prompts = PromptBuilder(tokenizer := fake_tokenizer())
    end = "<|im_end|>"
    before = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))])
    tokenizer.backend_tokenizer.post_processor = before

    def say(ask: Ask) -> Any:
        return [index for letter in "river" for index in ask.codec.encode(letter)]

    async with stack(tokenizer, prompts=prompts, policy=say) as world, opened(world) as client:
        prompt = "A"
        for _ in range(2):
            body = {"prompt": prompt, "max_tokens": 5}
            async with client.http.post(f"{client.recording.base_url}/v1/completions", json=body) as response:
                prompt += (await response.json())["choices"][0]["text"] + " and"
        assert len(assert_exact(world, client.recording.history(), verifies=False)) == 1


async def test_one_request_has_128_answers_at_most() -> None:
    async with stack(policy=Scripted("Hello.")) as world, opened(world) as client:
        status, answer = await client.post([user("?")], n=129)
        assert (status, answer["error"]["param"]) == (400, "n")
        status, answer = await client.post([user("?")], n=128)
        assert (status, len(answer["choices"])) == (200, 128)


async def test_brackets_and_characters_that_only_models_write_are_prompts_like_others() -> None:
    deep = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "[" * 2000}}
    async with stack(policy=Scripted("Hello.")) as world, opened(world) as client:
        await client.ask([user("?"), {"role": "assistant", "tool_calls": [deep]}, result("a", "x")])
        url = f"{client.recording.base_url}/v1/completions"
        async with client.http.post(url, json={"model": "m", "prompt": "\ud83d"}) as response:
            assert response.status == 200, await response.text()
        assert client.recording.error is None


async def test_a_count_is_no_stream() -> None:
    async with stack(policy=Scripted("Hello.")) as world, opened(world) as client:
        url = f"{client.recording.base_url}/v1/messages/count_tokens"
        async with client.http.post(url, json={"model": "m", "messages": [user("?")], "stream": True}) as response:
            assert response.status == 400


async def test_long_prompts_leave_the_event_loop_to_other_rollouts() -> None:
    """A template runs where its prompt is encoded: it notes the thread, with the length of the last message."""
    threads: dict[int, str] = {}

    def note(content: str) -> str:
        threads[len(content or "")] = threading.current_thread().name
        return ""

    tokenizer = fake_tokenizer()
    template = tokenizer.chat_template + "{{ note(messages[-1].content) }}"
    prompts = PromptBuilder(tokenizer, chat_template=template, template_kwargs={"note": note})
    async with stack(tokenizer, prompts=prompts, policy=Scripted("Hello.")) as world, opened(world) as client:
        asked = [user("a " * 30_000)]
        asked.append(await client.ask(asked))
        await client.ask([*asked, user("b " * 40)])
        parts = [{"type": "text", "text": "c " * 15_000}] * 2
        await client.post([{"role": "user", "content": parts}, user("d " * 50)])
        url = f"{client.recording.base_url}/v1/messages/count_tokens"
        async with client.http.post(url, json={"model": "m", "messages": [user("e " * 35_000)]}) as response:
            assert response.status == 200
        assert_exact(world, client.recording.history())
    here = threading.current_thread().name
    assert threads[80] == here, "a short message after a long one"
    assert {threads[60_000], threads[100], threads[70_000]} == {"lachesis-parser_0"}


async def test_what_is_not_http_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with stack(policy=Scripted("Hello.")) as world, opened(world) as client:
        host, port = client.recording.base_url.split("/")[2].split(":")
        for nonsense in (
            b"GET /" + b"a" * 10_000,
            b"POST / HTTP/1.1\r\nContent-Length: x",
            b"X: y\r\n" * 99,
            b"\x16\x03",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(nonsense + b" HTTP/1.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
        assert (await client.ask([user("?")]))["content"] == "Hello."
    assert caplog.text == ""


async def test_large_bodies_of_one_rollout_are_held_one_at_a_time() -> None:
    size, part = 8 << 20, b" " * (1 << 16)
    async with stack(policy=Scripted("Hello.")) as world, opened(world) as client:
        recording = client.recording
        sent = [0] * 6
        host, port = recording.base_url.split("/")[2].split(":")

        async def pour(at: int) -> None:
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /{recording.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
            writer.write(head.encode())
            try:
                while sent[at] < size - len(part):
                    writer.write(part)
                    await writer.drain()
                    sent[at] += len(part)
                await asyncio.Event().wait()  # the last part does not come
            finally:
                writer.transport.abort()

        pouring = [asyncio.create_task(pour(at)) for at in range(len(sent))]
        async with asyncio.timeout(60):
            while max(sent) < size - len(part):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert sum(count >= size - len(part) for count in sent) == 1, "the others wait, in the kernel's buffers"
        assert (await client.ask([user("?")]))["content"] == "Hello.", "small ones go on"
        for each in pouring:
            each.cancel()
        await asyncio.gather(*pouring, return_exceptions=True)
