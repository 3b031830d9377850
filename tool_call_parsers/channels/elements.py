"""Nested elements in control tokens: Kimi K3."""

from __future__ import annotations

import json
import re

from tool_call_parsers.arguments import ArgumentsText, ArgumentsWatch, FoundArguments, plain_name, read_arguments
from tool_call_parsers.channels.element_arguments import ElementArguments
from tool_call_parsers.channels.element_tags import (
    CLOSE,
    CONTROL,
    OPEN,
    SEP,
    TAGS,
    Tag,
    closing,
    escape,
    read_tag,
    type_of,
    written,
)
from tool_call_parsers.channels.messages import HEADER_WIDTH, Channel, ChannelGrammar, MessageHeader
from tool_call_parsers.engine import Needles, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import skip_repeated
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals.strict import read_whole_json
from tool_call_parsers.schema.values import coerce
from tool_call_parsers.types import CALLABLE, CallStatus

_CHANNELS = {
    "think": Channel.REASONING,
    "response": Channel.PREAMBLE,
    "tools": Channel.CALL,
    "call": Channel.CALL,
    "message": Channel.NONE,
}


_ARGUMENT_CLOSE = closing("argument")
_ARGUMENT_END = Needles(closing("argument"))
_CLOSE_CALL = Needles(closing("call"))
_TOOLS_END = Needles(closing("tools"))
_JSON_END = Needles(closing("json"), closing("call"))
_AFTER_ARGUMENT = Needles(
    closing("argument"),
    *(f"{OPEN}{name}" for name in ("argument", "json", "call")),
    *(f"{CLOSE}{name}" for name in ("call", "tools", "message")),
)
_CALL_END = Needles(*map(closing, ("call", "tools", "message")), f"{OPEN}call ")
_ENDS_OF_CALL = (("call", True), ("call", False), ("tools", True), ("message", True))
_AFTER_CALL = (("call", False), ("tools", True), ("message", True))
_LOOK_BACK = 96
"""Room for a damaged closing tag."""
_BAR = r"(?:< ?\| ?\w{2,6} ?\|? ?>?|\|\w{2,6}\|>|</?(?:open|close|sep)>)"
_DAMAGED_END = re.compile(
    rf"(?:(?:{_BAR}\s*){{1,3}}/?[A-Za-z]{{0,12}}(?:\s*{_BAR}){{0,3}}|(?:argument|call)\s*{_BAR}|</?(?:argument|call)>)[\]>]?\s*\Z"
)
_LOST_ARGUMENT = re.compile(rf"\s*(?:{_BAR}\s*){{0,2}}argument key=\"")
"""The tag of an argument whose control token is damaged or lost."""
_DAMAGED_CALL = re.compile(rf"(?:{_BAR}\s*){{0,2}}call\s+tool\s*=\s*\"?([\w.\-]{{1,64}})")
_CONTROL_TAIL = re.compile(r"(?:<?\|?(?:open|close)\|>[a-z]{0,12}|<\|sep\|>|\s)+\Z")
_CONTROL_HEAD = re.compile(r"(?:\s*<\|sep\|>)+")
_CUT_TAG = re.compile(r"""([\w\-]*)((?:\s+[\w\-]+(?:=(?:"[^"]*(?:"|$))?)?)*\s*)""")


class Elements(ChannelGrammar):
    """Elements in control tokens, `<|open|>NAME key="value"<|sep|>..<|close|>NAME<|sep|>`: Kimi K3.

    An argument's `type` defines how it is written: a string verbatim, other values as JSON. A closing tag ends an
    argument if a tag follows it; elsewhere it is part of the value.
    """

    openers = (OPEN,)
    closers = tuple(map(closing, _CHANNELS))

    def closers_of(self, channel: Channel) -> tuple[str, ...]:
        return tuple(closing(name) for name, own in _CHANNELS.items() if own is channel)

    # -- reading ------------------------------------------------------------------------------------------------------

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[MessageHeader | None]:
        tag = yield from read_tag(run, start)
        if tag is not None:
            channel = None if tag.closing else _CHANNELS.get(tag.name)
            return MessageHeader(start, tag.end, channel) if channel is not None else None
        name = self._cut_name(run, start)
        if name is None:
            return None
        return MessageHeader(start, len(run.text), _CHANNELS.get(name, Channel.NONE), cut=True)

    def _cut_name(self, run: Run, start: int) -> str | None:
        """The name of an opening tag, or the beginning of one, if the text ends inside the tag."""
        body = start + len(OPEN)
        if not run.final or not run.text.startswith(OPEN, start) or len(run.text) - body >= HEADER_WIDTH:
            return None
        cut = _CUT_TAG.fullmatch(run.text, body, CONTROL.unsettled(run.text, body))
        if cut is None or CONTROL.pattern.search(run.text, body) is not None:
            return None
        whole = bool(cut[2])  # otherwise the name itself may be cut
        names = (name for name in _CHANNELS if name == cut[1] or (not whole and name.startswith(cut[1])))
        return cut[1] if next(names, None) is not None else None

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        begin = header.start
        tag = yield from read_tag(run, begin)
        assert tag is not None  # a header is a tag
        position, begun = tag.end, tag.name == "call"
        if begun:
            begin = position = yield from self._call(run, begin, tag, "no tools element")
        note = None
        while True:
            position = yield from run.skip_space(position)
            tag = yield from read_tag(run, position)
            lost = tag is None or (tag.closing and bool(tag.attributes))
            if lost and begun and (end := (yield from self._damaged_call(run, position))) is not None:
                begin = position = end
                continue
            if tag is None:
                if not begun and (
                    position == len(run.text)
                    or TAGS.begins(run.text, position)
                    or self._cut_name(run, position) is not None
                ):
                    return cut_off(run, begin, ())
                return begin if begun else None
            if tag.name == "call" and not tag.closing:
                begin = position = yield from self._call(run, begin, tag, note)
                begun, note = True, None
            elif tag.name == "tools" and not tag.closing and not begun:
                position, note = tag.end, "the tools element is opened twice"
            elif begun and tag.name == "tools" and tag.closing:
                if run.follows_markup(position):
                    end, _ = yield from skip_repeated(run, tag.end, _TOOLS_END)
                    run.skip(end)
                    return end
                return begin
            else:
                return begin if begun else None

    def _call(self, run: Run, begin: int, tag: Tag, note: str | None) -> Step[int]:
        """Read a call that begins at `begin`, after its opening tag. Return its end. `note`: a defect before it."""
        run.begin_block(begin)
        run.to_content()
        written = tag.attributes.get("tool", "").strip()
        name = plain_name(written, run.tools) or written
        if name:
            run.start_call(name)
        read = ElementArguments(run, name, ArgumentsText(run, run.started))
        if note is not None:
            read.fail(CallStatus.REPAIRED, note)
        if run.text[max(0, begin - _LOOK_BACK) : begin].rstrip().endswith((OPEN, CLOSE)):
            read.fail(CallStatus.REPAIRED, "a control token twice")
        if name != written:
            read.fail(CallStatus.REPAIRED, f"the name is written {written!r}")
        if "index" not in tag.attributes:
            read.fail(CallStatus.REPAIRED, "the call has no index")
        body = position = tag.end
        while True:
            end = position = yield from run.skip_space(position)
            following = yield from read_tag(run, position)
            if following is None or following.name not in ("argument", "json") or following.closing:
                break
            element = self._argument if following.name == "argument" else self._json
            position = yield from element(run, following, read)
            if read.status is CallStatus.INCOMPLETE:
                end = position
                break
        raw = run.text[body:end].strip() if read.whole is None else read.whole
        if read.status is not CallStatus.INCOMPLETE and (
            following is None or (following.name, following.closing) not in _ENDS_OF_CALL
        ):
            if following is None and self._ends_in_tag(run, end):
                read.fail(CallStatus.INCOMPLETE, "the text ends inside the call")
                end = len(run.text)
            else:
                read.fail(CallStatus.MALFORMED, "text between the arguments")
                stop = yield from run.find(_CALL_END, end)
                end = len(run.text) if stop is None else stop.start()
                following = (yield from read_tag(run, end)) if stop is not None else None
        if following is not None and following.name == "call" and following.closing:
            end, again = yield from skip_repeated(run, following.end, _CLOSE_CALL)
            if again:
                read.fail(CallStatus.REPAIRED, "the call is closed twice")
        elif following is not None:
            read.fail(CallStatus.REPAIRED, "the call is not closed")
        yield from self._after_call(run, end, read)
        if not name and read.status in CALLABLE:
            read.fail(CallStatus.MISSING_NAME, "the call names no tool")
        run.end_call(begin, end, read.status, name, read.values, raw, error=read.error, json_text=read.json_text())
        return end

    def _damaged_call(self, run: Run, position: int) -> Step[int | None]:
        """The end of a call at `position` whose opening tag is damaged."""
        yield from run.more(position + _LOOK_BACK)
        match = _DAMAGED_CALL.match(run.text, position)
        if match is None:
            return None
        stop = yield from run.find(_CALL_END, match.end())
        end = len(run.text) if stop is None else stop.end() if stop.group() == closing("call") else stop.start()
        run.begin_block(position)
        run.end_call(position, end, CallStatus.MALFORMED, match[1], error="the tag of the call is damaged")
        return end

    def _after_call(self, run: Run, end: int, read: ElementArguments) -> Step[None]:
        """Note what is wrong with the end of the tools element, if a call is the last one."""
        position = yield from run.skip_space(end)
        following = yield from read_tag(run, position)
        if following is None or (following.name, following.closing) not in (("call", False), ("tools", True)):
            read.fail(CallStatus.REPAIRED, "the tools element is not closed")
        elif following.closing and (yield from skip_repeated(run, following.end, _TOOLS_END))[1]:
            read.fail(CallStatus.REPAIRED, "the tools element is closed twice")

    def _ends_in_tag(self, run: Run, position: int) -> bool:
        """Whether the text ends at `position`, or in a tag that begins there."""
        if position == len(run.text) or TAGS.begins(run.text, position):
            return True
        token = TAGS.pattern.match(run.text, position)
        return run.final and token is not None and CONTROL.pattern.search(run.text, token.end()) is None

    def _argument(self, run: Run, tag: Tag, read: ElementArguments) -> Step[int]:
        """Read an argument after its opening tag. Return its end.

        A closing tag ends the value before another tag, damaged or not, and so does the tag of the next argument. The
        value neither begins nor ends in markup.
        """
        key, kind = tag.attributes.get("key", ""), tag.attributes.get("type")
        is_string = kind == "string" or (kind is None and run.tools.is_string(read.name, key))
        if read.whole is not None:
            read.fail(CallStatus.MALFORMED, "arguments twice")
        read.streamed.member(key, '"' if is_string else "")
        sent = position = tag.end
        while True:
            after = _AFTER_ARGUMENT.pattern.search(run.text, position)
            if after is None:
                position = _AFTER_ARGUMENT.unsettled(run.text, position)
                if is_string:
                    closing = _ARGUMENT_END.pattern.search(run.text, max(sent, position - _LOOK_BACK))
                    certain = closing.start() if closing is not None else _ARGUMENT_END.unsettled(run.text, sent)
                    if (certain := min(certain, position)) > sent:
                        read.streamed.characters(run.text[sent:certain])
                        sent = certain
                if not run.final:
                    yield
                    continue
                if not run.text[tag.end :].rstrip().endswith(_ARGUMENT_CLOSE):
                    read.fail(CallStatus.INCOMPLETE, f"the text ends inside the argument {key!r}")
                    return len(run.text)
                end = len(run.text)
            else:
                end = after.start()
                if after.group() == _ARGUMENT_CLOSE:
                    position = after.end()
                    following = yield from run.skip_space(position)
                    if following == len(run.text) or (yield from run.starts(following, _AFTER_ARGUMENT)) is not None:
                        continue
                    yield from run.more(following + _LOOK_BACK)
                    if _LOST_ARGUMENT.match(run.text, position) is None:
                        continue
                    stop, end = end, position
                    break
            found = yield from self._end_of_value(run, tag.end, end, only_closed=after is None)
            if found is not None:
                stop = found
                break
            assert after is not None
            position = after.end()
        text = run.text[tag.end : stop]
        whole = text
        if "<|" in text or text.rstrip().endswith("|>"):
            tail = _CONTROL_TAIL.search(text, max(0, len(text) - _LOOK_BACK))
            if tail is not None and not tail.group().isspace():
                text = text[: tail.start()]
            if (begin := _CONTROL_HEAD.match(text)) is not None:
                text = text[begin.end() :]
        if text != whole or run.text[stop:end].strip() != _ARGUMENT_CLOSE:
            read.fail(CallStatus.REPAIRED, f"the tags of the argument {key!r} are damaged")
        if kind is None:
            read.fail(CallStatus.REPAIRED, f"the argument {key!r} has no type")
        if is_string:
            read.streamed.characters(run.text[sent:stop])
            read.end(key, text, '"')
        else:
            self._typed(read, key, kind, text)
        if not key:
            read.fail(CallStatus.MALFORMED, "an argument without a key")
        return end

    def _end_of_value(self, run: Run, start: int, end: int, *, only_closed: bool) -> Step[int | None]:
        """Where the value ends whose tags end before the tag at `end`; None if that tag is part of the value."""
        if run.text.endswith(_ARGUMENT_CLOSE, start, end):
            return end - len(_ARGUMENT_CLOSE)
        low = max(start, end - HEADER_WIDTH)
        stop = low + len(run.text[low:end].rstrip())
        if run.text.endswith(_ARGUMENT_CLOSE, start, stop):
            return stop - len(_ARGUMENT_CLOSE)
        if only_closed:
            return None
        following = yield from read_tag(run, end)
        if following is None:
            return None
        if following.closing:
            # It may be the wrong tag of the argument, with the next argument behind it, or part of the value.
            position = yield from run.skip_space(following.end)
            another = yield from read_tag(run, position)
            over = position == len(run.text) or (another is not None and (another.name, another.closing) in _AFTER_CALL)
            if not over and (another is not None or (yield from run.starts(position, run.markers.all)) is None):
                return None
        elif not following.attributes and following.name != "json":
            return None
        damaged = _DAMAGED_END.search(run.text, max(start, stop - _LOOK_BACK), stop)
        return damaged.start() if damaged is not None else end

    def _typed(self, read: ElementArguments, key: str, kind: str | None, text: str) -> None:
        """Read an argument that is not a string."""
        tools, bare = read.run.tools, text.strip()
        if kind is None:
            value = tools.coerce(read.name, key, text)
        else:
            literal = read_whole_json(bare)
            if literal is not None:
                read.end(key, literal.value, bare)
                return
            value = coerce(text, {"type": kind})
            if isinstance(value, str):
                value = tools.coerce(read.name, key, text)
            read.fail(CallStatus.REPAIRED, f"the argument {key!r} is not written as {kind}")
        read.end(key, value, json.dumps(value, ensure_ascii=False) if read.run.started else "")

    def _json(self, run: Run, tag: Tag, read: ElementArguments) -> Step[int]:
        """Read all arguments as one JSON object after its opening tag. Return its end."""
        position = yield from run.skip_space(tag.end)
        if read.values or read.whole is not None:
            read.fail(CallStatus.MALFORMED, "arguments twice")
        if position == len(run.text):
            read.fail(CallStatus.INCOMPLETE, "the text ends before the arguments")
            return position
        if run.text[position] not in "{[":
            read.fail(CallStatus.INVALID_JSON, "the arguments are not JSON")
            stop = yield from run.find(_JSON_END, position)
            end = len(run.text) if stop is None else stop.start()
        else:
            watch = ArgumentsWatch(run, position) if read.status is CallStatus.OK else None
            value = yield from read_value(run, position, _JSON_END, watch)
            read.whole, end = run.text[position : value.end], value.end
            found = FoundArguments(value.status, {}, read.whole, value.error)
            if value.status in CALLABLE:
                found = read_arguments(value.value, read.whole)
                read.values = found.value
            if found.status is not CallStatus.OK or value.error:
                read.fail(
                    value.status if found.status is CallStatus.OK else found.status,
                    found.error or value.error or "the arguments are not an object",
                )
        end = yield from run.skip_space(end)
        closer = yield from run.starts(end, _JSON_END)
        return end + len(closer) if closer == closing("json") else end

    # -- writing ------------------------------------------------------------------------------------------------------

    def _element(self, head: str, body: str) -> str:
        return f"{OPEN}{head}{SEP}{body}{CLOSE}{head.split(' ', 1)[0]}{SEP}"

    def render(self, turn: RenderTurn) -> str:
        parts = []
        if turn.reasoning is not None:
            parts.append(self._element("think", turn.reasoning))
        if turn.content:
            parts.append(self._element("response", turn.content))
        if turn.calls:
            calls = []
            for index, call in enumerate(turn.calls, 1):
                arguments = (
                    self._element(f'argument key="{escape(key)}" type="{type_of(value)}"', written(value))
                    for key, value in call.arguments.items()
                )
                calls.append(self._element(f'call tool="{escape(call.name)}" index="{index}"', "".join(arguments)))
            parts.append(self._element("tools", "".join(calls)))
        return "".join(parts)
