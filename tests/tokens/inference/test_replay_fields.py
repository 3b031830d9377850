"""Routed experts and sampling masks: from the wire of each engine to the body that a trainer gets."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest

from lachesis.settings.server_settings import ServerConfig
from lachesis_client import BadResponse
from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.replay import RoutedExperts, SamplingMask, join_experts, join_masks
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import FakeServer, Lengths, RandomTokens, fake_tokenizer
from lachesis_testing.fake_server.replay import experts_of
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.replay_fields import cut_replay, joined_replay, with_replay
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.group_shapes import GroupSettings, RolloutSamples, build_group, samples_from_atropos
from lachesis_tokens.samples.sample_records import read_sample
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_tokens.samples.verification import verify, verify_records
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.server.token_source import SettingsDiffer

ENGINES = ["vllm", "vllm-generate", "sglang"]
SMALL, LARGE = (3, 2, 8), (2, 4, 300)
"""Layers, experts of a token, experts: ids of one byte and of two."""


@asynccontextmanager
async def world(
    engine: str, *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[FakeServer, TokenServer]]:
    tokenizer = fake_tokenizer()
    policy = RandomTokens(Lengths(4, 30))
    async with FakeServer(policy, tokenizer=tokenizer, vary=True, **options) as fake:
        engines = [create_engine(engine, fake.settings(**(settings or {})))]
        async with TokenServer(engines, PromptBuilder(tokenizer), "hermes") as server:
            yield fake, server


async def rollout(server: TokenServer, **options: Any) -> tuple[MessageHistory, list[TokenSample]]:
    """Three turns, the last of which is sampled twice."""
    managed, history = server.for_rollout(), MessageHistory([{"role": "user", "content": "Where is the key?"}])
    for question in ("And then?", "Why?", None):
        history.append(await managed.chat(history, max_tokens=40, temperature=1.0, **options))
        if question is not None:
            history.append({"role": "user", "content": question})
    history.rewind(len(history) - 1, "again")
    history.append(await managed.chat(history, max_tokens=40, temperature=1.0, **options))
    return history, samples(history, rollout_id="r", outcome="completed")


def array_of(record: dict[str, Any]) -> numpy.ndarray:
    return numpy.frombuffer(base64.b64decode(record["data"]), "<" + numpy.dtype(record["dtype"]).str[1:]).reshape(
        record["shape"]
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_a_trainer_gets_the_experts_of_every_token_but_the_last(engine, shape):
    async with world(engine, settings={"routed_experts": True}, experts=shape) as (fake, server):
        _, found = await rollout(server)
        starts = [
            (seen.body.get("sampling_params") or seen.body).get("routed_experts_prompt_start")
            if engine != "sglang"
            else seen.body["routed_experts_start_len"]
            for seen in fake.requests
        ]
        ends = [len(seen.call.prompts[0]) + len(seen.completions[0].ids) - 1 for seen in list(fake.requests)]
    assert starts == [0, ends[0], ends[1], ends[1]], "only the rows that no earlier turn has cross the wire"
    assert len(found) == 2
    group = build_group([RolloutSamples("r", 1.0, found)], GroupSettings(1, ensure_scores_are_not_same=False))
    body = json.loads(json.dumps(group.to_atropos()))
    for sample in (*found, *samples_from_atropos(body)):
        assert verify(sample) == []
        record = sample.to_record()["experts"]
        assert record["dtype"] == ("uint8" if shape[2] <= 256 else "uint16")
        expected = numpy.array(experts_of(sample.tokens[:-1], shape)).reshape(len(sample.tokens) - 1, -1)
        assert (array_of(record).reshape(expected.shape) == expected).all()
        assert record["shape"][1:] == ([shape[0] * shape[1]] if engine == "sglang" else list(shape[:2]))
    assert body["overrides"][0]["experts"] == group.samples[0].to_record()["experts"]
    assert "experts" not in body["overrides"][0]["lachesis"]


@pytest.mark.parametrize("engine", ["vllm-generate", "sglang"])
async def test_top_p_is_trainable_with_the_mask_of_what_it_left(engine):
    settings = {"sampling_mask": True, "logprobs_mode": "processed" if engine != "sglang" else None}
    options = {"extra_body": {"top_k": 12, "top_p": 0.8}}
    cut = {"sampling_mask": True, "logprobs_mode": "processed"}
    async with world(engine, settings=settings, **cut) as (_, server):
        _, found = await rollout(server, **options)
    for sample in found:
        assert verify(sample) == []
        assert sample.spans[0].sampling["logprobs"] == "processed"
        counts = numpy.frombuffer(sample.sampling_mask.counts, "<u4")
        assert [bool(count) for count in counts] == [mask != -100 for mask in sample.masks]
        assert 1 < counts.max() <= 12
        read = read_sample(json.loads(json.dumps(sample.to_record())))
        assert (read.sampling_mask.ids, read.sampling_mask.counts) == (sample.sampling_mask.ids, counts.tobytes())
        assert "sampling mask" in verify(replace(sample, sampling_mask=None))[0]
        other = join_masks([SamplingMask.of([[5, 7]] * len(sample.tokens))])
        assert "does not have the token itself" in verify(replace(sample, sampling_mask=other))[0]
        bare = [replace(span, sampling={**span.sampling, "sampling_mask": False}) for span in sample.spans]
        assert any("top_p" in reason or "top_k" in reason for reason in verify(replace(sample, spans=tuple(bare))))


async def test_verify_finds_experts_of_other_tokens():
    async with world("vllm", settings={"routed_experts": True}, experts=SMALL) as (_, server):
        _, [sample, _] = await rollout(server)
    experts = sample.experts
    end, row = experts.end, experts.size * 6
    place = sample.spans[0].start * row
    changed = bytes([*experts.data[:place], experts.data[place] ^ 1, *experts.data[place + 1 :]])
    moved = experts.data[row:] + experts.data[:row]
    for data, words in (
        (changed, "turn 0 with experts that differ"),
        (moved, "with experts that differ"),
        (experts.data[:-row], "not of all"),
    ):
        assert any(words in reason for reason in verify(replace(sample, experts=replace(experts, data=data))))
    assert "with experts that differ" in verify(replace(sample, experts=None))[0]
    late = experts.rows(4, end)
    assert "not of all" in verify(replace(sample, experts=late))[0]
    record = sample.to_record()
    assert not verify_records([{**record, "experts": {**record["experts"], "shape": []}}]).ok


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_server_that_reports_no_experts_is_an_error_with_its_flag(engine):
    async with world(engine, settings={"routed_experts": True, "max_retries": 0}) as (_, server):
        with pytest.raises(BadResponse, match="--enable-return-routed-experts"):
            await server.for_rollout().chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("engine", ENGINES)
async def test_off_nothing_is_asked_for_and_nothing_is_kept(engine):
    async with world(engine, experts=SMALL, sampling_mask=False) as (fake, server):
        _, [sample, _] = await rollout(server)
        assert not any("routed_experts" in json.dumps(seen.body) for seen in fake.requests)
    assert sample.experts is None and sample.sampling_mask is None
    assert not {"experts", "sampling_mask"} & sample.to_record().keys()


@pytest.mark.parametrize(
    ("engine", "name"), [("atropos", "routed_experts"), ("llama.cpp", "routed_experts"), ("vllm", "sampling_mask")]
)
def test_an_engine_whose_api_reports_none_refuses_the_setting(engine, name):
    with pytest.raises(ValueError, match=name):
        create_engine(engine, ServerSettings("http://127.0.0.1:9/v1", "m", **{name: True}))


def test_all_servers_of_a_model_report_them_or_none_does():
    engines = [
        create_engine("vllm", ServerSettings(f"http://127.0.0.1:{port}/v1", "m", routed_experts=port == 9))
        for port in (9, 10)
    ]
    with pytest.raises(SettingsDiffer, match="routed_experts"):
        TokenServer(engines, PromptBuilder(fake_tokenizer()), "hermes")


@pytest.mark.parametrize("name", ["routed_experts", "sampling_mask"])
def test_a_server_without_token_ids_refuses_the_setting(name):
    with pytest.raises(ValueError, match="Phase 2"):
        ServerConfig(base_url="http://127.0.0.1:9/v1", **{name: True})
    assert getattr(ServerConfig(base_url="http://127.0.0.1:9/v1", server_type="sglang", **{name: True}), name)


def int32(rows: int, row: int = 3, start: int = 0) -> str:
    values = numpy.arange(start * row, (start + rows) * row, dtype="<i4") % 50
    return base64.b64encode(values.tobytes()).decode()


def npy(dtype: str, shape: tuple[int, ...], data: bytes) -> str:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return base64.b64encode(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + data).decode()


@pytest.mark.parametrize("shape", [[], [1], [1, 0], [1, -1, -1], [float("inf"), 1], None])
def test_a_record_of_experts_with_another_shape_is_malformed(shape):
    with pytest.raises(ValueError, match="not the record of routed experts"):
        RoutedExperts.from_record({"start": 0, "shape": shape, "dtype": "uint8", "data": "AA=="})


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        (int32(9), None),  # a server that does not know where to begin sends all rows
        (int32(5, start=4), None),
        (int32(4), "4 tokens, but 5 are new, of 9"),
        ("no base64!", "base64"),
        (None, "NoneType"),
        ("k05VTVBZAQACAHt9", "header"),
        ("k05VTVBZ", "not an .npy file"),
        (base64.b64encode(b"\x93NUMPY\x01\x00\xff\x1f" + b"(" * 8191).decode(), "header"),
        (npy("<i2", (5, 1, 3), b"\xff\xff" * 15), "negative"),
        (npy("|u1", (5, -1, -3), bytes(15)), "header"),
        (int32(5)[:-4], "57 bytes are not numbers of 4 bytes"),
        (7, "int"),
    ],
)
def test_rows_are_taken_only_for_the_tokens_that_they_belong_to(wire, problem):
    prompt = PromptIds([1, 2, 3, 4, 5, 6, 7])
    prompt.known_experts = RoutedExperts.from_int32(int32(4), 0, 3)
    settings = ServerSettings("http://127.0.0.1:9/v1", "m", routed_experts=True)

    def read() -> Generation:
        made = Generation([8, 9, 10], [-1.0, -1.0, -1.0], FinishReason.STOP)
        return with_replay(made, prompt, settings, experts=wire, mask=None, hint="see the flags")

    if problem is not None:
        with pytest.raises(BadResponse, match=problem):
            read()
        return
    piece = read().experts
    whole = RoutedExperts.from_int32(int32(9), 0, 3)
    assert (piece.start, piece.end) == (4, 9)
    joined = join_experts([prompt.known_experts, piece])
    assert (joined.start, joined.data) == (0, whole.data)


def test_pieces_of_a_completion_join_also_if_one_has_larger_ids_and_stop_before_a_gap():
    small = RoutedExperts(0, (2,), 1, bytes([1, 2, 3, 4]))
    large = RoutedExperts(1, (2,), 2, bytes([9, 9, 9, 9, 44, 1, 7, 0]))
    joined = join_experts([small, large])
    assert (joined.size, joined.end) == (2, 3)
    assert list(joined.data[::2]) == [1, 2, 3, 4, 44, 7]
    assert list(joined.data[1::2]) == [0, 0, 0, 0, 1, 0]
    assert join_experts([small, RoutedExperts(5, (2,), 1, b"ab")]).end == 2
    masks = join_masks([2, SamplingMask.of([[3, 4]]), SamplingMask.of([[5]])])
    assert len(masks) == 4
    assert masks.missing([0, 0, 4, 6]) == 3
    with pytest.raises(ValueError, match="not a list of ids"):
        SamplingMask.of([["a"]])


@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("engine", ["vllm-generate", "sglang"])
async def test_a_completion_in_two_parts_has_the_experts_and_masks_of_all_its_ids(engine, kept):
    """As an interrupted one: the rest is sampled after the ids of the beginning that are kept."""
    settings = {"routed_experts": True, "sampling_mask": True}
    async with world(engine, settings=settings, experts=SMALL, sampling_mask=True, mean_length=None) as (_, server):
        prompt = TokenPrefix(range(10, 30))
        [begun] = await server.generate(prompt, Sampling(8, top_k=5))
        begun = cut_replay(replace(begun, ids=begun.ids[:kept], logprobs=begun.logprobs[:kept]), prompt.length)
        longer = prompt.extend(begun.ids)
        [rest] = await server.generate(longer, Sampling(8, top_k=5), known_experts=begun.experts)
        joined = joined_replay(begun, rest)
    ids = [*longer.ids, *rest.ids]
    assert list(joined["experts"].data) == experts_of(ids[:-1], SMALL)
    mask = joined["sampling_mask"]
    assert len(mask) == len(begun.ids) + len(rest.ids)
    assert mask.missing(ids[20:]) is None
