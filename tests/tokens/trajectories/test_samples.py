"""Samples: every sampled token once, after the exact prefix after which it was sampled."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import MASKED, MASKED_LOGPROB, SampledTokens, TokenPrefix, digest_of
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import NoTokens, samples
from lachesis_tokens.samples.verification import verify, verify_records
from tests.support.certificates import aged
from tests.support.token_trees import END, SAMPLING, UNTIMED, Tree, completion, trees

START = TokenPrefix([1, 2, 3])


def sampled(tree: Tree) -> dict[TokenPrefix, SampledTokens]:
    """What was sampled, by piece."""
    return {response.tokens.after: response.tokens for response in tree.recorded if response.tokens is not None}


@UNTIMED
@given(trees())
def test_every_sampled_token_is_delivered_exactly_once_after_its_exact_prefix(tree: Tree) -> None:
    by_turn = list(sampled(tree).values())
    found = samples(tree, rollout_id="r")
    delivered = [span.turn for sample in found for span in sample.spans]
    assert sorted(delivered) == [turn for turn, tokens in enumerate(by_turn) if len(tokens)]
    for sample in found:
        for span in sample.spans:
            tokens = by_turn[span.turn]
            assert sample.tokens[: span.start] == tokens.prompt.ids
            assert sample.tokens[span.start : span.end] == sample.masks[span.start : span.end] == tokens.ids
            assert sample.logprobs[span.start : span.end] == list(tokens.logprobs)
            assert span.prefix_digest == digest_of(sample.tokens[: span.start])
        trained = {place for span in sample.spans for place in range(span.start, span.end)}
        for place in set(range(len(sample.tokens))) - trained:
            assert (sample.masks[place], sample.logprobs[place]) == (MASKED, MASKED_LOGPROB)
        assert sample.spans[-1].end == len(sample.tokens) == len(sample.masks) == len(sample.logprobs)


@UNTIMED
@given(trees())
def test_there_are_as_many_samples_as_leaves_and_their_weights_add_up_to_one(tree: Tree) -> None:
    pieces = [piece for piece, tokens in sampled(tree).items() if len(tokens)]
    inner = {ancestor for piece in pieces for ancestor in piece.lineage() if ancestor is not piece}
    found = samples(tree, rollout_id="r")
    assert len(found) == len([piece for piece in pieces if piece not in inner])
    assert [sample.index for sample in found] == list(range(len(found)))
    assert {sample.count for sample in found} <= {len(found)}
    if found:
        assert math.isclose(math.fsum(sample.weight for sample in found), 1)
        # Weighted, the mean loss of the samples is the mean loss of a sampled token of the rollout.
        losses = [value for tokens in sampled(tree).values() for value in tokens.logprobs]
        means = [
            math.fsum(value for value in sample.logprobs if value != MASKED_LOGPROB) / sample.trained
            for sample in found
        ]
        weighted = math.fsum(sample.weight * mean for sample, mean in zip(found, means, strict=True))
        assert math.isclose(weighted, math.fsum(losses) / len(losses), rel_tol=1e-9, abs_tol=1e-12)


@UNTIMED
@given(trees())
def test_all_of_them_verify_also_after_a_journey_through_json(tree: Tree) -> None:
    found = samples(tree, rollout_id="r", outcome="completed")
    records = [json.loads(json.dumps(sample.to_record(), allow_nan=False)) for sample in found]
    assert [read_sample(record) for record in records] == found
    assert [reason for sample in (*found, *records) for reason in verify(sample)] == []
    totals = verify_records(records)
    if found:
        count = sum(len(tokens) for tokens in sampled(tree).values())
        assert totals.ok
        assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (count, count, 0, 0)


@UNTIMED
@given(trees(), st.data())
def test_the_first_sample_is_the_path_of_the_head_and_trains_all_of_it(tree: Tree, data: st.DataObject) -> None:
    spoken = [response for response in tree.path if response.tokens is not None and len(response.tokens)]
    found = samples(tree)
    if spoken:
        head = spoken[-1].tokens
        assert head is not None
        assert found[0].tokens[: head.after.length] == head.after.ids
        turns = list(sampled(tree))
        expected = {turns.index(piece) for piece in head.after.lineage() if len(sampled(tree).get(piece, ()))}
        assert expected <= {span.turn for span in found[0].spans}
    assert all(len(span) for sample in found for span in sample.spans)


def test_a_conversation_without_edits_is_one_sample_with_the_observations_masked() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    second = tree.sample(first.extend([5, 6]), [7, END], model_version="step-12")
    (sample,) = samples(tree, rollout_id="r", outcome="completed")
    assert sample.tokens == second.ids == [1, 2, 3, 4, END, 5, 6, 7, END]
    assert sample.masks == [-100, -100, -100, 4, END, -100, -100, 7, END]
    assert sample.logprobs == [1.0, 1.0, 1.0, -0.25, -0.5, 1.0, 1.0, -0.25, -0.5]
    assert (sample.weight, sample.index, sample.count, sample.sampled, sample.end_of_turn) == (1.0, 0, 1, 4, (END,))
    span = sample.spans[1]
    assert (span.turn, span.start, span.end, span.model, span.model_version) == (1, 7, 9, "tiny", "step-12")
    assert (span.finish_reason, span.sampling) == ("stop", SAMPLING)


def test_tokens_shared_by_two_paths_are_trained_in_the_path_of_the_head() -> None:
    tree = Tree()
    shared = tree.sample(START, [4, END])
    tree.sample(shared.extend([5]), [6, END])
    kept = tree.sample(shared.extend([8]), [7, 7, END])
    tree.path = [tree.recorded[0], tree.recorded[2]]
    head, left = samples(tree)
    assert head.tokens == kept.ids
    assert [span.turn for span in head.spans] == [0, 2]
    assert [span.turn for span in left.spans] == [1]
    assert left.masks == [-100, -100, -100, -100, -100, -100, 6, END]
    assert (head.weight, left.weight) == (5 / 7, 2 / 7)


def test_of_several_completions_of_one_prompt_none_is_taken_for_the_beginning_of_another() -> None:
    tree = Tree()
    tree.sample(START, [4])
    tree.sample(START, [4, 5])
    tree.sample(START, [4])
    found = samples(tree)
    assert [sample.masks[3:] for sample in found] == [[4], [4, 5], [4]]
    assert [sample.weight for sample in found] == [0.25, 0.5, 0.25]


def test_a_completion_that_is_listed_twice_counts_once_and_an_empty_one_delivers_nothing() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    tree.recorded.append(dataclasses.replace(tree.recorded[0], latency=2.0))
    again = dataclasses.replace(sampled(tree)[first])
    tree.recorded.append(dataclasses.replace(tree.recorded[0], tokens=again))
    empty = tree.sample(first.extend([5]), [])
    tree.sample(empty.extend([6]), [7])
    tree.sample(TokenPrefix(), [])
    (sample,) = samples(tree)
    assert [(span.turn, span.start, span.end) for span in sample.spans] == [(0, 3, 5), (2, 7, 8)]


def test_nothing_sampled_makes_no_samples() -> None:
    assert samples(Tree()) == []
    assert samples(Tree([completion(START, [])], [completion(START, [])])) == []


def test_a_completion_without_tokens_is_an_error_that_names_it() -> None:
    tree = Tree()
    tree.sample(START, [4])
    tree.recorded.append(
        ChatResponse(Message("assistant", "42"), FinishReason.STOP, model="big", server="http://127.0.0.1:9/v1")
    )
    with pytest.raises(NoTokens, match=r"completion 1 \(model big, server http://127.0.0.1:9/v1\).*Phase 2"):
        samples(tree)


def test_two_thousand_turns_without_recursion() -> None:
    tree = Tree()
    prefix = START
    for turn in range(2000):
        prefix = tree.sample(prefix.extend([1]), [turn % 7, END])
    (sample,) = samples(tree, rollout_id="r")
    assert len(sample.spans) == 2000
    assert verify(sample) == []
    assert pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "is null, not an object"),
        ({"schema": "lachesis.sample/9"}, "schema is 'lachesis.sample/9'"),
        ({"tokens": "abc"}, "tokens is str, not list"),
        ({"weight": True}, "weight is bool, not float or int"),
        ({"spans": [3]}, r"spans\[0\] is int, not an object"),
        ({"spans": [{"turn": 0}]}, r"spans\[0\].start is missing"),
        ({"end_of_turn": ["<eos>"]}, "end_of_turn is"),
    ],
)
def test_a_record_that_is_no_sample_is_named(change: dict[str, object] | None, reason: str) -> None:
    tree = Tree()
    tree.sample(START, [4])
    record = None if change is None else {**samples(tree)[0].to_record(), **change}
    with pytest.raises(MalformedSample, match=reason):
        read_sample(record)


def test_versions_and_interrupts_survive_a_record_and_are_optional_in_old_ones() -> None:
    prompt = TokenPrefix([1, 2, 3])
    sampled = SampledTokens.sample(prompt, [4, 5, 6], [-0.5] * 3, versions=(("7", 0, 1), ("8", 1, 3)), interrupts=1)
    later = SampledTokens.sample(sampled.after.extend([9]), [7], [-0.5], versions=(("8", 0, 1),))
    responses = [
        ChatResponse(Message("assistant", ""), FinishReason.STOP, sampling=SAMPLING, tokens=tokens)
        for tokens in (sampled, later)
    ]
    (sample,) = samples(Tree(responses), rollout_id="r")
    assert sample.policy_versions == [("7", 3, 4), ("8", 4, 6), ("8", 7, 8)]
    assert sample.version_count == 2
    assert verify(sample) == []
    record = json.loads(json.dumps(sample.to_record()))
    assert read_sample(record) == sample
    for span in record["spans"]:
        del span["versions"], span["interrupts"]
    old = read_sample(aged(record))
    assert [(span.versions, span.interrupts) for span in old.spans] == [((), 0), ((), 0)]
    assert verify(old) == []
