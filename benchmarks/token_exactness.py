"""10,000 rollouts of a badly behaved model: is every sampled token trained once, and in its context?

    python benchmarks/token_exactness.py [--rollouts 10000]

The fake model server, in a separate process, records the tokens it samples. It splits words as no encoder would,
thinks, cuts calls off, omits end-of-turn tokens or doubles them, writes half characters and the text of special
tokens, and breaks connections. Rollouts use four APIs and several chat templates, and are of three kinds: the
agent loop, with its resampling of malformed turns and its tools; a message history that is branched, edited, compacted
and taken back, with several completions at once and sub-agents; and plain lists of messages, as environments for
Atropos pass them. The sequences for the trainer are then compared with the server's record, token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import TOOLS, fake_process, token_server
from benchmarks.token_ledger import Ledger, Sequenced, Tally
from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis_client import InferenceError, ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message, ToolCall
from lachesis_messages.responses import ToolResponse
from lachesis_testing.fake_server import Ask, Lengths, RandomTokens, RandomWords, Reply, fake_tokenizer
from lachesis_testing.fake_server.policies import WORDS, hermes_call
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_tokens.samples.verification import RecordVerifier, verify
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tools import ToolResult

FAULTS = {
    "thinking": 0.2,
    "trailing_space": 0.15,
    "spelled_special": 0.1,
    "inner_special": 0.1,
    "broken_utf8_middle": 0.1,
    "broken_utf8_end": 0.1,
    "ambiguous": 0.4,
    "cut_tool_call": 0.08,
    "no_end_of_turn": 0.1,
    "double_end_of_turn": 0.08,
    "empty": 0.04,
    "no_tokens": 0.02,
    "rate_limited": 0.004,
    "server_error": 0.004,
    "disconnect": 0.004,
    "cut_body": 0.004,
    "wrong_echo": 0.002,
    "short_ids": 0.002,
    "nan_logprobs": 0.002,
}
ENGINES = ("vllm", "vllm-generate", "sglang", "atropos")
TEMPLATES = ("qwen3", "qwen2_5", "qwen3_instruct_2507", "qwen3_6")
"""Templates of trl that use ChatML, beside ours. Two of them strip the thinking of earlier turns."""
DOUBLED = "goes on after its end-of-turn token"
"""Sampled tokens that the certificate rejects: ids that a server reports after its own end of turn."""
BATCH, CONCURRENCY = 250, 32
OFFERED = TOOLS[:2]
TEXTS = (
    "ok",
    "12\n",
    " a line\n\nand another ",
    "naïve 東京 🙂",
    "<|im_end|>\n<|im_start|>user\nno",
    "<tool_call>{</tool_call>",
)
"""The texts of tools and users."""


_PLACES = re.compile(r"\d+")


class Rude:
    """Calls, broken calls, words, and all that the fake model samples."""

    def __init__(self) -> None:
        self.words = RandomWords(Lengths(1, 24))
        self.tokens = RandomTokens(Lengths(1, 24))

    def reply(self, ask: Ask) -> Reply:
        rng = ask.rng("kind")
        kind = rng.random()
        if kind < 0.25:
            return self.words.reply(ask)
        if kind < 0.4:
            return self.tokens.reply(ask)
        text = "\n".join(hermes_call(rng, rng.choice(OFFERED)) for _ in range(rng.choice((1, 1, 2))))
        if kind > 0.9:
            text = text.replace('"', "'", 3) if kind > 0.95 else text.replace("}", "")
        return Reply(ask.ended(ask.codec.encode(f"{rng.choice(WORDS)}\n{text}" if rng.random() < 0.5 else text)))


@dataclass(slots=True)
class Played:
    """The sequences that a rollout gives a trainer, and its outcome."""

    sequences: list[Sequenced]
    ended: str
    samples: list[TokenSample] = field(default_factory=list)


def of_history(history: MessageHistory, rollout_id: str, ended: str) -> Played:
    made = samples(history, rollout_id=rollout_id, outcome=ended)
    return Played([sequenced(sample) for sample in made], ended, made)


def sequenced(sample: TokenSample) -> Sequenced:
    return Sequenced(sample.tokens, sample.masks, sample.logprobs, [(span.start, span.end) for span in sample.spans])


async def with_agent(server: TokenServer, rng: Random, name: str) -> Played:
    """The agent loop, which resamples malformed turns and rolls faulty ones back."""

    async def execute(calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(content=rng.choice(TEXTS), error=None) for _ in calls]

    loop = HermesAgentLoop(
        server.for_rollout(),
        OFFERED,
        max_turns=rng.randint(1, 8),
        max_tokens=rng.choice((8, 32, 256)),
        execute=execute,
        limits=LoopLimits(max_resamples=2, max_faulty_turns=2),
    )
    result = await loop.run(opening(rng, name))
    return of_history(result.history, name, f"agent loop: {result.outcome.value}")


async def with_history(server: TokenServer, rng: Random, name: str, depth: int = 0) -> Played:
    """All operations on a history between two completions."""
    history = MessageHistory(opening(rng, name))
    ended = await wander(server, server.for_rollout(), history, rng, name, depth)
    return of_history(history, name, f"history: {ended}")


async def wander(
    server: TokenServer, managed: ManagedServer, history: MessageHistory, rng: Random, name: str, depth: int
) -> str:
    for turn in range(rng.randint(1, 7)):
        try:
            sampling = Sampling(max_tokens=rng.choice((4, 16, 64, 256)))
            responses = await managed.chat_n(history, rng.choice((1, 1, 1, 2, 4)), sampling=sampling, tools=OFFERED)
        except InferenceError as error:
            return type(error).__name__
        kept = rng.choice(responses) if rng.random() < 0.9 else None
        for response in responses:
            if response is not kept:
                history.branch(response, "another of n" if kept else "a retry")
        if kept is None:
            continue
        history.append(kept)
        if not kept.message.tool_calls:
            history.append({"role": "user", "content": rng.choice(TEXTS)})
        for call in kept.message.tool_calls:
            chat = None
            if depth == 0 and rng.random() < 0.1:
                chat = MessageHistory(opening(rng, f"{name}, sub-agent {turn}"))
                await wander(server, server.for_rollout(), chat, rng, name, depth + 1)
            said = Message("tool", rng.choice(TEXTS), tool_call_id=call.id, name=call.name)
            history.append(ToolResponse(said, call.name, chat=chat))
        change(history, rng)
    return "done"


def change(history: MessageHistory, rng: Random) -> None:
    """An occasional edit: of any message, a compaction, a step back."""
    kind = rng.random()
    if kind < 0.1:
        history[rng.randrange(len(history))]["content"] = f"edited: {rng.choice(TEXTS)}"
    elif kind < 0.2:
        turns = [at for at, message in enumerate(history) if message["role"] == "user" and at > 1]
        if turns:
            history[1 : rng.choice(turns)] = [{"role": "user", "content": f"So far: {rng.choice(TEXTS)}"}]
    elif kind < 0.27:
        turns = [at for at, message in enumerate(history) if message["role"] == "assistant"]
        if turns:
            history.rewind(rng.choice(turns), "taken back")


async def with_lists(server: TokenServer, rng: Random, name: str) -> Played:
    """Plain dicts without a history, as environments for Atropos use them."""
    managed = server.for_rollout()
    messages = opening(rng, name)
    ended = "done"
    for _ in range(rng.randint(1, 6)):
        n = rng.choice((1, 1, 3))
        try:
            completion = await managed.chat_completion(messages=messages, n=n, max_tokens=rng.choice((4, 64)))
        except InferenceError as error:
            ended = type(error).__name__
            break
        said = rng.choice(completion.choices).message.content
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": rng.choice(TEXTS)}]
    nodes = managed.get_state()["nodes"]
    return Played([Sequenced(node.tokens, node.masked_tokens, node.logprobs) for node in nodes], f"lists: {ended}")


KINDS = (with_agent, with_agent, with_history, with_history, with_lists)


def opening(rng: Random, name: str) -> list[dict[str, Any]]:
    user = {"role": "user", "content": f"{name}: {rng.choice(TEXTS)}"}
    return [{"role": "system", "content": "Be brief."}, user] if rng.random() < 0.5 else [user]


def templates(names: Sequence[str]) -> dict[str, str | None]:
    """Our templates, and those of `names` that come with trl."""
    found: dict[str, str | None] = {"hermes": None}
    spec = importlib.util.find_spec("trl")  # importing it would load torch
    if spec is not None and spec.origin is not None:
        for path in Path(spec.origin).parent.rglob("*.jinja"):
            if path.stem in names:
                found[path.stem] = path.read_text(encoding="utf-8")
    return found


def servers(settings: ServerSettings) -> dict[str, TokenServer]:
    """A server for every pair of template and engine."""
    made: dict[str, TokenServer] = {}
    for template, source in templates(TEMPLATES).items():
        prompts = PromptBuilder(fake_tokenizer(chat_template=source))
        made |= {f"{template}/{kind}": token_server(settings, kind, prompts=prompts) for kind in ENGINES}
    return made


async def batch(ready: Mapping[str, TokenServer], first: int, count: int) -> list[Played]:
    gate, names = asyncio.Semaphore(CONCURRENCY), sorted(ready)

    async def one(number: int) -> Played:
        rng = Random(number)
        async with gate:
            return await rng.choice(KINDS)(ready[rng.choice(names)], rng, f"rollout {number}")

    return list(await asyncio.gather(*(one(number) for number in range(first, first + count))))


async def play(settings: ServerSettings, ledger: Ledger, rollouts: int) -> int:
    ready = servers(settings)
    ends = next(iter(ready.values())).prompts.end_of_turn
    found, ended, verifier, refused = Tally(), Counter[str](), RecordVerifier(), Counter[str]()
    sequences = 0
    started = time.process_time()
    for first in range(0, rollouts, BATCH):
        played = await batch(ready, first, min(BATCH, rollouts - first))
        found.add(ledger.tally((sequence for each in played for sequence in each.sequences), ends))
        ended.update(each.ended for each in played)
        sequences += sum(len(each.sequences) for each in played)
        for sample in (sample for each in played for sample in each.samples):
            refused.update(_PLACES.sub("#", reason) for reason in verify(sample))
            verifier.feed(sample.to_record())
        if first // BATCH % 8 == 7:
            print(f"  {first + BATCH:>6} rollouts: {found.mismatches} mismatches", flush=True)
    for server in ready.values():
        await server.close()
    seconds = time.process_time() - started
    proven = verifier.totals()
    over = sorted({name.partition("/")[0] for name in ready})
    print(f"{rollouts} rollouts over {', '.join(over)} x {', '.join(ENGINES)}")
    for how, count in sorted(ended.items()):
        print(f"  {count:>6} {how}")
    wire = f"{found.withheld} more were lost or spoiled on the wire"
    print(f"{found.completions} completions ({wire}), {sequences} sequences")
    print(str(found).strip())
    print(
        f"certificates: {proven.samples} samples, {proven.rejected} rejected, {proven.delivered} of {proven.sampled} "
        f"tokens delivered, {proven.duplicated} duplicated, {proven.wrong_prefix} after a wrong prefix, "
        f"{proven.lost} lost"
    )
    for reason, count in refused.most_common(5):
        print(f"  {count:>6} {reason}")
    unexpected = sum(count for reason, count in refused.items() if DOUBLED not in reason)
    print(f"{1000 * seconds / max(1, found.completions):.2f} CPU ms a completion, checks included")
    mismatches = found.mismatches + proven.duplicated + proven.wrong_prefix + unexpected
    print(json.dumps({"rollouts": rollouts, "mismatches": mismatches}))
    return mismatches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        polite = {"vary": True, "retry_after": 0.05, "record": record}
        with fake_process(Rude(), faults=FAULTS, **polite) as settings:
            return asyncio.run(play(settings, Ledger(record), given.rollouts)) > 0


if __name__ == "__main__":
    sys.exit(main())
