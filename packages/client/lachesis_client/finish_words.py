"""The meaning of the finish reasons of model servers, which all word them differently; see `server_words`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from lachesis_messages.messages import FinishReason


class Ending(Enum):
    """What a finish reason says that is no `FinishReason`."""

    BROKEN = auto()
    """The server failed before the completion was complete."""
    MALFORMED = auto()
    """The model wrote a call that the server could not read."""


_WORDS: Final[Mapping[FinishReason | Ending, str]] = {
    FinishReason.STOP: "stop eos eos_token stop_sequence stop_token stop_string stop_str stop_word stop_words end_turn "
    "end end_id end_of_text end_of_turn endoftext im_end eot eot_id eom_id complete completed done finished finish "
    "stopped normal natural success",
    FinishReason.TOOL_CALLS: "tool_calls tool_call tool_use function_call function_calls",
    FinishReason.LENGTH: "length max_tokens max_output_tokens max_completion_tokens max_length model_length "
    "max_new_tokens max_tokens_reached max_tokens_exceeded max_seq_len max_context_length token_limit "
    "token_limit_reached model_context_window_exceeded context_window_exceeded context_length_exceeded context_length "
    "context_limit context_overflow context_full error_limit truncated incomplete repetition",
    FinishReason.CONTENT_FILTER: "content_filter content_filtered content_filter_error content_policy_violation safety "
    "sensitive refusal recitation prohibited_content blocklist spii image_safety language moderation flagged blocked "
    "guardrail_intervened error_toxic data_inspection_failed content_moderation content_blocked safety_blocked "
    "policy_violation",
    FinishReason.ABORT: "abort",
    FinishReason.UNKNOWN: "null none unknown unspecified",
    Ending.MALFORMED: "malformed_function_call unexpected_tool_call too_many_tool_calls malformed_response "
    "malformed_tool_call malformed_tool_use malformed_model_output invalid_tool_call",
}
_ENDINGS: Final = {"": FinishReason.UNKNOWN} | {word: meant for meant, of in _WORDS.items() for word in of.split()}

_AROUND: Final = re.compile(r"^(<\|?|finish_?reason[_.])|\|?>$")
"""What servers write around the word: the markers of a token, the name of an enum."""


def ending(reason: object) -> FinishReason | Ending:
    """The meaning of a finish reason, in any spelling, also with a message after a colon.

    One that no list here has is `Ending.BROKEN`: no completed answer.
    None is `FinishReason.UNKNOWN`: the server gives no reasons."""
    if reason is None:
        return FinishReason.UNKNOWN
    if not isinstance(reason, str):
        return Ending.BROKEN
    given = reason.strip().lower()
    word = _AROUND.sub("", given.partition(":")[0].strip()).replace("-", "_").replace(" ", "_")
    return _ENDINGS.get(word or given, Ending.BROKEN)
