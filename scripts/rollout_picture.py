"""Draw a branching rollout of the embedded model as a Mermaid flowchart: the picture in docs/trajectories.md.

    python scripts/rollout_picture.py [SEED] > picture.mmd

The loop has every kind of branch: discarded attempts at a call, a tool that is an agent, and a compaction. Everything
in the picture was sampled; the number of attempts depends on the model.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from typing import Any

from lachesis.loop.turn_check import check_turn
from lachesis.runs.model_servers import start_servers
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.server.token_server import TokenServer

MAX_ATTEMPTS, MAX_TOKENS, WIDTH = 12, 40, 44
TOOL = "ask_guide"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Ask a local guide a question.",
            "parameters": {"type": "object", "properties": {"question": {"type": "string"}}},
        },
    }
]


async def play(model: ManagedServer, seed: int) -> MessageHistory:
    """One rollout. Raises SystemExit after `MAX_ATTEMPTS` attempts at the call."""
    seeds = itertools.count(seed)

    async def sample(history: MessageHistory, **arguments: Any) -> ChatResponse:
        return await model.chat(history, seed=next(seeds), max_tokens=MAX_TOKENS, temperature=1.0, **arguments)

    history = MessageHistory(
        [
            {"role": "system", "content": "You plan short trips."},
            {"role": "user", "content": "I have one day in Paris. Where do I begin?"},
        ]
    )
    # Small models rarely begin a call: the prompt ends with its opening, and the model writes the rest.
    forced = {"type": "function", "function": {"name": TOOL}}
    for _ in range(MAX_ATTEMPTS):
        response = await sample(history, tools=TOOLS, tool_choice=forced)
        check = check_turn(response, {TOOL: []})
        if check.flaw is None and any(call.arguments != "{}" for call in response.message.tool_calls):
            break
        history.branch(response, check.flaw.value if check.flaw is not None else "a call that asks nothing")
    else:
        sys.exit(f"error: {MAX_ATTEMPTS} attempts without a call that can be run; try another seed")
    history.append(response)

    for call in response.message.tool_calls:
        guide = MessageHistory(
            [{"role": "system", "content": "You are a guide in Paris."}, {"role": "user", "content": call.arguments}]
        )
        answer = await sample(guide)
        guide.append(answer)
        message = Message("tool", answer.message.text, tool_call_id=call.id, name=TOOL)
        history.append(ToolResponse(message, tool=TOOL, duration=answer.latency, chat=guide))
    history.append(await sample(history, tools=TOOLS))

    history.append({"role": "user", "content": "Sum up what is planned, in one sentence."})
    history.append(await sample(history, tools=TOOLS))
    history[1:] = [{"role": "user", "content": f"The plan: {history[-1]['content']} What is for the evening?"}]
    history.append(await sample(history, tools=TOOLS))
    return history


async def main(seed: int) -> None:
    async with AsyncExitStack() as stack:
        embedded = [ServerConfig(model_name="embedded", context=2048)]
        server = await start_servers(embedded, settings=HermesAgentEnvConfig(), stack=stack, training=True)
        assert isinstance(server, TokenServer)
        history = await play(server.for_rollout(), seed)
    for sample in samples(history):
        turns = ", ".join(str(span.turn) for span in sample.spans)
        problems = "; ".join(verify(sample)) or "verified"
        counts = f"{len(sample.tokens)} tokens, {sample.trained} trained (completions {turns})"
        print(f"sample of {counts}: {problems}", file=sys.stderr)
    print(history.to_mermaid(width=WIDTH), end="")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 101))
