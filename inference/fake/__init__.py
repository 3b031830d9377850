"""A fake model server: the wire of vLLM, SGLang, OpenAI and Atropos, a real tokenizer, no model, bad manners if wanted.

    async with FakeServer(Scripted("Hello!"), mischief={"rate_limited": 0.1}) as server:
        client = OpenAIServer(server.settings())

Logprobs are those of a formula over the whole prefix (`FakeModel`), so a test can recompute each of them.
"""

from inference.fake.completions import Ask, Call, Completion, Policy, Reply
from inference.fake.mischief import Mischief
from inference.fake.model import FakeModel
from inference.fake.policies import Echo, FromFunction, Lengths, RandomTokens, RandomWords, Scripted, ToolUser
from inference.fake.seen import Seen
from inference.fake.server import FakeServer
from inference.fake.tokenizer import Codec, fake_tokenizer

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
