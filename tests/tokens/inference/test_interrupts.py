"""Completions that a server aborts go on after the tokens that were sampled, as if nothing had interrupted them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import lachesis_client.http_attempts as http_attempts_module
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import ServerUnavailable
from lachesis_client.http_client import ARRAY
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import Ask, FakeModel, FakeServer, RandomTokens, Reply, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.interrupts import joined
from lachesis_tokens.server.token_server import TokenServer
from tests.support.exactness import assert_exact, stack

KINDS = ["vllm", "vllm-generate", "sglang", "atropos"]
TOKENIZER = fake_tokenizer()
PROMPTS = PromptBuilder(TOKENIZER)
[END] = [id for id in PROMPTS.end_of_turn if TOKENIZER.decode([id]) == "<|im_end|>"]
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attempts_module, "_FIRST_DELAY", 0.001)


@asynccontextmanager
async def opened(
    kind: str = "vllm", policy: Any = None, servers: int = 1, settings: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[TokenServer, FakeServer]]:
    """A token server over fake servers, and the first of these."""
    async with FakeServer(policy or RandomTokens(), **fake) as first, FakeServer(policy, **fake) as second:
        used = [first, second][:servers]
        engines = [create_engine(kind, each.settings(**(settings or {}))) for each in used]
        tokens = TokenServer(engines, PROMPTS, "hermes")
        yield tokens, first
        await tokens.close()


async def until(asked: Callable[[], object]) -> None:
    while not asked():  # noqa: ASYNC110 - the server only counts
        await asyncio.sleep(0.01)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def one(tokens: TokenServer, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> Generation:
    [generation] = await tokens.generate(TokenPrefix(prompt), sampling)
    return generation


def plays(*replies: Reply) -> Callable[[Ask], Reply]:
    """One reply a request; the last one repeats."""
    return lambda ask: replies[min(ask.number, len(replies) - 1)]


def cut(text: str, count: int) -> Reply:
    return Reply(ids_of(text)[:count], "abort", as_is=True)


class TestContinuation:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_every_sampled_token_stays_with_its_logprob(self, kind: str) -> None:
        async with opened(kind, faults=["aborted"]) as (tokens, fake):
            generations = await tokens.generate(TokenPrefix(PROMPT), Sampling(max_tokens=60), n=3)
            made = [each for seen in fake.requests for each in seen.completions]
            assert sum(len(each.ids) for each in made) == sum(len(each.ids) for each in generations)
            assert sum(each.interrupts for each in generations) == sum(bool(each.ids) for each in made) - 3 > 2
            for each in generations:
                assert list(each.logprobs) == pytest.approx(fake.model.score(PROMPT, each.ids, Sampling(60)))
                assert (each.ids[-1] == END) == (each.finish_reason is FinishReason.STOP)
                assert (len(each.ids) == 60) == (each.finish_reason is FinishReason.LENGTH)
                assert each.sampling["max_tokens"] == 60
                assert each.versions == (() if kind == "atropos" else (("default", 0, len(each.ids)),))

    async def test_choices_that_ended_are_kept(self) -> None:
        def policy(ask: Ask) -> Reply:
            if len(ask.prompt_ids) > len(PROMPT):
                return Reply([*ids_of(" more"), END])
            return Reply([9, END]) if ask.index == 1 else Reply([ask.index + 10], "abort", as_is=True)

        async with opened(policy=policy) as (tokens, fake):
            zero, ended, two = await tokens.generate(TokenPrefix(PROMPT), Sampling(20), n=3)
            assert (list(ended.ids), ended.interrupts, ended.attempts) == ([9, END], 0, 1)
            assert [each.ids[0] for each in (zero, two)] == [10, 12]
            assert [each.interrupts for each in (zero, two)] == [1, 1]
            assert [seen.call.n for seen in fake.requests] == [3, 1, 1]

    async def test_the_rest_is_asked_for_with_what_remains(self) -> None:
        async with opened(policy=plays(cut("one two three four", 3), Reply([9, END]))) as (tokens, fake):
            sampling = Sampling(max_tokens=10, seed=7, extra={"min_tokens": 2})
            generation = await one(tokens, sampling)
            first, second = (seen.body for seen in fake.requests)
            assert second["prompt"] == [*PROMPT, *generation.ids[:3]]
            assert (first["max_tokens"], second["max_tokens"]) == (10, 7)
            assert (first["min_tokens"], second["min_tokens"]) == (2, 0)
            assert first["seed"] == 7 != second["seed"]
            assert (generation.sampling["max_tokens"], generation.sampling["seed"]) == (10, 7)

    async def test_another_server_goes_on(self) -> None:
        said = ids_of("The water is high.")
        async with (
            FakeServer(plays(Reply(said[:2], "abort", as_is=True)), faults={"unavailable": range(1, 99)}) as first,
            FakeServer(plays(Reply([*said[2:], END]))) as second,
        ):
            engines = [
                create_engine("vllm", each.settings(weight=weight)) for each, weight in ((first, 9), (second, 1))
            ]
            tokens = TokenServer(engines, PROMPTS, "hermes")
            generation = await one(tokens, Sampling(20))
            await tokens.close()
            assert (list(generation.ids), generation.server) == ([*said, END], second.base_url)
            assert list(second.requests[0].call.prompts[0]) == [*PROMPT, *said[:2]]

    async def test_a_rewritten_prompt_of_the_rest_is_detected(self) -> None:
        from lachesis_client.errors import BadResponse

        replies = plays(cut("one two three", 2), Reply([9, END]))
        async with opened(policy=replies, faults={"wrong_echo": [1]}) as (tokens, _):
            with pytest.raises(BadResponse, match="another prompt"):
                await one(tokens, Sampling(20))

    async def test_what_is_not_gone_on_with_is_counted(self) -> None:
        """Of all choices: the error says how many of their tokens had come."""
        begun = (cut("one two three four", 3), cut("one two three four", 3), cut("five six seven", 2))
        faults = {"unavailable": range(2, 99)}
        async with opened(policy=plays(*begun), faults=faults, settings={"max_retries": 0}) as (tokens, fake):
            with pytest.raises(ServerUnavailable) as failed:
                await tokens.generate(TokenPrefix(PROMPT), Sampling(20), n=2)
            arrived = [each for seen in list(fake.requests)[:2] for each in seen.completions]
            assert failed.value.sampled == sum(len(each.ids) for each in arrived)


class TestEnds:
    """What ends a completion ends it also where the server that goes on cannot see it."""

    async def test_a_stop_text_across_the_interrupt(self) -> None:
        words = ids_of("See what I did. Observation: nothing at all")
        texts = [TOKENIZER.decode(words[: count + 1]) for count in range(len(words))]
        ends = next(place for place, text in enumerate(texts) if "Observation:" in text)
        begins = next(place for place, text in enumerate(texts) if "Obs" in text)
        assert begins < ends
        replies = plays(Reply(words[: begins + 1], "abort", as_is=True), Reply([*words[begins + 1 :], END]))
        async with stack(policy=replies) as world:
            response = await world.tokens.for_rollout().chat(
                [{"role": "user", "content": "Go."}], stop=["Observation:"], max_tokens=100
            )
            assert response.tokens.ids == words[: ends + 1]
            assert response.finish_reason is FinishReason.STOP
            assert response.message.content == "See what I did. "

    @pytest.mark.parametrize(
        ("kind", "extra", "stops"),
        [
            ("vllm", {"min_tokens": 2}, True),  # the stop text ends after the second token
            ("vllm", {"min_tokens": 3}, False),
            ("sglang", {"min_new_tokens": 3}, True),  # SGLang holds back ends of turns until then, and no stop texts
        ],
    )
    async def test_a_stop_text_among_the_least_tokens(self, kind: str, extra: dict[str, Any], stops: bool) -> None:
        words = [id for text in ("a", "b", "c", "d", "e") for id in ids_of(text)]
        replies = plays(Reply(words[:2], "abort", as_is=True), Reply([*words[2:], END]))
        async with opened(kind, replies) as (tokens, _):
            generation = await one(tokens, Sampling(20, stop=("bc",), extra=extra))
            assert list(generation.ids) == (words[:3] if stops else [*words, END])

    @pytest.mark.parametrize(
        ("ids", "sampling", "reason"),
        [
            ([9, END], Sampling(20), FinishReason.STOP),
            ([9, 8, 7], Sampling(3), FinishReason.LENGTH),
            (ids_of("a STOP"), Sampling(20, stop=("STOP",)), FinishReason.STOP),
            ([9, 8], Sampling(20, extra={"stop_token_ids": [8]}), FinishReason.STOP),
        ],
    )
    async def test_an_abort_with_the_last_token(self, ids: list[int], sampling: Sampling, reason: FinishReason) -> None:
        """SGLang lets the running step end: its token may be an end of turn, reported as aborted."""
        async with opened("sglang", plays(Reply(ids, "abort", as_is=True), Reply([1, END]))) as (tokens, fake):
            generation = await one(tokens, sampling)
            assert (list(generation.ids), generation.finish_reason) == (ids, reason)
            assert (len(fake.requests), generation.interrupts) == (1, 0)

    async def test_an_end_of_turn_that_is_ignored(self) -> None:
        async with opened(policy=plays(Reply([9, END], "abort", as_is=True), Reply([1], "length"))) as (tokens, _):
            assert list((await one(tokens, Sampling(3, extra={"ignore_eos": True}))).ids) == [9, END, 1]

    @pytest.mark.parametrize("kind", KINDS[:3])
    async def test_what_goes_on_is_aborted_in_the_queue(self, kind: str) -> None:
        """It has no token, so its unconfirmed prompt matters to none: SGLang reports none."""
        replies = plays(cut("one two three", 2), Reply([], "abort", as_is=True), Reply([9, END]))
        async with opened(kind, replies) as (tokens, _):
            generation = await one(tokens, Sampling(20))
            assert (len(generation.ids), generation.interrupts, generation.attempts) == (4, 1, 3)
            assert (generation.prompt_checked, len(generation.versions)) == ("ids", 1)

    async def test_sglang_confirms_the_prompt_by_the_completions_that_began(self) -> None:
        engine = create_engine("sglang", ServerSettings("http://127.0.0.1:9/v1", "m"))
        waited = {"finish_reason": {"type": "abort"}, "completion_tokens": 0}
        begun = {"finish_reason": {"type": "abort"}, "prompt_tokens": 3, "output_token_logprobs": [[-0.5, 9, None]]}
        answers = [{"meta_info": waited}, {"prompt_token_ids": PROMPT, "output_ids": [9], "meta_info": begun}]
        prompt = PromptIds(PROMPT)
        assert [len(each.ids) for each in engine.read({ARRAY: answers}, prompt)] == [0, 1]
        assert prompt.checked == "ids"
        await engine.close()

    async def test_a_full_context_is_the_end(self) -> None:
        async with opened(policy=plays(cut("one two three", 3)), context_length=6) as (tokens, _):
            generation = await one(tokens, Sampling(20))
            assert (len(generation.ids), generation.finish_reason) == (3, FinishReason.LENGTH)

    async def test_a_forced_call_goes_on(self) -> None:
        call = 'look", "arguments": {"at": "the tide"}}\n</tool_call>'
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        said = ids_of(call)
        replies = plays(Reply(said[:4], "abort", as_is=True), Reply([*said[4:], END]))
        async with stack(policy=replies) as world:
            managed, history = world.tokens.for_rollout(), MessageHistory([{"role": "user", "content": "Look."}])
            history.append(await managed.chat(history, tools=[tool], tool_choice="required", max_tokens=99))
            assert history[-1]["tool_calls"][0]["function"]["name"] == "look"
            (sample,) = assert_exact(world, history)
            assert (sample.spans[0].interrupts, len(sample.spans[0])) == (1, len(said) + 1)


class TestWithoutProgress:
    async def test_an_abort_before_the_first_token_is_no_failure_of_the_server(self) -> None:
        nothing = Reply([], "abort", as_is=True)
        async with opened(policy=plays(*[nothing] * 9, Reply([9, END])), settings={"max_retries": 1}) as (tokens, _):
            generation = await one(tokens, Sampling(20))
            assert (list(generation.ids), generation.interrupts, generation.attempts) == ([9, END], 0, 10)

    async def test_it_ends_after_the_deadline(self) -> None:
        nothing = plays(Reply([], "abort", as_is=True))
        async with opened(policy=nothing, settings={"retry_deadline": 0.05}) as (tokens, _):
            with pytest.raises(ServerUnavailable, match="aborted"):
                await one(tokens, Sampling(20))

    @pytest.mark.parametrize(
        "extra",
        [
            {"presence_penalty": 0.5},
            {"extra": {"structured_outputs": {"regex": "a+"}}},
            {"extra": {"stop_regex": ["two +three"]}},
            {"extra": {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}},
        ],
    )
    async def test_what_depends_on_all_sampled_tokens_begins_again(self, extra: dict[str, Any]) -> None:
        replies = plays(cut("one two three", 2), Reply([9, END]))
        async with opened(policy=replies) as (tokens, fake):
            generation = await one(tokens, Sampling(20, **extra))
            assert (list(generation.ids), generation.interrupts, generation.attempts) == ([9, END], 0, 2)
            assert [seen.body["prompt"] for seen in fake.requests] == [PROMPT, PROMPT]

    async def test_a_paused_server_is_waited_for(self) -> None:
        async with opened(settings={"max_retries": 0}) as (tokens, fake):
            await fake.pause("abort")
            waiting = asyncio.create_task(one(tokens, Sampling(20)))
            await until(lambda: fake.stats["waiting"])
            fake.abort_requests()
            fake.resume()
            assert (await waiting).ids


class TestUnbiased:
    @pytest.mark.slow
    async def test_the_lengths_are_those_without_interrupts(self) -> None:
        """400 completions of 24 tokens in the mean, aborted every 16 tokens in the mean, with fixed seeds."""

        async def lengths(**fake: Any) -> list[int]:
            async with opened(policy=RandomTokens(), mean_length=24.0, **fake) as (tokens, _):
                found = await asyncio.gather(*(one(tokens, Sampling(400), [3, number]) for number in range(400)))
                return sorted(len(each.ids) for each in found)

        undisturbed, interrupted = await lengths(), await lengths(faults=["aborted"])
        assert interrupted != undisturbed
        assert sum(interrupted) / 400 == pytest.approx(sum(undisturbed) / 400, rel=0.15)
        assert distance(undisturbed, interrupted) < 1.63 * (2 / 400) ** 0.5  # Kolmogorov-Smirnov, 1 %

    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "mode"), [("vllm", "abort"), ("vllm-generate", "keep")])
    async def test_each_token_has_the_version_and_the_logprob_of_the_policy_that_sampled_it(
        self, kind: str, mode: str
    ) -> None:
        updates = {"update_every": 0.3, "update_mode": mode, "tokens_per_second": 80.0, "mean_length": 800.0}
        async with opened(kind, **updates) as (tokens, fake):
            found = await tokens.generate(TokenPrefix(PROMPT), Sampling(80), n=4)
            assert max(len(each.versions) for each in found) > 1
            assert any(each.interrupts for each in found) == (mode == "abort")
            for each in found:
                assert each.model_version == "+".join(version for version, _, _ in each.versions)
                place = 0
                for version, start, end in each.versions:
                    assert start == place < end
                    seed = 0 if version == "default" else int(version)
                    policy = FakeModel(fake.model.vocabulary_size, seed, end_ids=fake.model.end_ids, mean_length=800.0)
                    scored = policy.score([*PROMPT, *each.ids[:start]], each.ids[start:end], Sampling(80))
                    assert list(each.logprobs[start:end]) == pytest.approx(scored)
                    place = end
                assert place == len(each.ids)


def distance(left: Sequence[int], right: Sequence[int]) -> float:
    """The largest difference between two empirical distribution functions."""
    return max(
        abs(sum(a <= at for a in left) / len(left) - sum(b <= at for b in right) / len(right)) for at in {*left, *right}
    )


class TestRollouts:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("kind", ["vllm", "sglang"])
    async def test_the_ledger_is_exact_under_faults_and_a_new_version_every_moment(self, kind: str) -> None:
        """Rollouts of several turns, 5 % faults, a tail of latencies, aborts and updates in the middle of turns."""
        faults = dict.fromkeys(("rate_limited", "server_error", "disconnect", "cut_body", "aborted"), 0.05)
        server = {"tokens_per_second": 250.0, "latency": (0.0, 0.1), "update_every": 0.3, "retry_after": 0.0}
        async with stack(kind=kind, policy=RandomTokens(), faults=faults, **server) as world:

            async def rollout(number: int) -> MessageHistory:
                managed = world.tokens.for_rollout()
                history = MessageHistory([{"role": "user", "content": f"Question {number}."}])
                for turn in range(3):
                    history.append(await managed.chat(history, max_tokens=80))
                    history.append({"role": "user", "content": f"And {turn}?"})
                return history

            histories = await asyncio.gather(*map(rollout, range(8)))
            found = [
                sample for number, each in enumerate(histories) for sample in samples(each, rollout_id=str(number))
            ]
            everything = Everything(histories)
            assert_exact(world, everything)
            assert all(verify(sample) == [] for sample in found)
            spans = [span for sample in found for span in sample.spans]
            assert sum(span.interrupts for span in spans) > 3
            assert all(span.versions[-1][2] == len(span) for span in spans)
            assert max(len(span.versions) for span in spans) > 1
            assert max(sample.version_count for sample in found) > 1


class Everything:
    """Many histories as one, for the ledger."""

    def __init__(self, histories: Sequence[MessageHistory]) -> None:
        self.histories = histories

    def completions(self) -> list[Any]:
        return [response for each in self.histories for response in each.completions()]

    def ended_on(self) -> list[Any]:
        return []

    def replaced_attempts(self) -> list[Any]:
        return []

    def message_digests(self) -> dict[int, str]:
        return {}


def test_a_part_that_was_sampled_otherwise_is_in_the_record_of_the_whole() -> None:
    """Servers of one model may differ in fields that are not known, or in the kind of their logprobs."""
    known = {"max_tokens": 8, "min_tokens": 0, "temperature": 0.7, "logprobs": "processed"}
    begun = Generation([1, 2], [-0.5, -0.5], FinishReason.ABORT, sampling=known)
    for other in ({"logprobs": "raw"}, {"other_fields": ["mystery"]}):
        rest = Generation([3], [-0.5], FinishReason.STOP, sampling={**known, **other, "max_tokens": 6})
        whole = joined(begun, rest)
        assert whole.sampling == {**known, **other}
        assert sampling_problem(whole.sampling) is not None
    rest = Generation([3], [-0.5], FinishReason.STOP, sampling={**known, "max_tokens": 6})
    assert joined(begun, rest).sampling == known


def test_an_answer_without_tokens_says_nothing_of_the_tokens_so_far() -> None:
    """What SGLang aborts in its queue has no length of a prompt."""
    begun = Generation([1, 2], [-0.5, -0.5], FinishReason.ABORT, prompt_checked="ids")
    queued = joined(begun, Generation([], [], FinishReason.ABORT))
    assert queued.prompt_checked == "ids"
    assert (
        joined(queued, Generation([3], [-0.5], FinishReason.STOP, prompt_checked="length")).prompt_checked == "length"
    )
    assert joined(queued, Generation([3], [-0.5], FinishReason.STOP)).prompt_checked == "none"


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [("3+4", "5", "3+4+5"), ("3", "4+5", "3+4+5"), ("3+4", "4", "3+4"), (None, "5", "5"), ("3", None, None)],
)
def test_all_versions_of_a_completion_are_named_where_those_of_its_tokens_are_not_known(
    first: str | None, second: str | None, named: str | None
) -> None:
    def part(ids: list[int], version: str | None) -> Generation:
        ranges = ((version, 0, len(ids)),) if version and ids and "+" not in version else ()
        return Generation(ids, [-0.5] * len(ids), FinishReason.ABORT, model_version=version, versions=ranges)

    begun = part([1, 2], first)
    assert joined(begun, part([3], second)).model_version == named
    assert joined(begun, part([3], second)).versions == ()
    assert joined(begun, part([], "9")).model_version == (first or "9"), "nothing was sampled by it"
