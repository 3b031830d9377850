"""Groups of trees: whether an environment plays them, and before which turns its rollouts fork."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from backends.errors import SettingsError
from lachesis.loop.rollout import Rollout
from lachesis.loop.trees import Trees
from lachesis.runs.failures import UnusableSettings
from lachesis.settings.fork_rules import ForkRule, leaves_of

if TYPE_CHECKING:
    from lachesis.loop.loop import PlayedRollout
    from lachesis.runs.environment import Environment


def trees_of(env: Environment, item: Any, size: int, play: Callable[[int], Awaitable[Rollout]]) -> Trees:
    """What plays the groups of `size` rollouts of an item as trees.

    Raises:
        UnusableSettings: rollouts of this environment cannot branch, or not with these settings.
    """
    try:
        leaves = leaves_of(env.config, size)
        if env.player.scorer.session is not None:
            raise ValueError("what `session(item)` opens is in no checkpoint, so rollouts cannot branch: unset tree_at")
    except ValueError as error:
        raise UnusableSettings(f"{env.run_name}: {error}") from None
    return Trees(play, partial(_width, env, item), leaves)


async def _width(env: Environment, item: Any, rollout: PlayedRollout) -> int:
    if env.branch_at is not None:
        said = env.branch_at(item, rollout.conversation.history.frozen())
        return int(await said if inspect.isawaitable(said) else said)
    return env.config.tree_width if _forks(ForkRule.parse(env.config.tree_at), rollout) else 1


def _forks(rule: ForkRule, rollout: PlayedRollout) -> bool:
    """Whether a rollout forks before its next turn.

    What decides is known before that turn: a choice that depended on it would bias the advantages. Turns that
    compression has removed from the conversation count too.

    Raises:
        SettingsError: the rule needs what the server does not report.
    """
    if rule.kind == "turns":
        return rollout.turns + 1 in rule.values
    if rule.kind == "tool_failures":
        return any(failed.turn == rollout.turns for failed in rollout.tool_errors)
    if rule.kind == "tokens":
        counts = [each.usage.completion_tokens for each in rollout.responses]
        if None in counts:
            raise SettingsError("tree_at tokens needs a server that counts tokens: this one does not")
        known = [count or 0 for count in counts]
        return sum(known) // rule.values[0] > sum(known[:-1]) // rule.values[0]
    tokens = rollout.responses[-1].tokens
    if tokens is None:
        raise SettingsError("tree_at surprise needs the logprobs of sampled tokens: use a server with exact tokens")
    return math.fsum(tokens.logprobs[:]) <= -rule.values[0] * max(1, len(tokens))
