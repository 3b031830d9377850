"""A policy for the fake server that writes a summary when the agent loop asks it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lachesis_testing.fake_server import Ask, Lengths, RandomWords, Reply, ToolUser
from lachesis_testing.fake_server.policies import Said, as_reply

SUMMARY = "The tide tables hang in the harbour office."


class Summarises:
    """Calls tools for some turns of each conversation, then answers.

    Args:
        turns: completions of a conversation that call a tool, as far as its prompt still shows them.
        summary: what it says in place of a summary; a function of the request for several.
    """

    def __init__(
        self, turns: int = 10**6, summary: Said | Callable[[Ask], Said] = SUMMARY, *, calls: int = 1, **more: Any
    ) -> None:
        self.plays = ToolUser(turns=turns, calls=calls, answer=RandomWords(Lengths(2, 12)), **more)
        self.summary = summary
        self.asked = 0
        """Requests for a summary."""

    def reply(self, ask: Ask) -> Reply:
        if "Answer with the summary alone" not in ask.prompt[-300:]:
            return self.plays.reply(ask)
        self.asked += 1
        return as_reply(ask, self.summary(ask) if callable(self.summary) else self.summary)
