"""The certificate: every change of a record is noticed, what is no record is named, and nothing raises."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lachesis.cli import main
from lachesis_messages.tokens import MASKED, MASKED_LOGPROB, TokenPrefix
from lachesis_tokens.samples.sample_records import read_sample
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import RecordVerifier, verify, verify_records
from tests.support.certificates import aged, resealed
from tests.support.token_trees import END, SAMPLING, UNTIMED, Tree, trees

Record = dict[str, Any]
NO_SAMPLES = (
    "has no token ids: a model that runs here records them (-m embedded, a GGUF file), and a server with "
    "--openai.server_type vllm or sglang"
)
START = TokenPrefix([1, 2, 3])


def conversation() -> Tree:
    tree = Tree()
    first = tree.sample(START, [4, 4, END])
    tree.sample(first.extend([5, 6]), [7, END])
    return tree


def record(tree: Tree | None = None, rollout_id: str = "r") -> Record:
    (sample,) = samples(tree or conversation(), rollout_id=rollout_id)
    return copied(sample.to_record())


def copied(value: Record) -> Record:
    found: Record = json.loads(json.dumps(value))
    return found


# What can happen to a record: each takes one that verifies and changes it in place.


def _place(sample: Record, draw: st.DrawFn, trained: bool | None = None) -> int:
    places = [place for place, mask in enumerate(sample["masks"]) if trained is None or (mask != MASKED) is trained]
    assume(places)
    return draw(st.sampled_from(places))


def another_id(sample: Record, draw: st.DrawFn) -> None:
    place = _place(sample, draw)
    changed = draw(st.integers(0, 12).filter(lambda token: token != sample["tokens"][place]))
    if sample["masks"][place] != MASKED:
        sample["masks"][place] = changed
    sample["tokens"][place] = changed


def another_mask(sample: Record, draw: st.DrawFn) -> None:
    place = _place(sample, draw)
    sample["masks"][place] = draw(st.integers(-101, 12).filter(lambda mask: mask != sample["masks"][place]))


def another_logprob(sample: Record, draw: st.DrawFn) -> None:
    place = _place(sample, draw)
    values = st.sampled_from([0.0, -0.5, -1e-9, 0.5, MASKED_LOGPROB, math.nan, math.inf, -math.inf])
    sample["logprobs"][place] = draw(values.filter(lambda value: value != sample["logprobs"][place]))


def a_masked_span(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    sample["spans"].remove(span)
    length = span["end"] - span["start"]
    sample["masks"][span["start"] : span["end"]] = [MASKED] * length
    sample["logprobs"][span["start"] : span["end"]] = [MASKED_LOGPROB] * length


def a_moved_span(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    span[draw(st.sampled_from(["start", "end"]))] += draw(st.sampled_from([-2, -1, 1, 2]))


def a_moved_span_and_its_mask(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    by = draw(st.sampled_from([-1, 1]))
    logprobs = sample["logprobs"][span["start"] : span["end"]]
    a, b = span["start"] + by, span["end"] + by
    assume(a >= 0 and b <= len(sample["tokens"]))
    for place in range(span["start"], span["end"]):
        sample["masks"][place], sample["logprobs"][place] = MASKED, MASKED_LOGPROB
    sample["masks"][a:b], sample["logprobs"][a:b] = sample["tokens"][a:b], logprobs
    span["start"], span["end"] = a, b


def a_dropped_token(sample: Record, draw: st.DrawFn) -> None:
    place = _place(sample, draw)
    for name in ("tokens", "masks", "logprobs"):
        del sample[name][place]
    for span in sample["spans"]:
        span["start"] -= span["start"] > place
        span["end"] -= span["end"] > place


def an_inserted_token(sample: Record, draw: st.DrawFn) -> None:
    place = draw(st.integers(0, len(sample["tokens"])))
    for name, value in (("tokens", draw(st.integers(0, 12))), ("masks", MASKED), ("logprobs", MASKED_LOGPROB)):
        sample[name].insert(place, value)
    for span in sample["spans"]:
        span["start"] += span["start"] >= place
        span["end"] += span["end"] > place


def a_shorter_list(sample: Record, draw: st.DrawFn) -> None:
    del sample[draw(st.sampled_from(["tokens", "masks", "logprobs"]))][-1]


def a_span_twice(sample: Record, draw: st.DrawFn) -> None:
    sample["spans"].append(copy.deepcopy(draw(st.sampled_from(sample["spans"]))))


def another_digest(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    span[draw(st.sampled_from(["prefix_digest", "digest", "logprobs_digest"]))] = "0" * 32


def another_share(sample: Record, draw: st.DrawFn) -> None:
    name = draw(st.sampled_from(["weight", "sampled"]))
    sample[name] *= draw(st.sampled_from([2, 3, -1, 0]))


def another_place(sample: Record, draw: st.DrawFn) -> None:
    sample["index"] = draw(st.sampled_from([-1, sample["count"]]))


def other_sampling(sample: Record, draw: st.DrawFn) -> None:
    changes: list[Record] = [{"top_p": 0.9}, {"temperature": 0}, {"temperature": 0.7}, {"logprobs": "?"}, {"top_k": 40}]
    draw(st.sampled_from(sample["spans"]))["sampling"].update(draw(st.sampled_from(changes)))


def other_versions(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    count = span["end"] - span["start"]
    changes = [
        [["7", 0, count + 1]],
        [["7", 1, count]],
        [["7", 0, count], ["8", count, count]],
        [["7", 0, count], ["7", 0, count]],
        [["", 0, count]],
        [["7", 0, str(count)]],
        [["7", 0]],
        [[7, 0, count]],
    ]
    span["versions"] = draw(st.sampled_from(changes))


def other_interrupts(sample: Record, draw: st.DrawFn) -> None:
    span = draw(st.sampled_from(sample["spans"]))
    span["interrupts"] = draw(st.sampled_from([-1, span["end"] - span["start"], "1", None]))


MUTATIONS: list[Callable[[Record, st.DrawFn], None]] = [
    another_id,
    another_mask,
    another_logprob,
    a_masked_span,
    a_moved_span,
    a_moved_span_and_its_mask,
    a_dropped_token,
    an_inserted_token,
    a_shorter_list,
    a_span_twice,
    another_digest,
    another_share,
    another_place,
    other_sampling,
    other_versions,
    other_interrupts,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@UNTIMED
@given(tree=trees(max_completions=5), data=st.data())
def test_every_change_of_a_record_is_noticed(
    mutate: Callable[[Record, st.DrawFn], None], tree: Tree, data: st.DataObject
) -> None:
    found = samples(tree, rollout_id="r")
    assume(found)
    # NaN is what a record can hold, and is not equal to itself: compare as text.
    changed = copied(data.draw(st.sampled_from(found)).to_record())
    assert verify(changed) == []
    before = json.dumps(changed)
    mutate(changed, data.draw)  # type: ignore[arg-type]
    assume(json.dumps(changed) != before)
    assert verify(changed) != []
    totals = verify_records([changed])
    assert not totals.ok
    assert (totals.rejected, totals.delivered) == (1, 0)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.just(-(10**400))
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@UNTIMED
@given(st.data())
def test_nothing_raises_on_a_record_that_holds_anything_anywhere(data: st.DataObject) -> None:
    sample = record()
    holder: Any = data.draw(st.sampled_from([sample, sample["spans"][0], sample["spans"][1]["sampling"]]))
    key = data.draw(st.sampled_from(sorted(holder)))
    if isinstance(holder[key], list) and holder[key] and data.draw(st.booleans()):
        holder, key = holder[key], data.draw(st.integers(0, len(holder[key]) - 1))
    holder[key] = data.draw(junk)
    assert all(isinstance(reason, str) for reason in verify(sample))
    group = {"samples": [sample, data.draw(junk)], "undelivered": data.draw(junk)}
    for line in (sample, group, data.draw(junk)):
        verify_records([line, line])


def test_a_doubled_end_of_turn_is_rejected() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    tree.sample(first.extend([END, 5]), [7, END])
    assert verify(record(tree)) == ["the end-of-turn token of turn 0 is repeated (tokens[5] = 9)"]


def test_an_answer_that_goes_on_after_its_end_is_rejected() -> None:
    tree = Tree()
    tree.sample(START, [4, END, 6, END])
    reason = "turn 0 goes on after its end-of-turn token (tokens[4] = 9): the server did not stop there"
    assert verify(record(tree)) == [f"{reason}; set stop_token_ids [9]"]


def test_a_suffix_with_the_logprobs_of_another_prefix_is_rejected() -> None:
    # The same ids after a summary: the logprobs from the long context do not belong here.
    tree = Tree()
    tree.sample(TokenPrefix([1, 1, 1]), [7, END], logprobs=[-0.1, -0.2])
    long = record(tree)
    kept = {**long, "tokens": [2, 7, END], "masks": [-100, 7, END], "logprobs": [1.0, -0.1, -0.2]}
    kept["spans"] = [{**long["spans"][0], "start": 1, "end": 3}]
    kept = resealed(kept)
    assert verify(kept) == ["turn 0 after another prefix than when it was sampled"]
    assert verify_records([kept]).wrong_prefix == 2


@pytest.mark.parametrize("logprob", [0.1, MASKED_LOGPROB, math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_none_is_rejected_also_where_a_server_reported_it(logprob: float) -> None:
    tree = Tree()
    tree.sample(START, [4, END], logprobs=[-0.5, logprob])
    assert verify(samples(tree)[0]) == [f"logprobs[4] is {logprob!r}, not the logprob of a trained token"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokens", True, "tokens[3] is bool"),
        ("tokens", "4", "tokens[3] is str"),
        ("tokens", -4, "tokens[3] is -4: token ids are 0"),
        ("tokens", 1 << 32, "tokens[3] is 4294967296: token ids are 0"),
        ("tokens", 10**5000, "tokens[3] is a huge number"),
        ("masks", True, "masks[3] is bool"),
        ("masks", 10**5000, "masks[3] is a huge number"),
        ("logprobs", None, "logprobs[3] is NoneType"),
        ("logprobs", 10**400, "logprobs[3] is a huge number, not the logprob"),
        ("logprobs", -(10**400), "logprobs[3] is a huge number, not the logprob"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_id_or_logprob_is_named_with_its_place(name: str, value: Any, reason: str) -> None:
    changed = record()
    changed[name][3] = value
    assert verify(changed)[0].startswith(reason)


def test_a_sampling_record_that_cannot_be_read_is_a_reason() -> None:
    changed = record()
    changed["spans"][0]["sampling"]["temperature"] = 10**400
    (reason,) = verify(resealed(changed))
    assert reason.startswith("turn 0: ")


def test_samples_of_a_rollout_have_to_agree_on_it() -> None:
    tree = conversation()
    tree.sample(START, [8, 8])
    first, second = (copied(sample.to_record()) for sample in samples(tree, rollout_id="r"))
    totals = verify_records([first, resealed({**second, "sampled": 8, "weight": 2 / 8})])
    assert [problem.reason for problem in totals.problems] == [
        "sampled is 8, but 7 in an earlier sample of the rollout",
        "5 of 7 sampled tokens delivered",
    ]
    assert verify_records([first, resealed({**second, "count": 3})]).rejected == 1


def test_a_turn_is_trained_once_in_a_sample() -> None:
    changed = record()
    changed["spans"][1]["turn"] = 0
    assert verify(changed) == ["spans[1]: turn 0 is repeated"]
    changed["spans"][1]["turn"] = -1
    assert verify(changed) == ["spans[1]: turn -1 is negative"]


def test_unconfirmed_prompts_are_counted_and_earlier_records_are_read() -> None:
    """Whether to train on them is a setting: the file itself is as it was written."""
    old = record()
    assert verify_records([old]).unchecked == 0
    old = aged(old)
    first = old["spans"][0]
    assert first.pop("prompt_checked") == "ids"
    totals = verify_records([old])
    assert totals.ok
    assert totals.unchecked == first["end"] - first["start"] < totals.delivered
    first["prompt_checked"] = "surely"
    assert verify(old) == ["spans[0].prompt_checked is 'surely', not ids, length or none"]


def test_sampling_from_another_distribution_is_rejected_with_the_setting_to_change() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END], sampling={**SAMPLING, "top_p": 0.95})
    tree.sample(first.extend([5]), [4, END], sampling={**SAMPLING, "top_p": 0.95})
    (reason,) = verify(record(tree))
    assert reason.startswith("turns 0, 1: top_p = 0.95")


@pytest.mark.parametrize(
    "name",
    [
        *("structural_tag", "json_schema", "regex", "ebnf", "thinking_budget", "watermark"),  # SGLang
        *(
            "structured_outputs",
            "guided_decoding",
            "logits_processors",
            "watermarking",
            "trace_decode_token_ids",
        ),  # vLLM
    ],
)
def test_text_that_a_server_is_forced_to_write_is_not_a_sample_of_the_policy(name: str) -> None:
    tree = Tree()
    tree.sample(START, [4, END], sampling={**SAMPLING, name: {"any": "value"}})
    (reason,) = verify(record(tree))
    assert reason.startswith(f"turn 0: {name} samples from another distribution")


# A file


def test_totals_of_a_file_that_is_fine() -> None:
    tree = conversation()
    tree.sample(START, [8, 8])
    lines = [sample.to_record() for sample in samples(tree, rollout_id="a")]
    lines.append({"samples": [record(rollout_id="b")], "undelivered": {"c": 11}})
    totals = verify_records(lines)
    assert totals.ok
    assert (totals.samples, totals.rollouts, totals.rejected) == (3, 3, 0)
    assert (totals.sampled, totals.delivered, totals.undelivered) == (23, 12, 11)
    assert (totals.duplicated, totals.wrong_prefix, totals.lost) == (0, 0, 0)


def test_a_repeated_sample_is_counted_as_duplicated() -> None:
    totals = verify_records([record(), record()])
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (5, 5, 5, 0)
    assert [(problem.line, problem.rollout_id) for problem in totals.problems] == [(2, "r")]
    assert totals.problems[0].reason == "turns 0, 1 (5 tokens) trained again"


def test_a_completion_of_two_rollouts_is_duplicated_and_an_equal_one_is_not() -> None:
    tree, equal = conversation(), conversation()
    first = [record(tree, name) for name in ("a", "b")]
    totals = verify_records(first)
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (5, 5, 5, 0)
    assert [(each.line, each.rollout_id, each.reason) for each in totals.problems] == [
        (2, "b", f"turn {turn} ({count} tokens) trained again: it is the same completion as turn {turn} of rollout a")
        for turn, count in ((0, 3), (1, 2))
    ]
    assert verify_records([record(tree, "a"), record(equal, "b")]).ok
    assert verify_records([aged(each) for each in first]).ok, "older records have no ids of completions"


def test_a_shared_turn_that_two_samples_train_is_counted_as_duplicated() -> None:
    tree = Tree()
    shared = tree.sample(START, [4, END])
    tree.sample(shared.extend([5]), [6, END])
    tree.sample(shared.extend([8]), [7, 7, END])
    first, second = (copied(sample.to_record()) for sample in samples(tree, rollout_id="r"))
    second["spans"].insert(0, first["spans"][0])
    for name in ("masks", "logprobs"):
        second[name][3:5] = first[name][3:5]
    second["weight"] = 5 / 7
    second = resealed(second)
    assert verify(second) == []
    totals = verify_records([first, second])
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (7, 7, 2, 0)
    assert not totals.ok


def test_two_rollouts_that_say_the_same_are_two() -> None:
    totals = verify_records([record(rollout_id="a"), record(rollout_id="b")])
    assert totals.ok
    assert (totals.rollouts, totals.delivered, totals.duplicated) == (2, 10, 0)


def test_tokens_in_no_sample_are_lost_unless_the_group_left_them_out() -> None:
    tree = conversation()
    tree.sample(START, [8, 8])
    kept, left = samples(tree, rollout_id="r")
    totals = verify_records([kept.to_record()])
    assert (totals.sampled, totals.delivered, totals.lost) == (7, 5, 2)
    assert [problem.reason for problem in totals.problems] == ["5 of 7 sampled tokens delivered"]
    group: Record = {"samples": [kept.to_record()], "undelivered": {"r": left.trained}}
    totals = verify_records([group])
    assert totals.ok
    assert (totals.sampled, totals.delivered, totals.undelivered, totals.lost) == (7, 5, 2, 0)
    assert not verify_records([{**group, "undelivered": {"r": 3}}]).ok


def group(**more: Any) -> Record:
    """A group as an older version wrote it: `a` (7 tokens in two samples) and `b` (5) scored, `c` left out after 4."""
    tree = conversation()
    tree.sample(START, [8, 8])
    of_a, of_b = samples(tree, rollout_id="a"), samples(conversation(), rollout_id="b")
    rollouts = [("a", 0, 7, 0), ("b", 1, 5, 3), ("c", None, 4, 0)]
    names = ("rollout_id", "place", "completion_tokens", "lost_completion_tokens")
    found = {
        "schema": "lachesis.group/1",
        "run": "one",
        "number": 0,
        "scores": [1.0, 0.0],
        "samples": [sample.to_record() for sample in (*of_a, *of_b)],
        "rollouts": [dict(zip(names, rollout, strict=True)) for rollout in rollouts],
        "beside": {"completion_tokens": 6, "lost_completion_tokens": 1},
        **more,
    }
    return aged(found)


def reasons(*records: Any) -> list[tuple[str, str]]:
    return [(problem.rollout_id, problem.reason) for problem in verify_records(records).problems]


def test_what_a_group_leaves_out_by_its_own_record_is_undelivered() -> None:
    """A rollout without a score, the tokens of broken starts, and what was sampled beside the rollouts."""
    totals = verify_records([group()])
    assert totals.ok, totals.problems
    assert (totals.sampled, totals.delivered, totals.undelivered, totals.lost) == (26, 12, 14, 0)


def test_a_file_without_samples_is_an_error() -> None:
    """A run over chat completions (Phase 1) names the tokens that its rollouts sampled, and holds none of them."""
    without = [group(samples=[], number=at) for at in range(3)]
    (problem,) = verify_records(without).problems
    assert problem.reason.startswith("has no token ids: ")
    assert verify_records(without).lost == 12
    assert reasons({"samples": [], "undelivered": {"r": 5}})[0][1].startswith("has no token ids")


def test_a_group_from_which_samples_were_removed_is_noticed() -> None:
    whole = group()
    of_a = [sample for sample in whole["samples"] if sample["rollout_id"] == "a"]
    of_b = [sample for sample in whole["samples"] if sample["rollout_id"] == "b"]
    assert reasons({**whole, "samples": of_a}) == [("b", "0 of 5 sampled tokens delivered")]
    assert verify_records([{**whole, "samples": of_a}]).lost == 5
    assert reasons({**whole, "samples": of_a[:1] + of_b}) == [("a", "5 of 7 sampled tokens delivered")]
    counted = [{**sample, "count": 3} for sample in of_a]
    assert reasons({**whole, "samples": counted + of_b}) == [
        ("a", "2 of 3 samples, and nothing was left out on purpose")
    ]
    same = [of_a[0], {**of_a[1], "index": 0}]
    assert reasons({**whole, "samples": same + of_b})[0] == ("a", "samples[1]: index 0 occurs twice")
    # With what it sampled, according to the record of the rollout, as small as what is left.
    fewer = [{**sample, "sampled": 5, "weight": 1.0, "count": 1} for sample in of_a[:1]]
    assert reasons({**whole, "samples": fewer + of_b}) == [("a", "5 of 7 sampled tokens delivered")]


def test_a_group_from_which_rollouts_were_removed_is_noticed() -> None:
    whole = group()
    of_a = [sample for sample in whole["samples"] if sample["rollout_id"] == "a"]
    without = {**whole, "samples": of_a, "rollouts": [whole["rollouts"][0], whole["rollouts"][2]]}
    assert reasons(without) == [("", "scores of 2 rollouts, but rollouts[] names 1 with a score")]
    unnamed = {**whole, "scores": [1.0], "rollouts": whole["rollouts"][:1]}
    assert reasons(unnamed) == [("b", "has samples, but is not in rollouts[] with a score")]
    made_up = {**whole, "undelivered": {"z": 9}}
    assert reasons(made_up) == [("z", "undelivered names it, but it is not in rollouts[] with a score")]
    left_out = {**whole, "samples": of_a, "undelivered": {"b": 4}}
    assert reasons(left_out) == [("b", "0 of 5 sampled tokens delivered, 4 left out on purpose")]
    broken = {**whole, "rollouts": [{**whole["rollouts"][0], "completion_tokens": -1}, *whole["rollouts"][1:]]}
    assert ("a", "rollouts[0]: completion_tokens is -1, not a number of tokens") in reasons(broken)


def test_a_file_from_which_groups_were_removed_is_noticed() -> None:
    def renamed(number: int, run: str = "one") -> Record:
        other = json.loads(json.dumps(group(number=number, run=run)).replace('"a"', f'"a{run}{number}"'))
        return copied(json.loads(json.dumps(other).replace('"b"', f'"b{run}{number}"')))

    assert verify_records([renamed(1), renamed(0), renamed(0, "two"), renamed(2)]).ok
    assert reasons(renamed(0), renamed(3), renamed(1, "two")) == [
        ("", "groups 1, 2 of run one are missing"),
        ("", "group 0 of run two is missing"),
    ]
    assert ("", "group 0 of run one occurs twice") in reasons(renamed(0), renamed(0))


def test_a_rejected_sample_does_not_speak_for_its_rollout() -> None:
    broken = {**record(), "sampled": 50}
    totals = verify_records([broken, record()])
    assert (totals.rejected, totals.sampled, totals.delivered, totals.lost) == (1, 5, 5, 0)
    assert verify_records([broken]).lost == 50


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (3, "is int, not an object"),
        ({"messages": []}, "is neither a sample"),
        ({"samples": [], "undelivered": [1]}, "undelivered is list"),
        ({"samples": [], "undelivered": {"r": -1}}, "undelivered: 'r': -1 is not a number of tokens"),
        ({"samples": [None]}, r"samples[0]: is null"),
    ],
)
def test_a_line_that_is_neither_a_sample_nor_a_group_is_named(line: Any, reason: str) -> None:
    (problem,) = verify_records([line]).problems
    assert problem.line == 1
    assert problem.reason.startswith(reason)


def test_samples_without_the_id_of_their_rollout_are_rejected_in_a_file() -> None:
    totals = verify_records([record(rollout_id="")])
    assert totals.rejected == 1
    assert totals.problems[0].reason.startswith("rollout_id is empty")


def test_problems_are_counted_when_they_are_no_longer_kept() -> None:
    totals = verify_records([None] * 50, max_problems=3)
    assert (totals.problem_count, len(totals.problems)) == (50, 3)


def test_a_verifier_can_be_asked_while_it_is_fed() -> None:
    verifier = RecordVerifier()
    assert [problem.reason for problem in verifier.totals().problems] == [NO_SAMPLES]
    verifier.feed(record(), 1)
    assert verifier.totals().ok


# The command


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_says_ok_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", record(), "\n", {"samples": [record(rollout_id="b")]})
    assert main(["verify", "--json", str(good)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert said["files"][0]["delivered"] == 10


def test_the_command_names_file_line_rollout_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", record())
    bad = write(tmp_path / "bad.jsonl", "\n", record(), '{"tokens": [1,\n', record(), '{"torn')
    empty = write(tmp_path / "empty.jsonl")
    assert main(["verify", *map(str, (good, bad, empty))]) == 1
    printed = capsys.readouterr().out
    assert f"{bad}, line 3: not JSON" in printed
    assert f"{bad}, line 4: rollout r: turns 0, 1 (5 tokens) trained again" in printed
    assert f"{bad}, line 5: not JSON" in printed
    assert "torn or half written" in printed
    assert f"{empty}: it is empty" in printed
    assert printed.startswith(f"ok    {good}: 1 sample of 1 rollout, 0 rejected")
    assert printed.count("WRONG") == 1, "an empty file is not wrong"
    assert f"none  {empty}: there is nothing to verify" in printed


@pytest.mark.parametrize("evaluation", [True, False])
def test_an_evaluation_may_be_sampled_in_any_way(evaluation: bool) -> None:
    greedy = record()
    for span in greedy["spans"]:
        span["sampling"]["temperature"] = 0.0
    greedy["digest"] = read_sample(greedy).header_digest()
    for line in ({**greedy, "evaluation": evaluation}, {"samples": [greedy], "evaluation": evaluation}):
        totals = verify_records([line])
        assert totals.ok is evaluation and (totals.delivered == totals.sampled) is evaluation, totals.problems
        assert evaluation or "temperature 0 does not sample" in totals.problems[0].reason


def test_what_is_no_file_of_samples_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = write(tmp_path / "env.py", "import re\n")
    assert main(["verify", str(program)]) == 1
    printed = capsys.readouterr().out
    assert f"{program}, line 1: not JSON" in printed and "duplicated" not in printed
    for path, said in ((tmp_path / "none.jsonl", "no file or folder"), (tmp_path, "neither groups.jsonl nor")):
        assert main(["verify", str(path)]) == 2 and said in capsys.readouterr().err


def test_nothing_to_verify_is_told_from_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The groups of a Phase 1 run have rollouts and tokens, and no samples."""
    phase_1 = write(tmp_path / "groups.jsonl", *(group(samples=[], number=at) for at in range(3)))
    good, bad = write(tmp_path / "good.jsonl", record()), write(tmp_path / "bad.jsonl", record(), record())
    assert main(["verify", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert (
        "nothing to verify" in printed and "--openai.server_type vllm or sglang" in printed and "WRONG" not in printed
    )
    assert main(["verify", "--problems", "0", str(phase_1), str(good)]) == 2
    assert main(["verify", str(phase_1), str(bad)]) == 1
    capsys.readouterr()
    assert main(["verify", "--json", str(phase_1)]) == 2
    [said] = json.loads(capsys.readouterr().out)["files"]
    assert said["empty"] and not said["ok"]
    lost = write(tmp_path / "lost.jsonl", {**group(), "samples": [], "line_digest": "0" * 32})
    assert main(["verify", str(lost)]) == 1, "that all samples of a run with tokens are gone is wrong, not nothing"
    torn = write(tmp_path / "torn.jsonl", '{"samples": [')
    assert main(["verify", str(torn)]) == 1, "a file whose lines cannot be read is wrong, not empty"


def test_the_folder_of_an_evaluation_stands_for_its_samples(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", record())
    assert main(["verify", str(tmp_path)]) == 0
    write(tmp_path / "groups.jsonl")
    assert main(["verify", str(tmp_path)]) == 2, "process writes groups.jsonl"


def test_the_command_prints_hostile_records_safely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "odd.jsonl", {**record(), "rollout_id": "[red]\x1b[2J\ud800", "count": 0})
    assert main(["verify", str(path)]) == 1
    printed = capsys.readouterr().out
    assert r"rollout [red]\x1b[2J\ud800: index 0 is none of 0 samples" in printed
