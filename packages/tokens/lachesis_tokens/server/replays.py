"""Answers that a cache or a proxy gives a second time: trained twice, they would count as two samples.

A server names each of its answers. The same name with the same tokens after the same prompt is an earlier answer. Names
of some servers say nothing: all answers have one, or they count from 0 at each start. A name that comes with other
tokens, or for another prompt, shows it, and the names of that server are no longer compared.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lachesis_client.errors import BadResponse
from lachesis_client.sampling import Sampling
from lachesis_tokens.engines.base import Generation, TokenEngine
from lachesis_tokens.engines.prompt_ids import PromptIds

log = logging.getLogger(__name__)

_KEPT: Final = 1 << 16
"""Completions that are remembered, at about 200 bytes each. A cache that answers from longer ago goes unnoticed."""
_TAIL: Final = 256
"""Bytes at the end of a prompt that are compared, in addition to its length. Hashing whole prompts would cost more than
sending them.
"""

_Key = tuple[str, str, int]


class ReplayGuard:
    """Remembers the answers of a run, in the memory of its process."""

    def __init__(self, *, kept: int = _KEPT) -> None:
        self._kept = kept
        self._seen: OrderedDict[_Key, int] = OrderedDict()
        self._reported: set[str] = set()
        """Servers behind a cache."""
        self._unnamed: set[str] = set()
        """Servers that gave one name to different answers."""

    def repeated(
        self, engine: TokenEngine, prompt: PromptIds, sampling: Sampling, answers: Sequence[Generation]
    ) -> bool:
        """Whether one of the answers was given before: then `ask_again`.

        Requests that set a seed, and greedy ones, are meant to repeat, and are not compared.
        """
        return sampling.seed is None and sampling.temperature > 0 and bool(self._repeated(engine, prompt, answers))

    async def ask_again(
        self,
        engine: TokenEngine,
        prompt: PromptIds,
        sampling: Sampling,
        answers: list[Generation],
        *,
        n: int,
        max_retries: int | None,
    ) -> list[Generation]:
        """Other answers than these, which were given before, by the same request with a random seed: to a cache that is
        another request, and to the server the same distribution.

        Raises:
            BadResponse: also the second answer is an earlier one.
        """
        seeded = replace(sampling, seed=secrets.randbits(31))
        again = await engine.generate(prompt, seeded, n=n, max_retries=max_retries)
        answers, again = (
            [replace(one, attempts=answers[0].attempts + again[0].attempts) for one in each]
            for each in (answers, again)
        )
        if name := self._repeated(engine, prompt, again):
            # No cache has this prompt: an answer to it that has a known name shows that the server's names repeat.
            other = PromptIds(prompt.ids[1:] or [*prompt, *prompt])
            other.route = prompt.route
            [probe] = await engine.generate(other, replace(sampling, max_tokens=1), max_retries=max_retries)
            self._repeated(engine, other, [probe])
            if engine.base_url not in self._unnamed:
                raise BadResponse(
                    engine.base_url,
                    f"completion {name} repeats an earlier answer to the same prompt, even with another seed",
                    "turn off the cache between the run and the model server; it would be trained twice",
                )
        if engine.base_url in self._unnamed:
            return answers  # to take the one that differs would make likely answers rarer
        if engine.base_url not in self._reported:
            self._reported.add(engine.base_url)
            log.warning(
                "server %s gave an earlier answer again (completion %s): a cache is in front of it. Such answers are "
                "requested again, with a seed; turn the cache off",
                *(engine.base_url, answers[0].completion_id),
            )
        return again

    def _repeated(self, engine: TokenEngine, prompt: PromptIds, answers: Sequence[Generation]) -> str:
        """The name of the first answer that was given before, else "". Remembers those that were not."""
        if engine.base_url in self._unnamed:
            return ""
        found, tail = "", b""
        for place, answer in enumerate(answers):
            if not answer.completion_id or not answer.ids:
                continue
            tail = tail or _tail(prompt)
            key = (engine.base_url, answer.completion_id, place)
            made = hash((len(prompt), tail, tuple(answer.ids)))
            before = self._seen.get(key)
            if before is None:
                self._seen[key] = made
            elif before == made:
                found = found or answer.completion_id
            else:
                self._unnamed.add(engine.base_url)
                log.info("server %s gives different answers one name, such as %s: replays go unnoticed", *key[:2])
                return ""
        while len(self._seen) > self._kept:
            self._seen.popitem(last=False)
        return found


def _tail(prompt: PromptIds) -> bytes:
    """The end of the prompt's JSON, which does not depend on how the prompt is cut into pieces."""
    end = b""
    for piece in reversed(prompt.json_pieces()):
        end = bytes(piece[-_TAIL:]) + end
        if len(end) >= _TAIL:
            break
    return end[-_TAIL:]
