"""Groups of trees: whether an environment plays them, and before which turns its rollouts fork."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from backends.errors import SettingsError
from lachesis.loop.rollout import Rollout
from lachesis.loop.trees import Trees
from lachesis.runs.failures import UnusableSettings
from lachesis.settings.fork_rules import ForkRule, check_size, leaves_of
from lachesis.settings.tree_settings import TreeSettings
from lachesis_messages.history import MessageHistory
from lachesis_messages.responses import ChatResponse, ToolResponse

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment


def trees_of(env: Environment, item: Any, size: int, play: Callable[[int], Awaitable[Rollout]]) -> Trees:
    """What plays the groups of `size` rollouts of an item as trees.

    Raises:
        UnusableSettings: rollouts of this environment cannot branch, or not with these settings.
    """
    config: TreeSettings = env.config
    try:
        leaves = leaves_of(config)
        if leaves is None:
            raise ValueError("branch_at can fork at any turn: set tree_leaves")
        if env.player.scorer.session is not None:
            raise ValueError("what `session(item)` opens is in no checkpoint, so rollouts cannot branch: unset tree_at")
        check_size(config, leaves, size)
    except ValueError as error:
        raise UnusableSettings(f"{env.run_name}: {error}") from None
    return Trees(play, partial(_width, env, item), leaves)


async def _width(env: Environment, item: Any, history: MessageHistory, turns: Sequence[ChatResponse]) -> int:
    if env.branch_at is not None:
        said = env.branch_at(item, history.frozen())
        return int(await said if inspect.isawaitable(said) else said)
    config: TreeSettings = env.config
    return config.tree_width if config.tree_at and forks(ForkRule.parse(config.tree_at), history, turns) else 1


def forks(rule: ForkRule, history: MessageHistory, turns: Sequence[ChatResponse]) -> bool:
    """Whether a rollout forks before its next turn.

    What decides is known before that turn: a choice that depended on it would bias the advantages.

    Args:
        turns: its completions so far, also those that compression has removed from `history`.

    Raises:
        SettingsError: the rule needs what the server does not report.
    """
    if not turns:
        return False
    last = turns[-1]
    if rule.kind == "turns":
        return len(turns) + 1 in rule.values
    if rule.kind == "tool_failures":
        return _failed(history)
    if rule.kind == "tokens":
        counts = [each.usage.completion_tokens for each in turns]
        if None in counts:
            raise SettingsError("tree_at tokens needs a server that counts tokens: this one does not")
        known = [count or 0 for count in counts]
        return sum(known) // rule.values[0] > sum(known[:-1]) // rule.values[0]
    if last.tokens is None:
        raise SettingsError("tree_at surprise needs the logprobs of sampled tokens: use a server with exact tokens")
    return math.fsum(last.tokens.logprobs[:]) <= -rule.values[0] * max(1, len(last.tokens))


def _failed(history: MessageHistory) -> bool:
    """Whether a tool failed in the last turn."""
    for node in reversed(history.nodes()):
        if isinstance(node.origin, ChatResponse):
            return False
        if isinstance(node.origin, ToolResponse) and node.origin.error is not None:
            return True
    return False
