"""The choice of the turns that a summary replaces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from lachesis_data.compression.region import Turn, choose_region
from lachesis_data.compression.settings import BudgetSettings, CompressionSettings, ProtectedTurns
from tests.run import some


def settings(summary: int = 10, **protected: object) -> CompressionSettings:
    return CompressionSettings(
        compression=BudgetSettings(summary_target_tokens=summary),
        protected_turns=ProtectedTurns.model_validate(protected),
    )


def agent(steps: int, tokens: int = 100) -> list[Turn]:
    """system, human, then `steps` times a call and its result, then an answer."""
    step = [Turn("gpt", tokens, opens_calls=True), Turn("tool", tokens)]
    return [Turn("system", tokens), Turn("human", tokens), *step * steps, Turn("gpt", tokens)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    turns = [Turn("system", draw(st.integers(0, 200)))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 12))):
        tokens = st.integers(0, 200)
        if draw(st.booleans()):
            turns.append(Turn("human", draw(tokens)))
        results = draw(st.integers(0, 3))
        turns.append(Turn("gpt", draw(tokens), opens_calls=results > 0, protected=draw(st.integers(0, 9)) == 0))
        turns += [Turn("tool", draw(tokens)) for _ in range(results)]
    if draw(st.booleans()):
        turns.append(Turn("gpt", draw(st.integers(0, 200)), opens_calls=True))
    return turns


protections = st.builds(
    ProtectedTurns,
    **{f"first_{role}": st.booleans() for role in ("system", "human", "gpt", "tool")},
    last_n_turns=st.integers(0, 6),
)


@examples(max_examples=some(60))
@given(conversations(), protections, st.integers(1, 100), st.integers(0, 2000))
def test_a_region_is_whole_steps_without_a_protected_turn(
    turns: list[Turn], protected: ProtectedTurns, summary: int, target: int
) -> None:
    chosen = CompressionSettings(compression=BudgetSettings(summary_target_tokens=summary), protected_turns=protected)
    region = choose_region(turns, chosen, target)
    if region is None:
        return
    roles = [turn.role for turn in turns]
    assert turns[region.start].role != "tool"
    assert region.stop == len(turns) or turns[region.stop].role != "tool"
    assert not turns[region.stop - 1].opens_calls or region.stop < len(turns)
    assert not any(turns[index].protected for index in region)
    assert all(index < len(turns) - protected.last_n_turns for index in region)
    for role in set(roles):
        assert not getattr(protected, f"first_{role}") or roles.index(role) not in region
    saved = sum(turns[index].tokens for index in region)
    assert saved > summary
    total = sum(turn.tokens for turn in turns)
    if total - saved + summary <= target:  # and not a step more than that needs
        steps = [index for index in region if index > region.start and roles[index] != "tool"]
        if steps:
            less = sum(turns[index].tokens for index in range(region.start, steps[-1]))
            assert less <= summary or total - less + summary > target


def test_a_region_starts_after_the_first_turns_and_saves_just_enough() -> None:
    assert choose_region(agent(10), settings(), target=1900) == range(4, 10)
    assert choose_region(agent(10), settings(), target=0) == range(4, 18)


def test_with_nothing_to_gain_there_is_no_region() -> None:
    assert choose_region(agent(10), settings(summary=5000), target=100) is None
    assert choose_region(agent(2), settings(), target=100) is None
    assert choose_region([], settings(), target=100) is None


def test_a_first_result_late_in_the_conversation_does_not_protect_what_is_before_it() -> None:
    turns = [Turn("human", 10), *[Turn("gpt", 100), Turn("human", 100)] * 10, *agent(2)[2:]]
    assert choose_region(turns, settings(), target=1000) == range(2, 18)


def test_calls_that_still_run_stay() -> None:
    turns = [*agent(3), Turn("human", 5), Turn("gpt", 500, opens_calls=True)]
    assert choose_region(turns, settings(last_n_turns=0), target=0) == range(4, 10)
