"""Files of samples that somebody changed: with the digests left as they were, and computed again."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lachesis import reward
from lachesis.cli import main
from lachesis.loop.result import TokenCount
from lachesis_messages.records.digests import LINE_DIGEST, certified, copies_of
from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.tokens import MASKED
from lachesis_testing.fake_server import Ask, FakeServer, Reply
from lachesis_testing.fake_server.policies import as_reply
from lachesis_tokens.samples.verification import Totals, verify_records
from lachesis_tools import BUILTIN_TOOLS, ToolFailure, tool
from tests.support.certificates import aged, resealed
from tests.support.small_envs import ManyWords
from tests.support.token_trees import UNTIMED
from tests.support.training_runs import environment, with_tokens

Record = dict[str, Any]
Lines = list[Record]


@tool(toolset="shelf")
async def look(at: str) -> str:
    """Look at a shelf."""
    if at == "nowhere":
        raise ToolFailure("there is no such shelf")
    return f"A book about {at}."


class Shelves(ManyWords):
    """Two rollouts look at a shelf. One then looks where nothing is; the other breaks a call, and answers."""

    name = "shelves"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ("shelf",)
    compute_reward = None  # type: ignore[assignment]

    @reward
    def honest(self, item: Any, result: Any, ctx: Any) -> float:
        return float(result.messages[-1]["content"] == "Nothing is there.")

    @reward(weight=0.25)
    def short(self, item: Any, result: Any, ctx: Any) -> float:
        return 1 / len(result.messages)


class OwnLoop(Shelves):
    """Its `play_rollout` counts no tokens."""

    name = "own-loop"

    async def play_rollout(self, *args: Any, **kwargs: Any) -> Any:
        rollout = await super().play_rollout(*args, **kwargs)
        assert rollout.result is not None
        rollout.result.tokens, rollout.result.turns_used, rollout.result.api_calls = TokenCount(), 0, 0
        return rollout


class Librarian:
    """Its policy. The weights change while the first group is played."""

    def __init__(self) -> None:
        broken = 'Now for a broken one.\n<tool_call>{"name": "look", "arg'
        self.second = itertools.cycle((_call("nowhere"), broken, "I do not know."))
        self.server: FakeServer | None = None

    def reply(self, ask: Ask) -> Reply:
        if ask.turn == 0:
            return as_reply(ask, f"Let me look first.\n{_call('the window')}")
        assert self.server is not None
        if self.server.host.weight_version == "v1":
            self.server.update_weights("v2", 1)
        return as_reply(ask, next(self.second) if ask.turn == 1 else "Nothing is there.")


def _call(at: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'at': at}})}\n</tool_call>"


def played(env_cls: type[ManyWords], folder: Path) -> Lines:
    """Three groups of two rollouts, as `process` writes them."""

    async def play() -> None:
        policy = Librarian()
        async with FakeServer(policy, weight_version="v1") as model:
            policy.server = model
            settings = {"max_token_length": 200, "total_steps": 3, "max_num_workers": 1, "sandbox": "none"}
            await environment(env_cls, folder, with_tokens(model, folder), **settings).process_manager()

    asyncio.run(play())
    return list(read_lines(folder / "groups.jsonl"))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return played(Shelves, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def of_own_loop(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return played(OwnLoop, tmp_path_factory.mktemp("own"))


# The table: each takes the lines of a file and changes them in place, or gives others.


def _first(lines: Lines) -> Record:
    """A sample of the first group with several spans."""
    return lines[0]["samples"][0]  # type: ignore[no-any-return]


def _span(lines: Lines) -> Record:
    return _first(lines)["spans"][1]  # type: ignore[no-any-return]


def _discarded(lines: Lines) -> Record:
    return next(sample for sample in lines[0]["samples"] if sample["discarded"])


def _rollout(lines: Lines, place: int = 0) -> Record:
    return next(rollout for rollout in lines[0]["rollouts"] if rollout["place"] == place)


def mask_shifted(lines: Lines) -> None:
    sample = _first(lines)
    sample["masks"] = [MASKED, *sample["masks"][:-1]]


def first_token_unmasked(lines: Lines) -> None:
    _first(lines)["masks"][0] = _first(lines)["tokens"][0]


def a_sample_twice(lines: Lines) -> None:
    lines[0]["samples"].append(copy.deepcopy(_first(lines)))


def a_group_again_under_the_next_number(lines: Lines) -> None:
    lines.append({**copy.deepcopy(lines[0]), "number": len(lines)})


def logprobs_of_neighbours_exchanged(lines: Lines) -> None:
    logprobs, at = _first(lines)["logprobs"], _span(lines)["start"]
    logprobs[at : at + 2] = logprobs[at : at + 2][::-1]


def a_logprob_off_by_a_billionth(lines: Lines) -> None:
    _first(lines)["logprobs"][_span(lines)["start"]] -= 1e-9


def last_token_dropped(lines: Lines) -> None:
    for name in ("tokens", "masks", "logprobs"):
        del _first(lines)[name][-1]


def last_token_dropped_and_counted(lines: Lines) -> None:
    last_token_dropped(lines)
    sample, last = _first(lines), _first(lines)["spans"][-1]
    last["end"] -= 1
    last["versions"][-1][2] -= 1
    sample["sampled"] -= 1
    _rollout(lines)["completion_tokens"] -= 1


def versions_short_by_a_token(lines: Lines) -> None:
    _span(lines)["versions"][-1][2] -= 1


def prompt_token_changed(lines: Lines) -> None:
    _first(lines)["tokens"][3] += 1


def prompt_token_inserted(lines: Lines) -> None:
    sample = _first(lines)
    for name, value in (("tokens", 7), ("masks", MASKED), ("logprobs", 1.0)):
        sample[name].insert(0, value)
    for span in sample["spans"]:
        span["start"] += 1
        span["end"] += 1


def ids_of_another_tokenizer(lines: Lines) -> None:
    sample = _first(lines)
    sample["tokens"] = [token + 5 for token in sample["tokens"]]
    sample["masks"] = [mask if mask == MASKED else mask + 5 for mask in sample["masks"]]


def one_sample_of_a_rollout_removed(lines: Lines) -> None:
    lines[0]["samples"].remove(_discarded(lines))


def all_samples_of_a_rollout_removed(lines: Lines) -> None:
    gone = _first(lines)["rollout_id"]
    lines[0]["samples"] = [sample for sample in lines[0]["samples"] if sample["rollout_id"] != gone]


def all_samples_of_a_group_removed(lines: Lines) -> None:
    lines[0]["samples"] = []


def a_group_in_the_middle_removed(lines: Lines) -> None:
    del lines[1]


def temperature(lines: Lines) -> None:
    _span(lines)["sampling"]["temperature"] = 0.7


def top_p(lines: Lines) -> None:
    _span(lines)["sampling"]["top_p"] = 0.9


def weight(lines: Lines) -> None:
    _first(lines)["weight"] = 0.5


def rollout_ids_exchanged(lines: Lines) -> None:
    one, other = (rollout["rollout_id"] for rollout in lines[0]["rollouts"])
    for sample in lines[0]["samples"]:
        sample["rollout_id"] = other if sample["rollout_id"] == one else one


def a_score_missing(lines: Lines) -> None:
    lines[0]["scores"].pop()


def scores_exchanged(lines: Lines) -> None:
    lines[0]["scores"].reverse()


def all_scores_inverted(lines: Lines) -> None:
    for group in lines:
        group["scores"] = [1 - score for score in group["scores"]]


def rewards_exchanged(lines: Lines) -> None:
    one, other = lines[0]["rollouts"]
    one["reward"], other["reward"] = other["reward"], one["reward"]


def scores_and_rewards_exchanged(lines: Lines) -> None:
    scores_exchanged(lines)
    rewards_exchanged(lines)


def all_scores_and_rewards_inverted(lines: Lines) -> None:
    all_scores_inverted(lines)
    for rollout in (rollout for group in lines for rollout in group["rollouts"]):
        rollout["reward"] = 1 - rollout["reward"]


def places_exchanged(lines: Lines) -> None:
    one, other = lines[0]["rollouts"]
    one["place"], other["place"] = other["place"], one["place"]


def places_and_scores_exchanged(lines: Lines) -> None:
    places_exchanged(lines)
    scores_exchanged(lines)


def another_version(lines: Lines) -> None:
    _span(lines)["versions"][0][0] = "v0"


def another_version_of_its_rollout(lines: Lines) -> None:
    _span(lines)["versions"][0][0] = _span(lines)["model_version"] = "v2"


def another_version_everywhere(lines: Lines) -> None:
    for span in (span for group in lines for sample in group["samples"] for span in sample["spans"]):
        span["versions"][0][0] = span["model_version"] = "v9"


def no_versions(lines: Lines) -> None:
    _span(lines)["versions"] = []


def another_model(lines: Lines) -> None:
    _span(lines)["model"] = "another"


def another_model_of_the_group(lines: Lines) -> None:
    lines[1]["model"] = "another"


def another_model_version(lines: Lines) -> None:
    _span(lines)["model_version"] = "v0"


def no_model_version(lines: Lines) -> None:
    _span(lines)["model_version"] = None


def another_finish_reason(lines: Lines) -> None:
    _span(lines)["finish_reason"] = "length"


def an_end_that_was_no_cut(lines: Lines) -> None:
    _first(lines)["spans"][-1]["finish_reason"] = "length"


def discarded_set(lines: Lines) -> None:
    _first(lines)["discarded"] = True


def discarded_removed(lines: Lines) -> None:
    _discarded(lines)["discarded"] = False


def what_the_model_said_changed(lines: Lines) -> None:
    lines[0]["messages"][0][1]["content"] = "I have looked."


def what_the_model_called_changed(lines: Lines) -> None:
    lines[0]["messages"][0][1]["tool_calls"][0]["function"]["arguments"] = '{"at": "the door"}'


def the_question_changed(lines: Lines) -> None:
    lines[0]["messages"][0][0]["content"] = "Say something."


def a_tool_result_changed(lines: Lines) -> None:
    lines[0]["messages"][0][2]["content"] = "A book about doors."


def a_discarded_text_changed(lines: Lines) -> None:
    of_attempt = next(rollout for rollout in lines[0]["rollouts"] if rollout["discarded"])
    of_attempt["discarded"][0]["messages"][0]["content"] = "Nothing."


def conversations_exchanged(lines: Lines) -> None:
    lines[0]["messages"].reverse()


def a_message_removed(lines: Lines) -> None:
    del lines[0]["messages"][0][1]


def message_turns_forgotten(lines: Lines) -> None:
    what_the_model_said_changed(lines)
    for rollout in lines[0]["rollouts"]:
        rollout["message_turns"] = [None] * len(rollout["message_turns"])


def another_outcome(lines: Lines) -> None:
    _rollout(lines)["outcome"] = "max_turns"


def another_outcome_of_a_sample(lines: Lines) -> None:
    _first(lines)["outcome"] = "max_turns"


def interrupts(lines: Lines) -> None:
    _span(lines)["interrupts"] = 1


def completions_of_the_record_removed(lines: Lines) -> None:
    del _rollout(lines)["completions"]
    another_finish_reason(lines)


def a_rollout_removed_and_the_records_of_its_group(lines: Lines) -> None:
    del lines[1]["rollouts"], lines[1]["scores"][0], lines[1]["messages"][0]
    gone = lines[1]["samples"][0]["rollout_id"]
    lines[1]["samples"] = [sample for sample in lines[1]["samples"] if sample["rollout_id"] != gone]


def the_records_of_the_first_group_removed(lines: Lines) -> None:
    del lines[0]["rollouts"]


def a_line_without_its_digest(lines: Lines) -> None:
    scores_exchanged(lines)
    del lines[0][LINE_DIGEST]


def a_line_without_any_digest(lines: Lines) -> None:
    lines[1] = aged(lines[1])


def a_sample_without_its_digest(lines: Lines) -> None:
    del _first(lines)["digest"]


FORGERIES: list[Callable[[Lines], None]] = [
    mask_shifted,
    first_token_unmasked,
    a_sample_twice,
    a_group_again_under_the_next_number,
    logprobs_of_neighbours_exchanged,
    a_logprob_off_by_a_billionth,
    last_token_dropped,
    last_token_dropped_and_counted,
    versions_short_by_a_token,
    prompt_token_changed,
    prompt_token_inserted,
    ids_of_another_tokenizer,
    one_sample_of_a_rollout_removed,
    all_samples_of_a_rollout_removed,
    all_samples_of_a_group_removed,
    a_group_in_the_middle_removed,
    temperature,
    top_p,
    weight,
    rollout_ids_exchanged,
    a_score_missing,
    scores_exchanged,
    all_scores_inverted,
    rewards_exchanged,
    scores_and_rewards_exchanged,
    all_scores_and_rewards_inverted,
    places_exchanged,
    places_and_scores_exchanged,
    another_version,
    another_version_of_its_rollout,
    another_version_everywhere,
    no_versions,
    another_model,
    another_model_of_the_group,
    another_model_version,
    no_model_version,
    another_finish_reason,
    an_end_that_was_no_cut,
    discarded_set,
    discarded_removed,
    what_the_model_said_changed,
    what_the_model_called_changed,
    the_question_changed,
    a_tool_result_changed,
    a_discarded_text_changed,
    conversations_exchanged,
    a_message_removed,
    message_turns_forgotten,
    another_outcome,
    another_outcome_of_a_sample,
    interrupts,
    completions_of_the_record_removed,
    a_rollout_removed_and_the_records_of_its_group,
    the_records_of_the_first_group_removed,
    a_line_without_its_digest,
    a_line_without_any_digest,
    a_sample_without_its_digest,
]
SAMPLE_COUNTS = (one_sample_of_a_rollout_removed, all_samples_of_a_rollout_removed, all_samples_of_a_group_removed)


def forged(lines: Lines, forgery: Callable[[Lines], None], *, again: bool) -> Totals:
    """What is found in the lines after the forgery, with digests that were computed `again` or left as they were."""
    changed = copy.deepcopy(lines)
    forgery(changed)
    assert json.dumps(changed) != json.dumps(lines)
    return verify_records([resealed(line) for line in changed] if again else changed)


def test_the_files_themselves_verify(groups: Lines, of_own_loop: Lines) -> None:
    for lines in (groups, of_own_loop):
        totals = verify_records(lines)
        assert totals.ok, totals.problems
        assert (totals.rollouts, totals.samples, totals.without_digest) == (6, 9, 0)
        assert [resealed(line) for line in lines] == lines


@pytest.mark.parametrize("again", [False, True], ids=["old digest", "new digest"])
@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_a_forgery_is_noticed(groups: Lines, forgery: Callable[[Lines], None], again: bool) -> None:
    assert not forged(groups, forgery, again=again).ok


@pytest.mark.parametrize("again", [False, True], ids=["old digest", "new digest"])
@pytest.mark.parametrize("forgery", SAMPLE_COUNTS, ids=lambda forgery: forgery.__name__)
def test_samples_are_missed_where_a_loop_counted_no_tokens(
    of_own_loop: Lines, forgery: Callable[[Lines], None], again: bool
) -> None:
    assert not forged(of_own_loop, forgery, again=again).ok


def test_samples_of_a_scored_rollout_are_missed_in_an_older_file_too(of_own_loop: Lines) -> None:
    old = [aged(line) for line in of_own_loop]
    assert verify_records(old).ok
    totals = forged(old, all_samples_of_a_rollout_removed, again=False)
    assert [problem.reason for problem in totals.problems] == ["it has a score and completions, but no sample"]


def test_what_a_file_cannot_know_is_what_the_documentation_says(groups: Lines) -> None:
    assert verify_records(groups[:-1]).ok  # the last group
    renamed = json.dumps({**groups[0], "number": len(groups), "item_key": "another-1"})
    for rollout in groups[0]["rollouts"]:
        renamed = renamed.replace(rollout["rollout_id"], rollout["rollout_id"][::-1])
    copied = json.loads(renamed)
    assert not verify_records([*groups, copied]).ok
    assert verify_records([*groups, resealed(copied)]).duplicated  # its completions are those of another rollout
    for sample in copied["samples"]:
        for span in sample["spans"]:
            span["completion_id"] = span["completion_id"][::-1]
    assert verify_records([*groups, resealed(copied)]).ok  # a whole group, with new ids of all and a new item
    consistent = copy.deepcopy(groups)
    for name in ("reward/honest", "reward/short"):
        one, other = (rollout["metrics"] for rollout in consistent[0]["rollouts"])
        one[name], other[name] = other[name], one[name]
    scores_and_rewards_exchanged(consistent)
    assert not verify_records(consistent).ok
    assert verify_records([resealed(line) for line in consistent]).ok  # a score, its reward and all components


# Every value.


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values that are no objects or lists, and of those that are empty."""
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def others(value: Any) -> st.SearchStrategy[Any]:
    """Values near this one, and of other types."""
    near: list[Any] = [None, "", 0, "x", [], {}, True, False, 1.5]
    match value:
        case bool():
            near.append(not value)
        case int() | float():
            near += [value + 1, -value, value - 1e-9, value * 2]
        case str():
            near += [value + " ", value[1:], value.upper(), value[::-1]]
    return st.sampled_from([each for each in near if (type(each), each) != (type(value), value)])


@UNTIMED
@given(data=st.data())
def test_a_change_of_any_value_is_noticed(groups: Lines, data: st.DataObject) -> None:
    places = [place for place in leaves(groups[0]) if "logprobs" not in place or groups[0]["samples"]]
    # Most values are tokens: half of the examples are others.
    headers = [place for place in places if not {"tokens", "masks", "logprobs"}.intersection(map(str, place))]
    *path, last = data.draw(st.sampled_from(data.draw(st.sampled_from([places, headers]))))
    line = copy.deepcopy(groups[0])
    holder: Any = line
    for key in path:
        holder = holder[key]
    before = holder[last]
    holder[last] = data.draw(others(before))
    assume(holder[last] != before or type(holder[last]) is not type(before))
    assume(not (isinstance(before, float) and holder[last] == before))  # 1.0 and 1, in a list of logprobs
    assert not verify_records([line, *groups[1:]]).ok


@UNTIMED
@given(data=st.data())
def test_a_value_that_is_removed_or_added_is_noticed(groups: Lines, data: st.DataObject) -> None:
    places = [place for place in leaves(groups[0]) if isinstance(place[-1], str)]
    line = copy.deepcopy(groups[0])
    holder: Any = line
    *path, last = data.draw(st.sampled_from(places))
    for key in path:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[data.draw(st.text("abc", min_size=1, max_size=3))] = data.draw(st.sampled_from([None, 0, "x", []]))
    assume(json.dumps(line) != json.dumps(groups[0]))
    assert not verify_records([line, *groups[1:]]).ok


# Copies


def test_an_export_of_samples_has_its_own_digests(groups: Lines, tmp_path: Path) -> None:
    path, out = tmp_path / "groups.jsonl", tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in groups))
    assert main(["export", str(path), "--format", "samples", "--out", str(out)]) == 0
    lines = list(read_lines(out))
    assert verify_records(lines).ok
    assert verify_records(lines).without_digest == 0
    for name, value in (("reward", 9.0), ("item_key", "another"), ("evaluation", True), ("environment", "another")):
        assert not verify_records([{**lines[0], name: value}, *lines[1:]]).ok
    unsealed = {name: value for name, value in lines[0].items() if name != LINE_DIGEST}
    assert not verify_records([{**unsealed, "reward": 9.0}, *lines[1:]]).ok
    assert not verify_records([resealed({**lines[0], "environment": "another"}), *lines[1:]]).ok


def test_a_copy_of_a_damaged_line_stays_damaged_and_one_of_an_old_line_old(groups: Lines) -> None:
    moved = {**groups[0], "run": "another"}
    assert copies_of(groups[0])(moved) == certified(moved)
    damaged = {**groups[0], "scores": [9.0, 9.0]}
    assert copies_of(groups[1], damaged)(moved)[LINE_DIGEST] == groups[0][LINE_DIGEST] != certified(moved)[LINE_DIGEST]
    assert LINE_DIGEST not in copies_of(groups[1], aged(groups[0]))(moved)


def test_an_older_file_verifies_and_is_said_to_be_without_digests(
    groups: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that an older version began goes on with digests."""
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (*map(aged, groups[:2]), groups[2])))
    assert main(["verify", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"old   {path}")
    assert "2 lines without a digest" in printed
    assert main(["verify", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["without_digest"] == 2


def test_a_digest_is_that_of_the_values_whatever_wrote_them(groups: Lines, tmp_path: Path) -> None:
    """Integers over 64 bits, halves of surrogate pairs, keys in another order, other spaces."""
    odd = {"large": 10**30, "small": -(2**70), "half": "\ud83d", "deep": [[]], "float": 1e22, "zero": -0.0}
    for item in (odd, {name: value for name, value in odd.items() if name != "half"}):
        line = certified({**groups[0], "item": item})
        path = tmp_path / "groups.jsonl"
        for text in (json.dumps(line), json.dumps(dict(reversed(line.items())), indent=None, separators=(",", ":"))):
            path.write_text(text + "\n")
            assert main(["verify", str(path)]) == 0
            (read,) = read_lines(path)
            assert verify_records([read]).ok


def test_a_number_that_json_does_not_have_is_no_null(groups: Lines, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({**groups[0], "tokens": math.nan}) + "\n")
    assert main(["verify", str(path)]) == 1
