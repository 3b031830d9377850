"""A fake model server: the wire of vLLM, SGLang, OpenAI and Atropos, a real tokenizer, no model, bad manners if wanted.

    async with FakeServer(Scripted("Hello!"), mischief={"rate_limited": 0.1}) as server:
        client = OpenAIServer(server.settings())

Logprobs are those of a formula over the whole prefix (`FakeModel`), so a test can recompute each of them.
"""

from lachesis.testing.fake_server.completions import Ask, Call, Completion, Policy, Reply
from lachesis.testing.fake_server.mischief import Mischief
from lachesis.testing.fake_server.model import FakeModel
from lachesis.testing.fake_server.policies import (
    Echo,
    FromFunction,
    Lengths,
    RandomTokens,
    RandomWords,
    Scripted,
    ToolUser,
)
from lachesis.testing.fake_server.seen import Seen
from lachesis.testing.fake_server.server import FakeServer
from lachesis.testing.fake_server.tokenizer import Codec, fake_tokenizer

__all__ = [
    "Ask",
    "Call",
    "Codec",
    "Completion",
    "Echo",
    "FakeModel",
    "FakeServer",
    "FromFunction",
    "Lengths",
    "Mischief",
    "Policy",
    "RandomTokens",
    "RandomWords",
    "Reply",
    "Scripted",
    "Seen",
    "ToolUser",
    "fake_tokenizer",
]
