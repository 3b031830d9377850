"""What the pages of a rollout and of a group are made of: exact, and nothing of it lost."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.loop.outcome import Outcome, in_words
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.group_records import group_record
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.replay import SamplingMask
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_testing.export_suite import example_groups
from lachesis_view.app import Viewer
from lachesis_view.filters import Filter
from lachesis_view.group_page import group_context
from lachesis_view.html import Templates
from lachesis_view.html.rollout import rollout_view, title_of
from lachesis_view.index import Index
from lachesis_view.rollout_page import rollout_context, sample_tokens
from lachesis_view.single_page import SHARED, rollout_page
from lachesis_view.token_text import NoVocabulary, TokenTexts, read_vocabulary, vocabulary_of
from tests.support.gguf_writer import write_gguf
from tests.support.hostile_groups import hostile_group
from tests.support.viewed_runs import HOSTILE, played_shelves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelves")


@pytest.fixture(scope="module")
def group(folder: Path) -> dict[str, Any]:
    return asyncio.run(played_shelves(folder))


@pytest.fixture(scope="module")
def vocabulary(folder: Path, group: dict[str, Any]) -> TokenTexts:
    """That of the run, found by its settings alone."""
    found = vocabulary_of(json.loads((folder / "groups.run.json").read_text())["settings"])
    assert found is not None
    return found


def honest(group: dict[str, Any]) -> int:
    """The number of the rollout that looked twice."""
    return [rollout["reward"] for rollout in group["rollouts"]].index(1.0)


def test_a_page_says_which_call_failed_and_what_the_reward_is_made_of(group: dict[str, Any]) -> None:
    n = honest(group)
    page = rollout_context(group, n)
    shown = page["shown"]
    (failed,) = shown["failed"]
    assert (failed["name"], json.loads(failed["arguments"]), failed["anchor"]) == ("look", {"at": "nowhere"}, "turn-1")
    messages = shown["branches"][0]["messages"]
    assert [message["turn"] for message in messages if message["role"] == "assistant"] == [0, 1, 2]
    calls = [message["of"] for message in messages if message["role"] == "tool"]
    assert [call["failed"] for call in calls] == [False, True]
    assert all(call["took"].endswith(" s") for call in calls)
    assert [(row["name"], row["value"], row["weight"]) for row in shown["rewards"]] == [
        ("honest", 1.0, None),
        ("short", 0.5, None),
    ]
    assert failed["reason"] == "there is no such shelf <i>here</i>", "as the tool said it"
    assert (page["advantage"], page["baseline"]) == (0.5, 0.5)
    assert rollout_context(group, 1 - n)["advantage"] == -0.5


def test_a_discarded_attempt_hangs_where_it_was_sampled_with_its_reason(group: dict[str, Any]) -> None:
    page = rollout_context(group, 1 - honest(group))["shown"]
    _, attempt = page["branches"]
    assert (attempt["kind"], [message["turn"] for message in attempt["messages"]]) == ("attempt", [1])
    assert "text that starts a tool call" in attempt["reason"]
    rows = [(row["kind"], row.get("turn")) for row in page["log"]]
    assert rows[-3:] == [("attempt", None), ("attempt", 1), ("conversation", 2)], "in the order of sampling"


def test_every_sampled_token_is_shown_with_its_logprob_and_trained_in_one_sample(
    group: dict[str, Any], vocabulary: TokenTexts
) -> None:
    for n, rollout in enumerate(group["rollouts"]):
        records = [sample for sample in group["samples"] if sample["rollout_id"] == rollout["rollout_id"]]
        trained = 0
        for number, record in enumerate(records):
            shown = sample_tokens(group, n, number, vocabulary)
            assert shown["ids"] == record["tokens"] and not shown["doubtful"]
            assert [each["start"] for each in shown["segments"][1:]] == [each["end"] for each in shown["segments"][:-1]]
            assert (shown["segments"][0]["start"], shown["segments"][-1]["end"]) == (0, len(record["tokens"]))
            for place, mask in enumerate(record["masks"]):
                if mask != -100:
                    assert shown["logprobs"][place] == pytest.approx(record["logprobs"][place], abs=1e-4)
            sampled = [each for each in shown["segments"] if each["kind"] == "sampled"]
            trained += sum(each["end"] - each["start"] for each in sampled if each["trained_in"] == number)
            for each in sampled:
                place = rollout["message_turns"].index(each["turn"]) if number == 0 else None
                if place is not None:
                    said = group["messages"][rollout["place"]][place]["content"]
                    assert said in vocabulary.decode(shown["ids"][each["start"] : each["end"]])
        assert trained == rollout["completion_tokens"]


def test_completions_that_are_not_in_the_tokens_are_no_page(group: dict[str, Any]) -> None:
    (first, *others) = group["samples"]
    n = [rollout["rollout_id"] for rollout in group["rollouts"]].index(first["rollout_id"])
    (span, *spans) = first["spans"]
    beyond = {"spans": [span, {**spans[0], "end": 10**6}]}
    across = {"spans": [{**span, "end": spans[0]["end"] - 1}, *spans]}
    for wrong in (beyond, across, {"logprobs": first["logprobs"][: spans[-1]["end"] - 1]}):
        with pytest.raises(ValueError, match="not in the order of the tokens"):
            sample_tokens({**group, "samples": [{**first, **wrong}, *others]}, n, 0, None)


def test_a_token_that_another_sample_trains_says_so(group: dict[str, Any], vocabulary: TokenTexts) -> None:
    n = 1 - honest(group)
    shown = sample_tokens(group, n, 1, vocabulary)
    sampled = [(each["turn"], each["trained_in"]) for each in shown["segments"] if each["kind"] == "sampled"]
    assert sampled == [(0, 0), (1, 1)] and shown["discarded"]
    first = shown["segments"][1]
    assert shown["logprobs"][first["start"]] is not None, "known from the sample that trains it"


def test_tokens_that_split_a_character_are_bytes_and_their_run_is_the_text(
    group: dict[str, Any], vocabulary: TokenTexts
) -> None:
    shown = sample_tokens(group, 1 - honest(group), 0, vocabulary)
    runs = [text for _, _, text in shown["runs"]]
    assert any("🙂" in text for text in runs)
    for start, count, text in shown["runs"]:
        joined = b"".join(bytes.fromhex(shown["bytes"][place]) for place in range(start, start + count))
        assert joined == text.encode()
    without = sample_tokens(group, 0, 0, None)
    assert (without["texts"], without["bytes"], without["runs"]) == (None, {}, [])


def test_a_sampling_mask_says_from_how_many_ids_each_token_was_sampled(group: dict[str, Any]) -> None:
    (first, *others) = group["samples"]
    kept = [[] if mask == -100 else [mask, mask + 1] for mask in first["masks"]]
    n = [rollout["rollout_id"] for rollout in group["rollouts"]].index(first["rollout_id"])
    masked = {**first, "sampling_mask": SamplingMask.of(kept).to_record()}
    assert sample_tokens({**group, "samples": [masked, *others]}, n, 0, None)["choices"] == [len(ids) for ids in kept]
    assert sample_tokens(group, n, 0, None)["choices"] is None


def test_a_vocabulary_of_another_model_is_noticed(group: dict[str, Any], vocabulary: TokenTexts) -> None:
    other = TokenTexts("other", vocabulary.pieces[::-1], frozenset())
    assert sample_tokens(group, 0, 0, other)["doubtful"]


def test_siblings_part_at_the_token_where_they_part(group: dict[str, Any], vocabulary: TokenTexts) -> None:
    page = group_context(group, vocabulary)
    assert [column["is"] for column in page["columns"]] in (["best", "worst"], ["worst", "best"])
    assert page["pair"] == [honest(group), 1 - honest(group)]
    twice = {**group, "rollouts": [*group["rollouts"], {**group["rollouts"][1 - honest(group)], "rollout_id": "again"}]}
    tags = [column["is"] for column in group_context(twice)["columns"]]
    assert sorted(tags) == ["", "", "best"], "none of two that are equally bad is the worst"
    assert (page["parted"], [row["differ"] for row in page["rows"]]) == (1, [False, True, True])
    assert page["same_prompt"] and page["rows"][2]["cells"].count(None) == 1
    tokens = page["tokens"]
    sequences = {n: sample_tokens(group, n, 0, None)["ids"] for n in (0, 1)}
    first = tokens["first"]
    assert sequences[0][:first] == sequences[1][:first] and sequences[0][first] != sequences[1][first]
    (fork,) = tokens["forks"]
    assert [(side["members"], side["id"]) for side in fork["sides"]] == [([n], sequences[n][first]) for n in (0, 1)]
    alone = group_context(group, vocabulary, only={honest(group)})
    assert len(alone["columns"]) == 1 and alone["tokens"] is None
    call, result = alone["rows"][1]["cells"][0]["messages"]
    assert call["calls"][0]["failed"] and result["of"]["failed"], "a failed call is one here, too"


@pytest.mark.parametrize(
    ("item", "asked", "title"),
    [
        ({"words": ["fig", "pear"]}, "Sort the lines.", "Sort the lines.\nwords: fig, pear"),
        ({"words": ["fig", "pear"], "id": 7}, "Sort fig, then pear.", "Sort fig, then pear.\nid: 7"),
        ("fig pear", [{"type": "text", "text": "Sort\n  fig pear"}], "Sort fig pear"),
        ({"text": "x" * 200, "flag": True, "huge": 10**5000, "deep": [[1]], "none": None}, "Sort.", "Sort."),
        (None, None, ""),
        ({"id": "task-1"}, "y" * 200, "y" * 98 + "…\nid: task-1"),
        (
            {"question": "Go?", "answer": "17:15"},
            "When do you leave?",
            "When do you leave?\nquestion: Go? · answer: 17:15",
        ),
        (7, "Add.", "Add.\n7"),
        ({"id": 7}, "", "id: 7"),
    ],
)
def test_a_title_tells_items_apart_of_which_the_same_is_asked(item: Any, asked: Any, title: str) -> None:
    messages = [{"role": "system", "content": "You sort."}, {"role": "user", "content": asked}]
    assert title_of(item, messages) == title and len(title) <= 110


def test_what_an_exception_says_is_shown_once(group: dict[str, Any]) -> None:
    trace = (
        "Traceback (most recent call last):\n  File \"env.py\", line 3, in f\n    raise KeyError(name)\nKeyError: 'x'\n"
    )
    said = "KeyError: 'x'"
    rollout = group["rollouts"][0] | {"traceback": f"{said}\n{trace}{said}\n{trace}", "reason": said}
    shown = rollout_view(group, rollout)
    assert (shown["traceback"], shown["reason"]) == (2 * trace, "")
    kept = {"traceback": f"{said}; is it the wrong item?\n{trace}", "reason": "it failed"}
    shown = rollout_view(group, rollout | kept)
    assert (shown["traceback"], shown["reason"]) == tuple(kept.values())
    page = rollout_page(group | {"rollouts": [rollout]}, 0)
    assert page.count("KeyError: &#39;x&#39;") == 2, "of two exceptions"


def test_a_group_shows_the_components_of_every_sibling_in_the_same_order(group: dict[str, Any], tmp_path: Path) -> None:
    rewards = [rollout["reward"] for rollout in group["rollouts"]]
    assert group_context(group)["metrics"] == [("reward/honest", rewards), ("reward/short", [0.5, 0.5])]
    metrics: list[Any] = [{**dict.fromkeys(range(20), 5000002.0), HOSTILE: float("nan")}, {HOSTILE: 10**400}]
    rollouts = [{**rollout, "metrics": metrics[n]} for n, rollout in enumerate(group["rollouts"])]
    line = json.dumps({**group, "rollouts": rollouts})
    context = group_context(json.loads(line))
    assert len(context["metrics"]) == 12 and context["metrics"][0][0] == f"metric/{HOSTILE}"
    index = Index(tmp_path, tmp_path / "index.sqlite")
    more = {"left": 0, "unread": 0, "failure": "", "frame": {"run": "r", "number": 0, "filter": Filter()}}
    html = Viewer(index).templates.page("group.html.jinja", **context, **more)
    index.close()
    shown = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)
    assert [value for _, value in shown[:2]] == ["nan", "5,000,002"] and shown[12][1] == "1.000e+400"
    assert shown[13] == ("0", "–") and "<img" not in html


def completion(prompt: TokenPrefix, text: str, *calls: ToolCall) -> ChatResponse:
    tokens = SampledTokens.sample(prompt.extend([1]), [7, 8], [-0.5, -0.25])
    return ChatResponse(Message("assistant", text, calls), FinishReason.STOP, tokens=tokens)


def test_edits_and_sub_agents_are_branches_of_their_own_and_are_searched(tmp_path: Path) -> None:
    history = MessageHistory([{"role": "user", "content": "Plan a day."}])
    prompt = TokenPrefix([1])
    history.branch(completion(prompt, "Cut off"), "the token limit")
    asks = completion(prompt, "", ToolCall("c1", "guide", "{}"))
    history.append(asks)
    guide = MessageHistory([{"role": "user", "content": "What is there?"}])
    guide.append(completion(TokenPrefix([2]), "A tower."))
    history.append(
        ToolResponse(Message("tool", "A tower.", tool_call_id="c1", name="guide"), "guide", duration=1.5, chat=guide)
    )
    assert asks.tokens is not None
    history.append(completion(asks.tokens.after, "Go there."))
    history[1:3] = [{"role": "user", "content": "In short: a tower."}]
    result = AgentResult(2, True, [], [], Outcome.COMPLETED, "", history)
    rollout = Rollout("r", "k", 0, Outcome.COMPLETED, "", 1.0, result)
    played = PlayedGroup("k", "k", tools=[], rollouts=[rollout])
    group = json.loads(json.dumps(group_record(played, environment="e", model="m")))
    page = rollout_view(group, group["rollouts"][0])
    kinds = [(branch["kind"], [message["turn"] for message in branch["messages"]]) for branch in page["branches"]]
    assert kinds == [
        ("conversation", [None, None, None]),
        ("branch", [0]),
        ("edit", [1, None, 3]),
        ("subagent", [None, 2]),
    ]
    order = [(row["kind"], row["role"] or "head") for row in page["log"]]
    assert order == [
        ("conversation", "user"),
        ("branch", "head"),
        ("branch", "assistant"),
        ("edit", "head"),
        ("edit", "assistant"),
        ("edit", "tool"),
        ("subagent", "head"),
        ("subagent", "user"),
        ("subagent", "assistant"),
        ("edit", "assistant"),
        ("conversation", "user"),
        ("conversation", "assistant"),
    ]
    assert page["branches"][2]["messages"][1]["of"]["took"] == "1.50 s"
    assert page["branches"][0]["messages"][2]["context"], "the kept answer was sampled in another context"
    assert len(page["graph"]["lines"]) == 4 and len(page["graph"]["dots"]) == len(order)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "groups.jsonl").write_text(json.dumps({**group, "run": "r", "number": 0}) + "\n")
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    try:
        index.refresh()
        for words in ("short tower", "cut off", '"plan a day" "go there"', '"what is there"'):
            assert index.rollouts(Filter(q=words)).total == 1, words
    finally:
        index.close()


def test_records_of_older_versions_are_shown_as_far_as_they_go(group: dict[str, Any]) -> None:
    old = json.loads(json.dumps(group))
    for rollout in old["rollouts"]:
        del rollout["calls"], rollout["message_turns"]
        for dropped in rollout["discarded"]:
            del dropped["after"], dropped["message_turns"]
    page = rollout_context(old, honest(old))["shown"]
    assert [call["arguments"] for call in page["failed"]] == ['{"at": "nowhere"}'], "known by what was called"
    log = rollout_context(old, 1 - honest(old))["shown"]["log"]
    assert [row["kind"] for row in log[-3:]] == ["attempt", "attempt", "conversation"]


def test_each_call_that_failed_has_its_own_reason_also_where_it_is_repeated(group: dict[str, Any]) -> None:
    said = ("no answer in 30 s", "no space left")
    asked = {"name": "look", "arguments": "{}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for name, text in zip("ab", said, strict=True):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": name, "function": asked}]})
        messages.append({"role": "tool", "tool_call_id": name, "content": text})
    errors = [{"turn": at, "tool": "look", "arguments": "{}", "error": text} for at, text in enumerate(said)]
    own = {"calls": {name: {"failed": True} for name in "ab"}, "message_turns": [None, 0, None, 1, None]}
    rollout = {**group["rollouts"][0], **own, "place": None, "messages": messages, "tool_errors": errors}
    shown = rollout_context({**group, "samples": [], "rollouts": [rollout]}, 0)["shown"]
    assert [call["reason"] for call in shown["failed"]] == list(said)


def test_every_kind_of_group_has_its_pages(tmp_path: Path) -> None:
    index = Index(tmp_path, tmp_path / "index.sqlite")
    pages = Viewer(index).templates
    frame = {"run": "a run/of <mine>", "number": 0, "n": 0, "before": None, "after": ("r", 0, 1), "filter": Filter()}
    more = {"frame": frame, "settings": {}, "left": 0, "unread": 0, "failure": ""}
    shown = 0
    for group in (*example_groups(), hostile_group()):
        html = pages.page("group.html.jinja", **group_context(group), **more)
        assert f"<p>{len(group['rollouts'])} rollout" in html and "/rollout/a%20run/of%20%3Cmine%3E/0/" in html
        for n, rollout in enumerate(group["rollouts"]):
            html = pages.page("rollout.html.jinja", **rollout_context(group, n), **more)
            assert in_words(rollout["outcome"]) in html and ('id="tokens"' in html) == any(
                sample["rollout_id"] == rollout["rollout_id"] for sample in group["samples"]
            )
            shown += 1
    assert html.count(", -l</pre>") == 1, "the arguments of the reward's call"
    assert shown > 5
    index.close()


@given(st.lists(st.text(max_size=6), max_size=8), st.randoms(use_true_random=False))
def test_texts_and_runs_together_are_the_whole_text_however_tokens_cut_it(texts: list[str], draw: Any) -> None:
    data = "".join(texts).encode("utf-8", "ignore")
    pieces, rest = [], data
    while rest:
        size = draw.randint(1, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    found, runs = TokenTexts("cut", pieces, frozenset()).texts(range(len(pieces)))
    said = {start: (count, text) for start, count, text in runs}
    place, whole = 0, ""
    while place < len(pieces):
        count, text = said.get(place, (1, found[place]))
        assert text is not None, "every part of a character is in a run"
        whole, place = whole + text, place + count
    assert whole.encode() == data


def test_a_gguf_file_and_a_sentencepiece_tokenizer_give_the_same_pieces(tmp_path: Path) -> None:
    tokens = ["<s>", "▁the", "<0xE2>", "<0x82>", "<0xAC>"]
    kinds = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 6, 6, 6],
    }
    write_gguf(tmp_path / "model.gguf", kinds, {})
    vocab = {token: at for at, token in enumerate(tokens)}
    added = [{"id": 0, "content": "<s>", "special": True}]
    state = {"model": {"vocab": vocab}, "added_tokens": added, "decoder": {"type": "ByteFallback"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    for path in (tmp_path / "model.gguf", tmp_path):
        found = read_vocabulary(path)
        assert found.decode([0, 1, 2, 3, 4, 99]) == "<s> the€\ufffd[token:99]" and found.special == {0}
        assert found.texts([1, 2, 3, 4, 99]) == ([" the", None, None, None, None], [(1, 3, "€")])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoVocabulary, match=r"tokenizer.json: no vocabulary .*; give a tokenizer.json"):
        read_vocabulary(tmp_path)
    assert vocabulary_of({"tokenizer": {"name": "no-one/has-this"}}) is None


def test_texts_of_models_stay_texts(group: dict[str, Any]) -> None:
    page = rollout_context(group, 1 - honest(group))["shown"]
    assert page["branches"][0]["messages"][-1]["text"] == HOSTILE, "escaped by the template, not here"


def test_the_calls_of_a_reward_stand_under_it_with_its_weight_in_the_sum(group: dict[str, Any]) -> None:
    def call(output: str, **more: str) -> dict[str, Any]:
        return {"method": "terminal", "arguments": ["ls"], "seconds": 0.1, "output": output, **more}

    made = [call("1ST", reward="honest"), call("2ND", reward="compute_reward"), call("3RD", reward="honest")]
    rollout = {**group["rollouts"][0], "reward_weights": {"honest": 0.75}, "reward_calls": made}
    rows = rollout_view(group, rollout)["rewards"]
    found = [(row["name"], row["weight"], [each["output"] for each in row["calls"]]) for row in rows]
    assert found == [("honest", 0.75, ["1ST", "3RD"]), ("short", None, []), ("compute_reward", None, ["2ND"])]
    html = Templates(SHARED).part("rollout_macros.html.jinja", "reward", rollout_view(group, rollout))
    assert html.index("× 0.75") < html.index("1ST") < html.index("3RD") < html.index("short") < html.index("2ND")
    old = rollout_view(group, {**rollout, "reward_calls": [call("1ST")]})["rewards"]
    assert [row["name"] for row in old] == ["honest", "short", ""], "whose calls they are is not recorded"
