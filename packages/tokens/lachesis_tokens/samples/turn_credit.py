"""Advantages by turn: the tokens of a turn are credited with what the rollout earned from that turn on.

"Credit by turn" in docs/training-data.md says how; the baseline of a turn by its peers is that of arXiv 2505.11821.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from lachesis_tokens.samples.advantages import rollout_advantages
from lachesis_tokens.samples.samples import TokenSample


def turn_advantages(
    scores: Sequence[float],
    turn_rewards: Sequence[Sequence[float]],
    discount: float = 1.0,
    unfinished: Sequence[bool] = (),
) -> list[list[float]]:
    """For each rollout the advantage of each of its turns.

    Args:
        scores: one for each rollout.
        turn_rewards: for each rollout its rewards by turn; one without any counts as one turn with the score.
        unfinished: for each rollout whether it began one more turn, with which it earned nothing.
    """
    returns = [_returns(*rollout, discount) for rollout in zip(scores, turn_rewards, strict=True)]
    for values, more in zip(returns, unfinished, strict=False):
        values += [0.0] * more
    found: list[list[float]] = [[] for _ in returns]
    baseline = 0.0
    for turn in range(max(map(len, returns))):
        here = [at for at, values in enumerate(returns) if len(values) > turn]
        values = [returns[at][turn] for at in here]
        if len(here) > 1 or not turn:
            baseline = math.fsum(values) / len(values)
            advantages = [advantage or 0.0 for advantage in rollout_advantages(values)]  # exactly 0 for equal returns
        else:
            advantages = [values[0] - baseline]
        for at, advantage in zip(here, advantages, strict=True):
            found[at].append(advantage)
    return found


def _returns(score: float, rewards: Sequence[float], discount: float) -> list[float]:
    """By turn: r[t] + discount * r[t + 1] + ... What the score has beyond the sum was earned at the last turn."""
    *before, last = rewards or (0.0,)
    found = [last + score - math.fsum(rewards)]
    for reward in reversed(before):
        found.append(reward + discount * found[-1])
    return found[::-1]


def turns_of_spans(
    samples: Sequence[TokenSample], turn_ids: Sequence[str], *, below: Container[str] = (), given_up: str | None = None
) -> dict[str, int]:
    """By `completion_id`, the turn (from 0) to which each completion of a rollout belongs.

    A completion that is no turn itself belongs to the one whose reward comes next: a sub-agent's, or one that was left,
    to the turn in which it was sampled; a summary or a discarded attempt to the turn that it prepared. What prepared a
    turn that never came belongs to that one, `len(turn_ids)`.

    Args:
        samples: all of the rollout.
        turn_ids: the `completion_id` of each turn; without any, all belong to turn 0.
        below: the ids of sub-agents' completions.
        given_up: the id of the completion with which the rollout ended, where that is no turn.
    """
    number = {name: turn for turn, name in enumerate([*turn_ids, *filter(None, [given_up])])}
    found: dict[str, int] = {}
    turn = -1
    spans = [(span, sample.discarded) for sample in samples for span in sample.spans]
    for span, discarded in sorted(spans, key=lambda pair: pair[0].turn):  # in the order of sampling
        name = span.completion_id
        turn = number.get(name, turn)
        ahead = name not in number and name not in below and (discarded or span.purpose == "summary")
        found[name] = max(0, min(turn + ahead, len(turn_ids)))
    return found if turn_ids else dict.fromkeys(found, 0)
