"""Several servers as one: limits that hold, waiting without polling, failover, and the face that Atropos had."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest
from aiohttp import web

from lachesis_client import (
    OpenAIServer,
    RequestRejected,
    Router,
    ServerSettings,
    ServerUnavailable,
    TokenTrackingUnavailable,
)
from tests.support.completions import completion

ASK = [{"role": "user", "content": "hello"}]


class Gauge:
    """A handler that counts what is in flight; answers when `open` is set, or once `crowd` are in flight at a time."""

    def __init__(self, name="a", *, delay=0.0, crowd=0):
        self.name, self.delay, self.now, self.most, self.total = name, delay, 0, 0, 0
        self.open, self.crowd = asyncio.Event(), crowd
        if delay and not crowd:
            self.open.set()

    async def __call__(self, request):
        self.now += 1
        self.total += 1
        self.most = max(self.most, self.now)
        if self.now == self.crowd:
            self.open.set()
        try:
            await self.open.wait()
            await asyncio.sleep(self.delay)
            return web.json_response(completion(self.name))
        finally:
            self.now -= 1


async def broken(_):
    return web.Response(status=503, text="out of order")


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_bound_holds_and_every_request_proceeds(serve):
    gauges = [Gauge(delay=0.01, crowd=3), Gauge(delay=0.02, crowd=3)]
    async with Router([await serve(gauge, max_concurrency=3) for gauge in gauges]) as router:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(router.chat(ASK) for _ in range(60)))
    assert len(answers) == 60
    assert [gauge.most for gauge in gauges] == [3, 3]


async def test_requests_go_where_the_weighted_room_is(serve):
    gauges = [Gauge(), Gauge()]
    servers = [await serve(gauges[0], weight=3.0), await serve(gauges[1], weight=1.0)]
    async with Router(servers) as router:
        calls = [asyncio.create_task(router.chat(ASK)) for _ in range(16)]
        await until(lambda: sum(gauge.now for gauge in gauges) == 16)
        assert [gauge.now for gauge in gauges] == [12, 4]
        for gauge in gauges:
            gauge.open.set()
        await asyncio.gather(*calls)


async def test_evaluations_have_a_limit_of_their_own(serve):
    gauge = Gauge()
    async with Router([await serve(gauge, max_concurrency=6, max_eval_concurrency=2)]) as router:
        evaluations = [asyncio.create_task(router.chat(ASK, split="eval")) for _ in range(5)]
        await until(lambda: gauge.now == 2)
        training = [asyncio.create_task(router.chat(ASK)) for _ in range(8)]
        await until(lambda: gauge.now == 6)
        await asyncio.sleep(0.05)
        assert gauge.most == 6
        gauge.open.set()
        await asyncio.gather(*evaluations, *training)
    metrics = router.wandb_metrics()
    assert metrics["server/server_0_average_num_attempts"] == 1.0
    assert metrics["server/server_0_eval_retry_rate"] == 1.0


async def test_a_server_that_is_down_is_set_aside_and_another_one_answers(serve):
    bad_calls = 0

    async def bad(_):
        nonlocal bad_calls
        bad_calls += 1
        return web.Response(status=503)

    servers = [await serve(bad), await serve(Gauge("good", delay=0.001))]
    async with Router(servers, cooldown=60) as router:
        first = await router.chat(ASK)
        assert (first.message.text, first.server) == ("good", servers[1].base_url)
        assert first.attempts == 3, "two at the broken server, one at the other"
        for _ in range(5):
            assert (await router.chat(ASK)).attempts == 1
    assert bad_calls == 2


async def test_a_server_that_recovers_is_used_again(serve):
    healthy = False

    async def flaky(_):
        return web.json_response(completion("back")) if healthy else web.Response(status=503)

    servers = [await serve(flaky, max_retries=0) for _ in range(2)]
    async with Router(servers, cooldown=0.3, unavailable_wait=30) as router:
        calls = [asyncio.create_task(router.chat(ASK)) for _ in range(4)]
        await asyncio.sleep(0.1)
        healthy = True
        answers = await asyncio.gather(*calls)
    assert {answer.message.text for answer in answers} == {"back"}


async def test_all_down_is_an_error_after_a_bounded_wait(serve):
    servers = [await serve(broken, max_retries=0) for _ in range(2)]
    started = time.monotonic()
    async with Router(servers, cooldown=30, unavailable_wait=0.3) as router:
        with pytest.raises(ServerUnavailable, match="out of order") as caught:
            await router.chat(ASK)
        assert all(server.base_url in str(caught.value) for server in servers)
        with pytest.raises(ServerUnavailable):
            await router.chat(ASK)
    assert time.monotonic() - started < 20, "the servers are set aside for 30 s"


async def test_waiting_requests_learn_that_all_went_down(serve):
    gate = asyncio.Event()

    async def breaks(_):
        await gate.wait()
        return web.Response(status=503)

    servers = [await serve(breaks, max_retries=0, max_concurrency=1) for _ in range(2)]
    async with Router(servers, cooldown=30, unavailable_wait=0.2) as router:
        calls = [asyncio.create_task(router.chat(ASK)) for _ in range(6)]
        await asyncio.sleep(0.1)
        gate.set()
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [ServerUnavailable] * 6


async def test_a_rejection_is_not_passed_on_to_another_server(serve):
    total = 0

    async def reject(_):
        nonlocal total
        total += 1
        return web.Response(status=400, text="no")

    async with Router([await serve(reject), await serve(reject)]) as router:
        with pytest.raises(RequestRejected):
            await router.chat(ASK)
    assert total == 1


async def test_cancelled_waiters_and_requests_leave_no_place_taken(serve):
    gauge = Gauge()
    async with Router([await serve(gauge, max_concurrency=2, timeout=60)]) as router:
        calls = [asyncio.create_task(router.chat(ASK)) for _ in range(10)]
        await until(lambda: gauge.now == 2)
        for call in calls[1:]:
            call.cancel()
        await asyncio.gather(*calls[1:], return_exceptions=True)
        gauge.open.set()
        async with asyncio.timeout(60):
            assert (await calls[0]).message.text == "a"
            assert len(await asyncio.gather(*(router.chat(ASK) for _ in range(6)))) == 6
        assert gauge.most <= 3  # a connection that was cut may still be counted for a moment


async def test_update_weight_leaves_a_share_of_the_room(serve):
    gauge = Gauge(delay=0.01)
    async with Router([await serve(gauge, max_concurrency=8)]) as router:
        for share, room, calls in ((0.25, 2, 12), (1.0, 8, 24)):
            gauge.open.clear()
            gauge.crowd = room
            await router.update_weight(share)
            async with asyncio.timeout(60):
                await asyncio.gather(*(router.chat(ASK) for _ in range(calls)))
            assert gauge.most == room
        with pytest.raises(ValueError, match="share"):
            await router.update_weight(2)


async def test_check_names_the_server_that_is_not_there(serve):
    async def models(_):
        return web.json_response({"data": [{"id": "m"}]})

    good = await serve(get=models)
    gone = OpenAIServer(ServerSettings("http://127.0.0.1:9/v1", "m"))
    async with Router([good]) as router:
        assert await router.check() == [["m"]]
    async with Router([good, gone]) as router:
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9"):
            await router.check()


async def test_metrics_have_the_names_of_the_dashboards_and_bounded_memory(serve):
    async with Router([await serve(), await serve()]) as router:
        await asyncio.gather(*(router.chat(ASK) for _ in range(10)))
        metrics = router.wandb_metrics({"mine": 1.0})
    names = ["request_time_avg", "request_time_std", "request_time_99p", "average_num_attempts"]
    assert set(metrics) == {"mine"} | {f"server/server_{i}_{name}" for i in range(2) for name in names}
    assert all(times.maxlen for member in router._members for times in member.latencies.values())


@pytest.mark.parametrize("server_takes_n", [True, False])
async def test_chat_completion_speaks_openai(serve, server_takes_n):
    bodies = []

    async def answer(request):
        body = orjson.loads(await request.read())
        bodies.append(body)
        text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
        reply = completion(text, reasoning="why", role="assistant")
        reply["choices"] *= body.get("n", 1) if server_takes_n else 1
        return web.json_response({"id": "x", "created": 1, "object": "chat.completion", **reply})

    tools = [{"type": "function", "function": {"name": "python"}}]
    async with Router([await serve(answer, tool_call_parser="hermes")]) as router:
        reply = await router.chat_completion(
            messages=ASK, n=3, tools=tools, split="eval", temperature=0.5, model="ignored", extra_body={"top_k": 1}
        )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.message.tool_calls[0].function.name == "python"
        assert choice.message.tool_calls[0].function.arguments == '{"code": "1"}'
        assert choice.message.reasoning_content == "why"
    assert len(bodies) == (1 if server_takes_n else 3)
    assert all(body["model"] == "m" and body["temperature"] == 0.5 and body["top_k"] == 1 for body in bodies)


async def test_completion_speaks_openai(serve):
    async def answer(request):
        assert request.path == "/v1/completions"
        return web.json_response({"id": "x", "choices": [{"text": "done", "finish_reason": "stop", "index": 0}]})

    async with Router([await serve(answer)]) as router:
        assert (await router.completion(prompt="go", max_tokens=1)).choices[0].text == "done"


async def test_token_tracking_is_rejected_clearly(serve):
    async with Router([await serve()]) as router:
        with pytest.raises(TokenTrackingUnavailable, match="Phase 2"):
            router.managed_server(tokenizer=None)


def test_a_router_needs_a_server():
    with pytest.raises(ValueError, match="at least one"):
        Router([])
