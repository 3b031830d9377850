"""Logprobs that were sampled against those that a trainer computes: one forward pass over each sample, in transformers.

A tiny random Llama is written as a GGUF and served as the embedded model, so both sides have the same weights. Random
weights say what no trained model would: halves of characters, calls that are none, turns that end in the middle.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_messages.tokens import MASKED
from lachesis_testing.fake_server import fake_tokenizer
from lachesis_tokens.engines.embedded import EmbeddedServer
from lachesis_tokens.engines.llama_cpp import LlamaCppEngine
from lachesis_tokens.prompts.gguf_tokenizer import tokenizer_from_gguf
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.token_server import TokenServer
from tests.support.gguf_writer import llama_metadata, llama_tensors, tokenizer_metadata, write_gguf

TOLERANCE: Final = 1e-3
"""Largest difference at one token, in nats. llama.cpp's attention works in half precision, which makes up to 7e-4 of
difference here; with a float32 cache and no flash attention it would be 5e-6."""
TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": {}}}
]
TURN: Final[dict[str, Any]] = {"tools": TOOLS, "max_tokens": 40, "temperature": 1.0}


@dataclass(frozen=True)
class Bench:
    """One model twice: served by llama.cpp, and in transformers."""

    runner: asyncio.Runner
    server: TokenServer
    model: Any
    torch: Any

    @property
    def tokenizer(self) -> Any:
        return self.server.prompts.tokenizer

    def logprobs(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Of every token after those before it; 0 for the first."""
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([tokens])).logits[0, :-1].double() / temperature
        following = self.torch.tensor(tokens[1:])[:, None]
        return [0.0, *logits.log_softmax(-1).gather(1, following)[:, 0].tolist()]

    def gaps(self, sample: TokenSample, *, temperature: float = 1.0) -> list[float]:
        """|reported - computed| at every trained position."""
        computed = self.logprobs(sample.tokens, temperature=temperature)
        rows = zip(sample.masks, sample.logprobs, computed, strict=True)
        return [abs(reported - own) for mask, reported, own in rows if mask != MASKED]


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """Not in the lock file: pip would take a build for GPUs, of some GB. `make test-train` has it and must not skip."""
    if os.environ.get("LACHESIS_NEED_TORCH"):
        found = importlib.import_module("torch")
    else:
        found = pytest.importorskip("torch", reason="torch is not installed; `make test-train` has it")
    threads = found.get_num_threads()
    found.set_num_threads(1)  # more of them wait for each other longer than a model of this size takes
    yield found
    found.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = tiny_llama(torch, fake_tokenizer())
    path = write(model, tmp_path_factory.mktemp("model") / "tiny.gguf")
    tokenizer = tokenizer_from_gguf(path)
    with asyncio.Runner() as runner:
        embedded = EmbeddedServer(path, parallel=2, context=1536)
        runner.run(embedded.start())
        engine = LlamaCppEngine(embedded.settings())
        try:
            yield Bench(runner, TokenServer([engine], PromptBuilder(tokenizer), "hermes"), model, torch)
        finally:
            runner.run(engine.close())
            runner.run(embedded.stop())


def tiny_llama(torch: Any, tokenizer: Any) -> Any:
    """Two layers, four heads that share two of keys and values; about one token in thirty ends the turn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                # Attention is what llama.cpp rounds: less of it keeps the bound small.
                weight.copy_((0.1 if "o_proj" in name else 1.0) * noise / weight.shape[1] ** 0.5)
        # A constant in every embedding works as a bias of the output.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 2.0
    return model


def write(model: Any, path: Path) -> Path:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    metadata = llama_metadata(model.config) | tokenizer_metadata(fake_tokenizer(), pre="smollm")
    return write_gguf(path, metadata, llama_tensors(weights, model.config))


async def rollout(server: TokenServer, number: int) -> MessageHistory:
    """Turns that end, are cut or stop at a text, a forced call with a result, discarded attempts, an edit."""
    managed, seed = server.for_rollout(), 100 * number
    history = MessageHistory(
        [{"role": "system", "content": "You are brief."}, {"role": "user", "content": f"Hello! I am number {number}."}]
    )
    history.append(await managed.chat(history, seed=seed, **TURN))
    history.append({"role": "user", "content": "What is the weather in Köln? 🌧"})
    for discarded in await managed.chat_n(history, 2, sampling=Sampling(max_tokens=12, seed=seed + 1), tools=TOOLS):
        history.branch(discarded, "another attempt")
    history.append(await managed.chat(history, tool_choice="required", seed=seed + 3, **TURN))
    history.append({"role": "tool", "tool_call_id": "call", "content": '{"degrees": 12, "sky": "日本の空"}'})
    history.append(await managed.chat(history, seed=seed + 4, **{**TURN, "max_tokens": 2}))
    history.append({"role": "user", "content": "Go on."})
    history.append(await managed.chat(history, seed=seed + 5, stop=["e", "\n"], **TURN))
    history.append({"role": "user", "content": "And?"})
    history.append(await managed.chat(history, seed=seed + 6, **TURN))
    history[2]["content"] = "Hi."  # all later messages are context
    history.append({"role": "user", "content": "Thank you."})
    history.append(await managed.chat(history, seed=seed + 7, **TURN))
    return history


@pytest.fixture(scope="module")
def found(bench: Bench) -> list[TokenSample]:
    """The samples of four rollouts, which take turns on two slots and their caches."""

    async def play() -> list[MessageHistory]:
        return await asyncio.gather(*(rollout(bench.server, number) for number in range(4)))

    histories = bench.runner.run(play())
    sampled = sum(len(response.tokens or ()) for history in histories for response in history.completions())
    delivered = [
        sample for number, history in enumerate(histories) for sample in samples(history, rollout_id=f"{number}")
    ]
    assert sum(sample.trained for sample in delivered) == sampled > 200
    assert [verify(sample) for sample in delivered] == [[]] * len(delivered)
    return delivered


@pytest.mark.model
def test_every_trained_logprob_is_that_of_a_forward_pass(bench: Bench, found: list[TokenSample]) -> None:
    gaps = [gap for sample in found for gap in bench.gaps(sample)]
    print(f"{len(gaps)} tokens in {len(found)} samples: largest {max(gaps):.1e}, mean {sum(gaps) / len(gaps):.1e}")
    assert max(gaps) <= TOLERANCE


@pytest.mark.model
def test_the_rollouts_hold_what_is_hard(bench: Bench, found: list[TokenSample]) -> None:
    """Without it the comparison would show less than it says."""
    tokenizer, end = bench.tokenizer, bench.tokenizer.eos_token_id
    turns = [(span, sample.tokens[span.start : span.end]) for sample in found for span in sample.spans]
    assert any(span.finish_reason == "stop" and ids[-1] == end for span, ids in turns)
    assert any(span.finish_reason == "stop" and ids[-1] != end for span, ids in turns), "no stop text"
    assert any(span.finish_reason == "length" for span, _ in turns)
    halves = sum(tokenizer.decode(ids[: place + 1]).endswith("\ufffd") for _, ids in turns for place in range(len(ids)))
    assert halves > 10, "hardly a token ends inside a character"
    assert any(len(sample.spans) > 3 for sample in found)
    for number in range(4):
        assert len([sample for sample in found if sample.rollout_id == f"{number}"]) == 4


@pytest.mark.model
@pytest.mark.parametrize(("distance", "typical"), [(1, 100 * TOLERANCE), (8, 5 * TOLERANCE)])
def test_a_context_that_lacks_one_token_shows(
    distance: int, typical: float, bench: Bench, found: list[TokenSample]
) -> None:
    """The control: were each context short of one token, the one before the turn or the eighth before it."""
    largest = []
    for sample in found:
        last = sample.spans[-1]
        place = last.start - distance
        computed = bench.logprobs(sample.tokens[:place] + sample.tokens[place + 1 :])[last.start - 1 :]
        largest.append(max(abs(a - b) for a, b in zip(sample.logprobs[last.start :], computed, strict=True)))
    largest.sort()
    median = largest[len(largest) // 2]
    print(f"without token -{distance}: in a turn from {largest[0]:.1e} to {largest[-1]:.1e}, typically {median:.1e}")
    assert median > typical


@pytest.mark.model
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"temperature": 0.5}, "temperature 1"),
        ({"top_p": 0.5}, "top_p"),
        ({"extra_body": {"repetition_penalty": 1.5}}, "repetition_penalty"),
    ],
)
def test_logprobs_are_raw_however_it_was_sampled(changed: dict[str, Any], problem: str, bench: Bench) -> None:
    """So tokens of another distribution are rejected: the logprobs are not theirs."""
    managed = bench.server.for_rollout()
    asked = {**TURN, "max_tokens": 60, "seed": 1, **changed}
    response = bench.runner.run(managed.chat([{"role": "user", "content": "Count to ten."}], **asked))
    [sample] = samples(managed)
    assert max(bench.gaps(sample)) <= TOLERANCE
    if temperature := changed.get("temperature"):
        processed = bench.gaps(sample, temperature=temperature)
        assert sum(processed) / len(processed) > 100 * TOLERANCE
    assert problem in (sampling_problem(response.sampling) or "")


def test_the_tokenizer_of_a_written_file_is_the_one_that_was_given(tmp_path: Path) -> None:
    given = fake_tokenizer()
    read = tokenizer_from_gguf(write_gguf(tmp_path / "m.gguf", tokenizer_metadata(given, pre="smollm"), {}))
    assert read.get_vocab() == given.get_vocab()
    assert (read.eos_token_id, read.pad_token_id) == (given.eos_token_id, given.pad_token_id)
    assert read.all_special_tokens and read.chat_template == given.chat_template
    texts = ("Wörter  and\n\n\tcode(x) 12345 日本🤖", '<|im_start|>a<tool_call>\n{"b": 1}</tool_call><|im_end|>\n')
    for text in texts:
        assert read.encode(text) == given.encode(text)
