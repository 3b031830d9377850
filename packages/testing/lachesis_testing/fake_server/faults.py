"""Faults of servers and models, by name. Each occurs with a probability, or in given requests.

There are two families. Token faults (`TOKENS`) change what is sampled: the server reports it truthfully, and the client
must keep it exactly. Wire faults (`WIRE`) are failures and false reports: the client must notice them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import Any, Final, TypeAlias

from lachesis_testing.fake_server.completions import Ask, Call, Completion, Reply
from lachesis_testing.fake_server.policies import WORDS

Occasion: TypeAlias = "float | Collection[int]"
"""A probability, or the numbers (from 0) of the requests in which it occurs."""


class Fault(StrEnum):
    """The faults."""

    THINKING = "thinking"
    """A thinking block first."""
    TRAILING_SPACE = "trailing_space"
    """White space before the end of turn."""
    SPELLED_SPECIAL = "spelled_special"
    """The text of a special token in the middle, in ordinary tokens."""
    INNER_SPECIAL = "inner_special"
    """A real special token in the middle; where there is no other, an end-of-turn token."""
    BROKEN_UTF8_MIDDLE = "broken_utf8_middle"
    """Half a character in the middle."""
    BROKEN_UTF8_END = "broken_utf8_end"
    """Half a character at the end."""
    AMBIGUOUS = "ambiguous"
    """Tokens split into others with the same text, unlike any encoder."""
    CUT_TOOL_CALL = "cut_tool_call"
    """Cut off inside a tool call, with finish reason "length"."""
    NO_END_OF_TURN = "no_end_of_turn"
    """Finish reason "stop" without an end-of-turn token."""
    DOUBLE_END_OF_TURN = "double_end_of_turn"
    """Two end-of-turn tokens at the end."""
    EMPTY = "empty"
    """The end-of-turn token and nothing else."""
    NO_TOKENS = "no_tokens"
    """No token at all."""
    ABORTED = "aborted"
    """Aborted after a random number of tokens, 16 in the mean, unless it ends before."""

    RATE_LIMITED = "rate_limited"
    """429 with Retry-After."""
    SERVER_ERROR = "server_error"
    """500."""
    UNAVAILABLE = "unavailable"
    """503."""
    HANG = "hang"
    """No answer, ever."""
    DISCONNECT = "disconnect"
    """The connection is closed before any answer."""
    CUT_BODY = "cut_body"
    """Status and headers, half the body, then the connection is closed."""
    NOT_JSON = "not_json"
    """200 and a web page."""
    WRONG_ECHO = "wrong_echo"
    """One id of the echoed prompt is changed, if the API echoes it."""
    TRUNCATED_PROMPT = "truncated_prompt"
    """The first half of the prompt is dropped before sampling."""
    NO_ECHO = "no_echo"
    """The answer repeats no ids of the prompt."""
    NO_USAGE = "no_usage"
    """The answer does not count the tokens of the prompt."""
    REPLAYED = "replayed"
    """A cache in front of the server answers an equal request with the bytes of the earlier answer."""
    REPLAYED_PROMPT = "replayed_prompt"
    """The same, for the same prompt, whatever else the request says."""
    NO_IDS = "no_ids"
    """No ids in the answer."""
    NO_LOGPROBS = "no_logprobs"
    """No logprobs in the answer."""
    NAN_LOGPROBS = "nan_logprobs"
    """One logprob is the literal NaN, which is not JSON."""
    NULL_LOGPROBS = "null_logprobs"
    """One logprob is null."""
    SHORT_LOGPROBS = "short_logprobs"
    """One logprob less than ids."""
    SHORT_IDS = "short_ids"
    """One id less than logprobs."""
    BEHIND_STOP = "behind_stop"
    """After the token that completes a stop text come the further ones of a speculative step. The text is right."""


TOKENS: Final = frozenset(list(Fault)[: list(Fault).index(Fault.RATE_LIMITED)])
WIRE: Final = frozenset(Fault) - TOKENS


def fault_plan(wanted: Mapping[str, Occasion] | Iterable[str]) -> dict[Fault, Occasion]:
    """The faults with their occasions, in order. A fault without an occasion always occurs.

    Raises:
        ValueError: there is no such name, or no such probability.
    """
    named = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted, 1.0)
    if unknown := sorted(set(named) - {each.value for each in Fault}):
        raise ValueError(f"no fault is called {', '.join(unknown)}; there are: {', '.join(Fault)}")
    for name, occasion in named.items():
        if isinstance(occasion, (int, float)) and not 0 <= occasion <= 1:
            raise ValueError(f"fault {name}: a probability is from 0 to 1, got {occasion!r}")
    return {each: named[each.value] for each in Fault if each.value in named}


def drawn(plan: Mapping[Fault, Occasion], family: frozenset[Fault], number: int, rng: Random) -> list[Fault]:
    """The faults of one request or completion."""
    found = []
    for name, occasion in plan.items():
        if name in family:
            hit = rng.random() < occasion if isinstance(occasion, (int, float)) else number in occasion
            if hit:
                found.append(name)
    return found


def spoil(ask: Ask, reply: Reply, names: Iterable[Fault], rng: Random) -> Reply:
    """The reply with these token faults, applied in the order of `Fault`."""
    for name in names:
        reply = _TOKEN_FAULTS[name](ask, reply, rng)
    return reply


def tamper(
    made: Completion, prompt_ids: Sequence[int], names: Iterable[Fault], rng: Random, vocabulary_size: int
) -> tuple[Sequence[int], list[int] | None, list[float | None] | None]:
    """The reported ids of the prompt, ids of the completion and logprobs, with these wire faults."""
    ids: list[int] | None = list(made.ids)
    logprobs: list[float | None] | None = list(made.logprobs)
    for name in names:
        if name is Fault.WRONG_ECHO and prompt_ids:
            place = rng.randrange(len(prompt_ids))
            prompt_ids = [*prompt_ids[:place], (prompt_ids[place] + 1) % vocabulary_size, *prompt_ids[place + 1 :]]
        elif name is Fault.NO_IDS:
            ids = None
        elif name is Fault.NO_LOGPROBS:
            logprobs = None
        elif name in (Fault.NAN_LOGPROBS, Fault.NULL_LOGPROBS) and logprobs:
            logprobs[rng.randrange(len(logprobs))] = math.nan if name is Fault.NAN_LOGPROBS else None
        elif name is Fault.SHORT_LOGPROBS and logprobs:
            logprobs = logprobs[:-1]
        elif name is Fault.SHORT_IDS and ids:
            ids = ids[:-1]
    return prompt_ids, ids, logprobs


def behind_stop(made: Completion, prompt_ids: Sequence[int], call: Call, rng: Random) -> Completion:
    """What is reported of a completion that a stop text ended."""
    if not isinstance(made.stop_reason, str) or not made.weights:
        return made
    model, version, start, end = made.weights[-1]
    more = [rng.randrange(model.vocabulary_size) for _ in range(rng.randint(1, 4))]
    scores = model.score([*prompt_ids, *made.ids], more, call.sampling)
    weights = [*made.weights[:-1], (model, version, start, end + len(more))]
    return replace(made, ids=[*made.ids, *more], logprobs=[*made.logprobs, *scores], weights=weights)


def truncated(call: Call) -> Call:
    """The request without the first half of each prompt."""
    return replace(call, prompts=[prompt[len(prompt) // 2 :] for prompt in call.prompts])


def withheld(answer: Any, faults: Collection[Fault]) -> Any:
    """An answer without what `NO_ECHO` and `NO_USAGE` hide."""
    hidden = {
        *(("prompt_token_ids",) if Fault.NO_ECHO in faults else ()),
        *(("usage", "prompt_tokens") if Fault.NO_USAGE in faults else ()),
    }
    if not hidden:
        return answer
    if isinstance(answer, Mapping):
        return {name: withheld(value, faults) for name, value in answer.items() if name not in hidden}
    return [withheld(value, faults) for value in answer] if isinstance(answer, list) else answer


def tokens_until_abort(rng: Random) -> int:
    """Tokens before the fault `ABORTED`. Each token may be the last one with the same probability, whatever follows."""
    return int(math.log(1.0 - rng.random()) / math.log1p(-1.0 / _MEAN_TOKENS_UNTIL_ABORT))


def _split(ask: Ask, reply: Reply, rng: Random) -> Reply:
    codec = ask.codec
    special = codec.special_ids
    places: dict[int, tuple[int, int]] = {}
    for place, index in enumerate(reply.ids):
        piece = codec.bytes_of[index]
        if index not in special and codec.id_of_bytes.get(piece) == index:
            cuts = [
                (codec.id_of_bytes[piece[:at]], codec.id_of_bytes[piece[at:]])
                for at in range(1, len(piece))
                if piece[:at] in codec.id_of_bytes and piece[at:] in codec.id_of_bytes
            ]
            if cuts:
                places[place] = rng.choice(cuts)
    if not places:
        return reply
    always = rng.choice(list(places))
    ids: list[int] = []
    for place, index in enumerate(reply.ids):
        ids += places[place] if place in places and (place == always or rng.random() < 0.5) else (index,)
    return Reply(ids, reply.finish_reason, as_is=reply.as_is)


def _body(ask: Ask, reply: Reply) -> tuple[list[int], list[int]]:
    """The ids before the end-of-turn ids at the end, and those."""
    ids = list(reply.ids)
    count = len(ids)
    while count and ids[count - 1] in ask.end_ids:
        count -= 1
    return ids[:count], ids[count:]


def _no_end(ask: Ask, reply: Reply, rng: Random) -> Reply:
    return Reply(_body(ask, reply)[0], "stop", as_is=True)


def _double_end(ask: Ask, reply: Reply, rng: Random) -> Reply:
    return Reply(ask.ended(ask.ended(_body(ask, reply)[0])), "stop", as_is=True)


def _insert(ask: Ask, reply: Reply, rng: Random, ids: Iterable[int], *, as_is: bool = False) -> Reply:
    body, end = _body(ask, reply)
    place = rng.randint(min(1, len(body)), max(min(1, len(body)), len(body) - 1))
    return Reply([*body[:place], *ids, *body[place:], *end], reply.finish_reason, as_is=reply.as_is or as_is)


def _spelled_special(ask: Ask, reply: Reply, rng: Random) -> Reply:
    special = sorted(ask.codec.special_ids)
    text = ask.codec.bytes_of[rng.choice(special)].decode() if special else "<|im_end|>"
    return _insert(ask, reply, rng, ask.codec.spell(text))


def _inner_special(ask: Ask, reply: Reply, rng: Random) -> Reply:
    others = sorted(ask.codec.special_ids - ask.end_ids)
    chosen = others or sorted(ask.end_ids)
    return _insert(ask, reply, rng, [rng.choice(chosen)] if chosen else [], as_is=not others)


def _half_character(ask: Ask, rng: Random) -> list[int]:
    whole = rng.choice(("é", "€", "世", "😀")).encode()
    half = whole[: rng.randint(1, len(whole) - 1)]
    return [ask.codec.id_of_bytes[bytes([byte])] for byte in half if bytes([byte]) in ask.codec.id_of_bytes]


def _broken_end(ask: Ask, reply: Reply, rng: Random) -> Reply:
    body, end = _body(ask, reply)
    return Reply([*body, *_half_character(ask, rng), *end], reply.finish_reason, as_is=reply.as_is)


def _broken_middle(ask: Ask, reply: Reply, rng: Random) -> Reply:
    return _insert(ask, reply, rng, _half_character(ask, rng))


def _cut_tool_call(ask: Ask, reply: Reply, rng: Random) -> Reply:
    codec, opening = ask.codec, ask.codec.encode("<tool_call>")
    body, _ = _body(ask, reply)
    starts = [at for at in range(len(body)) if body[at : at + len(opening)] == opening]
    if not starts:
        starts = [len(body)]
        body += [*opening, *codec.encode('\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>')]
    start = rng.choice(starts) + len(opening)
    whole = next(
        (at for at in range(start, len(body)) if codec.decode(body[start:at]).rstrip().endswith("}}")), len(body)
    )
    return Reply(body[: rng.randint(start + 1, max(start + 1, whole - 1))], "length", as_is=True)


def _trailing_space(ask: Ask, reply: Reply, rng: Random) -> Reply:
    body, end = _body(ask, reply)
    space = ask.codec.encode(rng.choice((" ", "\n", "  \n\n", "\t", " \n ")))
    return Reply([*body, *space, *end], reply.finish_reason, as_is=reply.as_is)


def _empty(ask: Ask, reply: Reply, rng: Random) -> Reply:
    return Reply(ask.ended([]), "stop")


def _no_tokens(ask: Ask, reply: Reply, rng: Random) -> Reply:
    return Reply([], "stop", as_is=True)


def _thinking(ask: Ask, reply: Reply, rng: Random) -> Reply:
    thought = ask.codec.encode(f"<think>\n{' '.join(rng.choices(WORDS, k=rng.randint(3, 12)))}\n</think>\n\n")
    return Reply([*thought, *reply.ids], reply.finish_reason, as_is=reply.as_is)


_MEAN_TOKENS_UNTIL_ABORT: Final = 16.0
_TOKEN_FAULTS: Final[Mapping[Fault, Callable[[Ask, Reply, Random], Reply]]] = {
    Fault.THINKING: _thinking,
    Fault.TRAILING_SPACE: _trailing_space,
    Fault.SPELLED_SPECIAL: _spelled_special,
    Fault.INNER_SPECIAL: _inner_special,
    Fault.BROKEN_UTF8_MIDDLE: _broken_middle,
    Fault.BROKEN_UTF8_END: _broken_end,
    Fault.AMBIGUOUS: _split,
    Fault.CUT_TOOL_CALL: _cut_tool_call,
    Fault.NO_END_OF_TURN: _no_end,
    Fault.DOUBLE_END_OF_TURN: _double_end,
    Fault.EMPTY: _empty,
    Fault.NO_TOKENS: _no_tokens,
}
