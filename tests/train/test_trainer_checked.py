"""Nothing is trained that is not proven: certificates are verified, and without them all that can be checked is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.samples.group_shapes import (
    samples_from_atropos,
    with_digest,
)
from lachesis_train.trainer.checked import GroupRefused, Refusal, Uncertified, checked_group
from tests.support.trained_groups import group_body


def ours() -> dict[str, Any]:
    return group_body("g", "q", ["yes", "no"], [1.0, 0.0])


def stock(**changes: Any) -> dict[str, Any]:
    """As a stock Atropos environment sends it."""
    found: dict[str, Any] = {
        "tokens": [[1, 2, 3, 4], [1, 2, 5]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5]],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -0.1]],
        "scores": [1.0, 0.0],
        "advantages": None,
        "overrides": None,
        "group_overrides": None,
        "generation_params": None,
        "images": None,
    }
    return found | changes


def refusal(body: dict[str, Any], uncertified: Uncertified = "refuse") -> GroupRefused:
    with pytest.raises(GroupRefused) as caught:
        checked_group(body, uncertified)
    return caught.value


def test_a_proven_group_is_taken_as_it_is() -> None:
    body = ours()
    found = checked_group(body)
    assert [list(each.tokens) for each in found] == body["tokens"]
    assert [each.score for each in found] == [1.0, 0.0]
    assert len({each.rollout for each in found}) == 2


@pytest.mark.parametrize("value", [-1e300, -1e39])
def test_a_logprob_that_is_infinite_as_it_is_sent_to_an_engine_is_not_trained_on(value: float) -> None:
    found = refusal(group_body("g", "q", ["yes", "no"], [1.0, 0.0], p=value))
    assert (found.reason, "infinite in float32" in found.detail) == (Refusal.UNPROVEN, True)
    assert checked_group(group_body("g", "q", ["yes", "no"], [1.0, 0.0], p=-1e38))


@pytest.mark.parametrize(("given", "rows"), [(122, 122), (10**12, ANY_ROW)])
def test_ids_that_are_no_rows_of_the_model_are_not_trained_on(given: int, rows: int) -> None:
    def body(number: int) -> dict[str, Any]:
        return stock(tokens=[[1, number, 3, 4], [1, 2, 5]])

    with pytest.raises(GroupRefused, match=f"sequence 0: token ids .* {given}, .* the tokenizer of the trained model"):
        checked_group(body(given), "allow", rows)
    assert checked_group(body(121), "allow", rows)


def _edited(place: str, value: Any) -> Any:
    def edit(body: dict[str, Any]) -> None:
        body[place][0][-1] = value

    return edit


def _without_a_certificate(body: dict[str, Any]) -> None:
    del body["overrides"][0]["lachesis"]


def _another_rollout(body: dict[str, Any]) -> None:
    body["overrides"][1]["lachesis"]["rollout_id"] = body["overrides"][0]["lachesis"]["rollout_id"]


def _swapped(body: dict[str, Any]) -> None:
    body["tokens"].reverse()


@pytest.mark.parametrize("setting", ["refuse", "allow"])
@pytest.mark.parametrize(
    "edit",
    [
        _edited("tokens", 7),
        _edited("masks", -100),
        _edited("inference_logprobs", -9.0),
        _edited("inference_logprobs", None),
        _without_a_certificate,
        _another_rollout,
        _swapped,
        lambda body: body.update(scores=[1.0]),
        lambda body: body.update(scores=[1.0, None]),
        lambda body: body.update(advantages=[[0.0]]),
        lambda body: body.update(advantages=[[0.0], [0.0]]),
        lambda body: body.update(inference_logprobs=None),
    ],
)
def test_a_damaged_group_of_ours_is_refused_whatever_the_settings(edit: Any, setting: Uncertified) -> None:
    body = ours()
    edit(body)
    assert refusal(body, setting).reason is Refusal.UNPROVEN


def _resealed(body: dict[str, Any]) -> dict[str, Any]:
    """With the digests of what it holds now."""
    for sample, overrides in zip(samples_from_atropos(body), body["overrides"], strict=True):
        overrides["lachesis"]["digest"] = sample.header_digest()
    return with_digest(body)


def _score(body: dict[str, Any]) -> None:
    body["scores"].reverse()


def _versions(body: dict[str, Any]) -> None:
    body["overrides"][0]["policy_versions"][0][0] = "run:7"


def _versions_of_the_span(body: dict[str, Any]) -> None:
    body["overrides"][0]["lachesis"]["spans"][0]["versions"][0][0] = "run:7"


def _temperature(body: dict[str, Any]) -> None:
    body["overrides"][0]["temperature"] = 0.5


def _advantages(body: dict[str, Any]) -> None:
    body["advantages"] = [[value + 1 if value else value for value in row] for row in body["advantages"]]


def _advantages_of_the_other(body: dict[str, Any]) -> None:
    body["advantages"] = [[-value for value in row] for row in body["advantages"]]


@pytest.mark.parametrize("again", [False, True], ids=["old digests", "new digests"])
@pytest.mark.parametrize(
    "edit", [_score, _versions, _versions_of_the_span, _temperature, _advantages, _advantages_of_the_other]
)
def test_what_a_group_says_twice_has_to_agree(edit: Any, again: bool) -> None:
    body = group_body("g", "q", ["yes", "no"], [1.0, 0.0], split=SplitRollouts.ALL)
    assert checked_group(_resealed(copy.deepcopy(body)))
    edit(body)
    assert refusal(_resealed(body) if again else body).reason is Refusal.UNPROVEN


@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body["messages"][0][0].update(content="another question"),
        lambda body: body["overrides"][0].update(turn_rewards=[1.0]),
        lambda body: body["overrides"][0].update(set_advantage_to_zero=True),
        lambda body: body["overrides"][0]["lachesis"].update(discarded=True),
        lambda body: body["overrides"][0]["lachesis"].update(outcome="max_turns"),
        lambda body: body["overrides"][0]["lachesis"]["spans"][0].update(finish_reason="length"),
        lambda body: body["overrides"][0]["lachesis"]["spans"][0].update(model="another"),
        lambda body: body["group_overrides"].update(temperature=1.0),
        lambda body: body["group_overrides"].pop("lachesis"),
        lambda body: body["overrides"][0]["lachesis"].pop("digest"),
        lambda body: body.update(advantages=[[0.0] * len(row) for row in body["tokens"]]),
    ],
)
def test_a_field_of_a_group_that_was_changed_is_noticed(edit: Any) -> None:
    body = ours()
    edit(body)
    assert refusal(body, "allow").reason is Refusal.UNPROVEN


def test_a_group_of_an_older_version_needs_a_setting() -> None:
    body = ours()
    del body["group_overrides"]["lachesis"]
    for overrides in body["overrides"]:
        del overrides["lachesis"]["digest"]
        for span in overrides["lachesis"]["spans"]:
            del span["messages_digest"]
    found = refusal(body)
    assert found.reason is Refusal.UNCERTIFIED
    assert "--training.uncertified allow" in found.detail
    assert len(checked_group(body, "allow")) == 2


def test_groups_without_certificates_need_a_setting_that_the_refusal_names() -> None:
    found = refusal(stock())
    assert found.reason is Refusal.UNCERTIFIED
    assert "--training.uncertified allow" in found.detail
    samples = checked_group(stock(), "allow")
    assert [each.trained.tolist() for each in samples] == [[2, 3], [2]]
    assert [each.logprobs.tolist() for each in samples] == [[-0.5, -0.25], [-0.1]]
    assert [each.rollout for each in samples] == ["0", "1"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"masks": [[-100, -100, 3], [-100, -100, 5]]}, "differ in length"),
        ({"tokens": [[1, 2, 3, 4]]}, "differ in length"),
        ({"masks": [[0, 0, 1, 1], [0, 0, 1]]}, "not 0 and 1"),
        ({"masks": [[-100, -100, 3, 9], [-100, -100, 5]]}, "masks[3] is 9, the token 4"),
        ({"masks": [[-100] * 4, [-100, -100, 5]]}, "trains nothing"),
        ({"masks": [[1, 2, 3, 4], [-100, -100, 5]]}, "logprob above 0"),
        ({"inference_logprobs": None}, "no inference_logprobs"),
        ({"inference_logprobs": [[1.0, 1.0, -0.5, None], [1.0, 1.0, -0.1]]}, "not a list of 4 finite numbers"),
        ({"inference_logprobs": [[1.0, 1.0, 0.5, -1.0], [1.0, 1.0, -0.1]]}, "logprob above 0"),
        ({"tokens": [[1, -2, 3, 4], [1, 2, 5]]}, "not token ids"),
        ({"tokens": [[1, 2.5, 3, 4], [1, 2, 5]]}, "not token ids"),
        ({"scores": [1e200, 0.0]}, "score"),
    ],
)
def test_what_can_be_checked_of_them_is(changes: dict[str, Any], says: str) -> None:
    found = refusal(stock(**changes), "allow")
    assert found.reason is Refusal.UNPROVEN
    assert says in found.detail


def test_their_first_token_cannot_be_a_target() -> None:
    body = stock(masks=[[1, 2, 3, 4], [-100, -100, 5]], inference_logprobs=[[-1.0] * 4, [1.0, 1.0, -0.1]])
    assert "its first token" in refusal(body, "allow").detail


@pytest.mark.parametrize(
    "where",
    [
        {"generation_params": {"temperature": 0.7}},
        {"group_overrides": {"temperature": 0.7}},
        {"overrides": [{"temperature": 0.7}, {"temperature": 0.7}], "generation_params": {"temperature": 1.0}},
    ],
)
def test_their_temperature_is_refused_where_they_name_one(where: dict[str, Any]) -> None:
    assert refusal(stock(**where), "allow").reason is Refusal.TEMPERATURE


def test_advantages_that_they_carry_are_used_and_can_be_set_to_zero() -> None:
    carried = [[0.0, 0.0, 0.5, 0.25], [0.0, 0.0, -1.0]]
    first, second = checked_group(stock(advantages=carried), "allow")
    assert first.advantages is not None
    assert second.advantages is not None
    assert first.advantages.tolist() == [0.5, 0.25]
    for body in (stock(advantages=carried), stock()):
        body["overrides"] = [{"set_advantage_to_zero": True}, {}]
        (first, _) = checked_group(body, "allow")
        assert first.advantages is not None
        assert not first.advantages.any()
