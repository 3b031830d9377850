"""Draw a branching rollout of the embedded model as a Mermaid flowchart: the picture in docs/trajectories.md.

    python scripts/rollout_picture.py > picture.mmd

The loop has every kind of branch: discarded attempts at a call, a tool that is an agent, and a compaction. Everything
in the picture was sampled; the number of attempts depends on the model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from typing import Any

from lachesis.agent.turn_check import check_turn
from lachesis.inference import TokenServer
from lachesis.inference.managed_server import ManagedServer
from lachesis.runs.model_servers import start_servers
from lachesis.runs.server_settings import ServerConfig
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.trajectories import ChatResponse, Message, MessageHistory, ToolResponse, samples, verify

MAX_ATTEMPTS = 12
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


class NoUsableCall(RuntimeError):
    """The model wrote no call that can be run; another seed may help."""


async def play(model: ManagedServer, *, seed: int, max_tokens: int) -> MessageHistory:
    """One rollout.

    Raises:
        NoUsableCall: after `MAX_ATTEMPTS` attempts at the call.
    """

    seeds = itertools.count(seed)

    async def sample(history: MessageHistory, **arguments: Any) -> ChatResponse:
        return await model.chat(history, seed=next(seeds), max_tokens=max_tokens, temperature=1.0, **arguments)

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
        raise NoUsableCall(f"{MAX_ATTEMPTS} attempts without a call that can be run; try another --seed")
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


async def picture(*, seed: int, max_tokens: int, width: int) -> str:
    """The flowchart of one rollout. Its samples are verified and counted on stderr."""
    async with AsyncExitStack() as stack:
        embedded = [ServerConfig(model_name="embedded", context=2048)]
        server = await start_servers(embedded, settings=HermesAgentEnvConfig(), policy=None, stack=stack, training=True)
        assert isinstance(server, TokenServer)
        history = await play(server.for_rollout(), seed=seed, max_tokens=max_tokens)
    for sample in samples(history):
        turns = ", ".join(str(span.turn) for span in sample.spans)
        problems = "; ".join(verify(sample)) or "verified"
        print(
            f"sample of {len(sample.tokens)} tokens, {sample.trained} trained (completions {turns}): {problems}",
            file=sys.stderr,
        )
    return history.to_mermaid(width=width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=101, help="of the first attempt (default: 101)")
    parser.add_argument("--max-tokens", type=int, default=40, help="tokens of a completion (default: 40)")
    parser.add_argument("--width", type=int, default=44, help="characters of a text (default: 44)")
    arguments = parser.parse_args()
    print(asyncio.run(picture(**vars(arguments))), end="")


if __name__ == "__main__":
    main()
