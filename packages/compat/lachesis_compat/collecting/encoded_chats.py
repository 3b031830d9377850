"""Notes of which conversation was encoded to which ids, for environments that return ids instead of what was said."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lachesis_compat.collecting.recording import current_recording

_TRAINED = ("assistant", "agent")
"""Roles that Atropos' `tokenize_for_trainer` trains."""


def note_chats() -> None:
    """From now on, `apply_chat_template` of every tokenizer notes the conversation that it encodes for an item.

    For code of an item, it returns a list of ids, as it did before transformers 5, unless the caller asks for something
    else: with the dict-like object of transformers 5, Atropos' `tokenize_for_trainer` makes samples of two tokens.
    Nothing changes for other code of the process, whatever runs beside it.
    """
    from transformers import PreTrainedTokenizerBase

    render = PreTrainedTokenizerBase.apply_chat_template
    if getattr(render, "notes_chats", False):
        return

    @functools.wraps(render)
    def apply_chat_template(self: Any, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        recording = current_recording()
        if recording is None or not kwargs.get("tokenize", True):
            return render(self, conversation, *args, **kwargs)
        kwargs.setdefault("return_dict", False)
        encoded = render(self, conversation, *args, **kwargs)
        recording.note(encoded, conversation)
        return encoded

    apply_chat_template.notes_chats = True  # type: ignore[attr-defined]
    PreTrainedTokenizerBase.apply_chat_template = apply_chat_template


def noting_trained(tokenize_for_trainer: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Atropos' `tokenize_for_trainer`, which notes the conversation and the messages that the result trains."""

    @functools.wraps(tokenize_for_trainer)
    def tokenize(
        tokenizer: Any,
        chat: Any,
        include_messages: bool = False,
        train_on_all_assistant_turns: bool = False,
        finish_reason: str = "",
    ) -> dict[str, Any]:
        made = tokenize_for_trainer(tokenizer, chat, include_messages, train_on_all_assistant_turns, finish_reason)
        recording = current_recording()
        if recording is not None and chat and all(isinstance(message, Mapping) for message in chat):
            trained = [len(chat) - 1]
            if train_on_all_assistant_turns:
                trained = [at for at, message in enumerate(chat) if message.get("role") in _TRAINED]
            recording.note(made.get("tokens"), chat, trained, made.get("masks"))
        return made

    return tokenize
