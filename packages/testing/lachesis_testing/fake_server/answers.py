"""The bodies of the fake server's answers, with the wire faults in them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from random import Random
from typing import Final

import orjson
from aiohttp import web

from lachesis_testing.fake_server.completions import Call
from lachesis_testing.fake_server.faults import Fault, behind_stop, tamper, withheld
from lachesis_testing.fake_server.host import Host
from lachesis_testing.fake_server.seen import Seen
from lachesis_tokens.model_routes.host import ModelRoute, ShownCompletion

JSON_TYPE: Final = "application/json"


def cache_key(seen: Seen, call: Call, faults: Collection[Fault]) -> str:
    """Equal for requests that the cache in front answers alike; empty without a cache."""
    if Fault.REPLAYED_PROMPT in faults:
        return ",".join(hashed.hexdigest() for hashed in call.hashes)
    return orjson.dumps(seen.body, option=orjson.OPT_SORT_KEYS).decode() if Fault.REPLAYED in faults else ""


def written(
    route: ModelRoute, host: Host, seen: Seen, call: Call, faults: Sequence[Fault], rng: Random | None
) -> bytes:
    """The body of an answer, false where a fault says so."""
    shown = []
    for made in seen.completions:
        prompt_ids: Sequence[int] = call.prompts[made.prompt]
        if rng is not None and Fault.BEHIND_STOP in faults:
            made = behind_stop(made, prompt_ids, call, rng)
        ids: Sequence[int] | None = made.ids
        logprobs: Sequence[float | None] | None = made.logprobs
        if rng is not None and faults:
            prompt_ids, ids, logprobs = tamper(made, prompt_ids, faults, rng, host.model.vocabulary_size)
        cached = seen.cached[made.prompt] if seen.cached else None
        shown.append(ShownCompletion(made, prompt_ids, ids, logprobs, cached))
    answer = withheld(route.write(host, seen.body, call, shown), faults)
    if Fault.NAN_LOGPROBS in faults:
        return json.dumps(answer).encode()  # orjson would write null
    return orjson.dumps(answer)


async def send_half(request: web.Request, payload: bytes) -> web.StreamResponse:
    """Send half of a body and close the connection."""
    response = web.StreamResponse()
    response.content_type, response.content_length = JSON_TYPE, len(payload)
    await response.prepare(request)
    await response.write(payload[: len(payload) // 2])
    if request.transport is not None:
        request.transport.close()
    return response
