"""A fake model server: the HTTP APIs of vLLM, SGLang, OpenAI and Atropos, a real tokenizer, no model, optional faults.

    async with FakeServer(Scripted("Hello!"), faults={"rate_limited": 0.1}) as server:
        client = OpenAIServer(server.settings())

Logprobs come from a formula over the whole prefix (`FakeModel`), so a test can recompute each of them.
"""

from lachesis_testing.fake_server.completions import Ask, Call, Completion, Policy, Reply
from lachesis_testing.fake_server.faults import Fault
from lachesis_testing.fake_server.model import FakeModel
from lachesis_testing.fake_server.policies import (
    Echo,
    Lengths,
    RandomTokens,
    RandomWords,
    Scripted,
    ToolUser,
)
from lachesis_testing.fake_server.seen import Seen
from lachesis_testing.fake_server.server import FakeServer
from lachesis_testing.fake_server.tokenizer import Codec, fake_tokenizer, letter_swapped

__all__ = [
    "Ask",
    "Call",
    "Codec",
    "Completion",
    "Echo",
    "FakeModel",
    "FakeServer",
    "Fault",
    "Lengths",
    "Policy",
    "RandomTokens",
    "RandomWords",
    "Reply",
    "Scripted",
    "Seen",
    "ToolUser",
    "fake_tokenizer",
    "letter_swapped",
]
