"""The CPU time to record a turn in the message graph, in conversations of 1,000 turns x 250 sampled tokens.

    python benchmarks/message_graph.py

A turn is a completion with its ids and logprobs, extended from the previous turn, and a tool result: the work of
`MessageHistory.append` and `TokenPrefix.extend`, from lists of ids to nodes. One conversation is linear; the other has
a compaction every 20 turns: a summary replaces all turns but the last four, and the prompt begins again.

Deferred work has separate figures: samples with the digests of their ids, and the digests of all nodes, hashes over
their messages.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, ToolResponse, Usage
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.samples.samples import samples

T = TypeVar("T")
TURNS, TOKENS, OBSERVED = 1000, 250, 50
COMPACTION, KEPT = 20, 4
"""The number of turns between two compactions, and of turns that a compaction keeps."""
ROUNDS = 7
LIMIT_MS = 0.05
SAMPLING = {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "logprobs": "raw"}
DRAW = Random(0)
SAID = [[DRAW.randrange(150_000) for _ in range(TOKENS)] for _ in range(50)]
LOGPROBS = [[-DRAW.random() for _ in range(TOKENS)] for _ in range(50)]
SEEN = [[DRAW.randrange(150_000) for _ in range(OBSERVED)] for _ in range(50)]
ROOT = [DRAW.randrange(150_000) for _ in range(500)]
WORDS = "The longest line has more words than the one before it, so the search goes on in the next folder. " * 8


def turn(number: int) -> tuple[Message, Message]:
    """The model's text and the tool's result. A parser and a tool make them, so their cost is not counted."""
    call = ToolCall(f"call_{number}", "search", json.dumps({"query": f"line {number}", "limit": 3}))
    result = Message("tool", f"{number}: {WORDS[:250]}", tool_call_id=call.id, name="search")
    return Message("assistant", f"{number}: {WORDS}", (call,)), result


def play(turns: int, compaction: int | None) -> tuple[MessageHistory, float]:
    """The history, and the CPU seconds to record it."""
    said = [turn(number) for number in range(turns)]
    history = MessageHistory([{"role": "system", "content": "You are an agent."}, {"role": "user", "content": WORDS}])
    prompt = TokenPrefix(ROOT)
    started = time.process_time()
    for number, (message, result) in enumerate(said):
        at = number % 50
        tokens = SampledTokens.sample(prompt, SAID[at], LOGPROBS[at], end_of_turn=(7,), context="digest")
        response = ChatResponse(
            message,
            FinishReason.TOOL_CALLS,
            "stop",
            "model",
            Usage(prompt.length, TOKENS),
            server="http://127.0.0.1:8000/v1",
            sampling=SAMPLING,
            tokens=tokens,
        )
        history.append(response)
        history.append(ToolResponse(result, "search", 0.1))
        if compaction and number % compaction == compaction - 1:
            history[2 : len(history) - 2 * KEPT] = [{"role": "user", "content": f"So far: {WORDS}"}]
            kept = [id for back in range(KEPT) for id in (*SAID[(number - back) % 50], *SEEN[(number - back) % 50])]
            prompt = TokenPrefix([*ROOT, *SEEN[at], *kept])
        else:
            prompt = tokens.after.extend(SEEN[at])
    return history, time.process_time() - started


def timed(task: Callable[[MessageHistory], T], history: MessageHistory) -> tuple[T, float]:
    """The result of the function, and the CPU seconds that it took."""
    started = time.process_time()
    result = task(history)
    return result, time.process_time() - started


def digests(history: MessageHistory) -> list[str]:
    return [node.digest for node in history.all_nodes()]


def main() -> int:
    print(f"CPU ms a turn of {TOKENS} sampled tokens, the best of {ROUNDS} rounds (and their median)")
    worst = 0.0
    for label, turns, compaction in (
        (f"{TURNS // 10} turns", TURNS // 10, None),
        (f"{TURNS} turns", TURNS, None),
        (f"{TURNS} turns, a compaction every {COMPACTION}", TURNS, COMPACTION),
    ):
        taken = [1000 * play(turns, compaction)[1] / turns for _ in range(ROUNDS)]
        history, _ = play(turns, compaction)
        made, sampled = timed(samples, history)
        trained = sum(sample.trained for sample in made)
        if trained != turns * TOKENS or len(history.completions()) != turns:
            raise RuntimeError(f"{trained} of {turns * TOKENS} tokens are trained")
        del made
        _, hashed = timed(digests, history)
        print(
            f"{label:<38}{min(taken):.4f} ({statistics.median(taken):.4f}); afterwards, once: "
            f"samples() {1000 * sampled / turns:.3f}, "
            f"digests {1000 * hashed / turns:.3f}"
        )
        worst = max(worst, min(taken))
    print(json.dumps({"cpu_ms_a_turn": round(worst, 4), "limit": LIMIT_MS}))
    return worst > LIMIT_MS


if __name__ == "__main__":
    sys.exit(main())
