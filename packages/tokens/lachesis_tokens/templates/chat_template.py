"""A model's chat template: messages in, the text of a prompt out, exactly as `apply_chat_template` renders it.

Templates expect different forms of messages: arguments as an object or as JSON text, content as text or as a list of
parts, an empty content or none. `load` finds the form of a template once, and `prepare` converts messages to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lachesis_client.errors import PromptError, TemplateError

TemplateMessage: TypeAlias = dict[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

_MARK = "placeholder-7f"
_PACKAGED: Final = Path(__file__).with_name("files")


def read_template(name: str) -> str:
    """The text of a template: one of this package by its name, such as `hermes_short`, or a file. Raises OSError."""
    packaged = _PACKAGED / f"{name}.jinja"
    return (packaged if Path(name).name == name and packaged.exists() else Path(name)).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of messages that a template expects: by default that of transformers."""

    text_arguments: bool = False
    """Call arguments are JSON text, as in OpenAI's API, and not a mapping."""
    content_parts: bool = False
    """Content is a list of `{"type": "text", "text": ...}`, and not one text, joined from the text parts. A template
    that expects parts silently ignores plain text."""
    empty_content: bool = False
    """A message without content gets an empty one. Otherwise it has no such key, as in transformers."""
    empty_text: bool = False
    """The same only for messages without calls: many templates require content for these alone."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template. `variables` are its special tokens and settings (`enable_thinking=False`)."""

    source: str
    variables: Mapping[str, Any]
    compiled: jinja2.Template = field(repr=False, compare=False)
    form: MessageForm = MessageForm()
    takes_images: bool = False
    """`prepare` keeps images: the template writes a placeholder for each, and the engine sends them together with the
    ids.
    """

    @classmethod
    def load(cls, source: str, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Compile a template and find the form of messages that it expects. Raises TemplateError for invalid Jinja."""
        try:
            compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                "the chat template", f"line {error.lineno} is not valid Jinja: {error.message}", "correct it"
            ) from error
        return cls(source, dict(variables or {}), compiled)._fitted()

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """The text for messages in the template's form. Raises TemplateError, which names the rejected message."""
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception as error:  # a template rejects a conversation with any exception
            words = _words(error)
            at = self._rejected_message(messages, tools, words)
            where = f" (message {at}, role {messages[at].get('role')!r})" if at is not None else ""
            raise TemplateError(
                "the chat template",
                f"it rejects the conversation{where}: {words}",
                "change the conversation, or set chat_template to a template that supports it",
            ) from error

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The text for OpenAI messages: `render` after `prepare`. Raises what they raise."""
        return self.render([*map(self.prepare, messages)], tools, add_generation_prompt=add_generation_prompt)

    def write_all(self, asked: Iterable[tuple[Sequence[Mapping[str, Any]], Tools | None, bool]]) -> list[str]:
        """`write` with each of these arguments. Raises what it raises."""
        return [self.write(*each) for each in asked]

    def write_each(self, conversations: Iterable[Sequence[Sequence[Mapping[str, Any]]]]) -> list[str | None]:
        """The texts for several conversations of OpenAI messages, each in the first of its forms that the template does
        not reject; None if it rejects them all."""
        found = []
        for forms in conversations:
            texts = (self._try([*map(self.prepare, messages)], True) for messages in forms)
            found.append(next((text for text in texts if text is not None), None))
        return found

    def image_text(self) -> str:
        """The text that the template writes for an image before the words of a message, "" if it writes none."""
        words: TemplateMessage = {"type": "text", "text": _MARK}
        given: tuple[list[TemplateMessage], ...] = ([{"type": "image"}, words], [words])
        shown, plain = (self._try([{"role": "user", "content": parts}], True) or "" for parts in given)
        before, *rest = shown.partition(_MARK)
        start, *same = plain.partition(_MARK)
        return before[len(start) :] if rest[0] and rest == same and before.startswith(start) else ""

    def prepare(self, item: Mapping[str, Any]) -> TemplateMessage:
        """An OpenAI message in the template's form. Reasoning is stored under every name that templates read.

        Raises PromptError for other media, and for images unless `takes_images`: templates write a marker for them, or
        nothing, or leave out the text next to them, and engines receive only the ids of the template's text.
        """
        message: TemplateMessage = {key: value for key, value in item.items() if value is not None}
        reasoning = message.get("reasoning_content", message.get("thinking", message.get("reasoning")))
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if "content" in message:
            message["content"] = self._content(message["content"])
        elif self.form.empty_content or (self.form.empty_text and not message.get("tool_calls")):
            message["content"] = self._content("")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in calls]
        elif "tool_calls" in message:
            del message["tool_calls"]  # templates test whether the key exists
        return message

    def _fitted(self) -> ChatTemplate:
        """This template with the form that it expects, or unchanged if no form works."""
        fitted = self
        user: TemplateMessage = {"role": "user", "content": _MARK}
        if _MARK not in (fitted._try([user]) or ""):
            parts = replace(self, form=MessageForm(content_parts=True))
            if _MARK in (parts._try([parts.prepare(user)]) or ""):
                fitted = parts
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": _MARK}}}
        turn: TemplateMessage = {"role": "assistant", "tool_calls": [call]}
        result: TemplateMessage = {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "r"}
        for conversation in ([user, turn, result], [user, turn]):
            for text_arguments, empty_content in product((False, True), repeat=2):
                form = replace(fitted.form, text_arguments=text_arguments, empty_content=empty_content)
                trial = replace(fitted, form=form)
                text = trial._try([trial.prepare(message) for message in conversation])
                # A mapping in Python's notation (`{'x': ...}`) means that the template expects text.
                if text is not None and repr({"x": _MARK}) not in text:
                    return trial._with_empty_text(user)
        return fitted._with_empty_text(user)

    def _with_empty_text(self, user: TemplateMessage) -> ChatTemplate:
        """This template, with an empty content in turns without words if it otherwise rejects them."""
        filled = replace(self, form=replace(self.form, empty_text=True))
        conversation = [user, {"role": "assistant"}, user]
        left_out, given = [form._try([*map(form.prepare, conversation)]) for form in (self, filled)]
        return filled if left_out is None and given is not None else self

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, add_generation_prompt: bool) -> str:
        # `Template.render` without its slow copy of the globals and its rewriting of tracebacks.
        given = dict(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.variables,
        )
        context = self.compiled.new_context({**self.compiled.environment.globals, **given}, shared=True)
        return "".join(self.compiled.root_render_func(context))

    def _try(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._render(messages, None, add_generation_prompt)
        except Exception:  # see `render`
            return None

    def _rejected_message(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, words: str) -> int | None:
        """The index of the first message with which the template raises these words."""
        for length in range(1, len(messages)):
            try:
                self._render(messages[:length], tools, True)
            except Exception as error:  # see `render`
                if _words(error) == words:
                    return length - 1
        return len(messages) - 1 if messages else None

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.form.content_parts else content
        others = {str(part.get("type")) for part in content} - {"text"}
        if others == {"image_url"} and self.takes_images:
            return [dict(part) if part["type"] == "text" else {"type": "image"} for part in content]
        if others:
            raise PromptError(
                "the prompt",
                f"a message contains {' and '.join(sorted(others))}, and only text becomes token ids (Phase "
                "2), or images "
                "where the chat template writes one placeholder for each, as Qwen-VL's",
                "leave it out of the message, or use a chat server (Phase 1)",
            )
        return list(content) if self.form.content_parts else "".join(part["text"] for part in content)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self.form.text_arguments:
            arguments = _object(arguments)
        elif self.form.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the model's text, renders its body only."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_OF_DICTS = frozenset(dir(dict))
_NO_COLLECTIONS = (str, LoopContext)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with fast paths for the common accesses: keys of dicts, methods of texts, `loop`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The sandbox tries the attribute first, and the key after an exception.
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # These are no mutable collections, so the sandbox's checks for them are not needed.
        if type(obj) in _NO_COLLECTIONS:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _environment() -> ImmutableSandboxedEnvironment:
    # The same settings, filters and globals as transformers, so that a template renders the same text.
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    if not ensure_ascii and not sort_keys and indent is None and separators is None:
        return _plain_json(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _object(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):  # models nest brackets by the thousand
        return arguments
    return found if isinstance(found, dict) else arguments
