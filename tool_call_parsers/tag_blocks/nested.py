"""Calls whose arguments are nested elements, as MiniMax M3 writes them, every tag after the marker `]<]minimax[>[`:

`<invoke name="f"><city>Oslo</city><tags><item>a</item><item>b</item></tags></invoke>`

Lists are elements named `item`. Only the schema tells the type of an element: `<x></x>` is an empty string, an
empty list or an empty object. Without a schema, text is a string, elements that are all named `item` are a list, and
others an object. Tags without the marker are data. `TagBlocks` finds the end of a value by the end tag with the
parameter's name. If the schema says that the value is a string, tags inside it are data as well.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tool_call_parsers.engine import Needles, RenderCall, Run, Step
from tool_call_parsers.schema.kinds import MAX_DEPTH, member
from tool_call_parsers.schema.values import coerce
from tool_call_parsers.tag_blocks.blocks import TagBlocks
from tool_call_parsers.tag_blocks.tags import ATTRIBUTES, CUT_HEAD, HEAD_LIMIT, Head, Mark, TagRole
from tool_call_parsers.tag_blocks.values import OpenCall, StringStream

_ELEMENT_BEGIN = re.compile(r"[^\s<>/]?+[^\s<>]*+")
_ELEMENT_HEAD = re.compile(r"([^\s<>/][^\s<>]*+)>")


@dataclass(slots=True)
class _Element:
    """An element of a value: its text, or its child elements."""

    name: str
    start: int
    text: str = ""
    children: list[_Element] = field(default_factory=list)


@dataclass(frozen=True)
class NestedTags(TagBlocks):
    """`TagBlocks` with parameters as elements that bear their names."""

    marker: str = ""
    """The text before every tag."""

    @cached_property
    def _parameter_head(self) -> re.Pattern[str]:
        return _ELEMENT_HEAD

    @cached_property
    def _call_head(self) -> re.Pattern[str]:
        return ATTRIBUTES

    @cached_property
    def _usual(self) -> re.Pattern[str] | None:
        # A value without elements. Tags with other roles begin like a parameter.
        mark, first = re.escape(self.marker), re.escape(self.marker[0])
        others = "|".join(re.escape(tag.removeprefix(f"{self.marker}<")) for tag in (*self.calls, *self.wraps))
        begin, value = rf"{mark}<(?!{others})", rf"[^{first}]*+(?>(?:(?!{mark}){first}[^{first}]*+)*)"
        after = "|".join(map(re.escape, (*self.unwraps, *self.calls, *self.wraps)))
        follows = rf"{begin}[\w.\-]++>|(?:{'|'.join(map(re.escape, self.ends))})\s*+(?:{after}|\Z)"
        return re.compile(rf"\s*+{begin}([\w.\-]++)()>({value}){mark}</\1>(?=\s*+(?:{follows}))")

    _element = cached_property(lambda self: re.compile(rf"{re.escape(self.marker)}<(/?+)([^\s<>]++)>"))

    def _head(self, run: Run, start: int, pattern: re.Pattern[str]) -> Step[Head | None]:
        if pattern is self._call_head:
            return (yield from super()._head(run, start, pattern))
        match = yield from self._match(run, pattern, start)
        if match is not None:
            return Head(match[1], match.end())
        cut = run.final and _ELEMENT_BEGIN.fullmatch(run.text[start : start + HEAD_LIMIT]) is not None
        return CUT_HEAD if cut else None

    _bare = cached_property(lambda self: Needles(*(tag.removeprefix(self.marker) for tag in self.calls)))

    def _bare_call(self, run: Run, mark: Mark) -> Step[Mark]:
        tag = yield from run.starts(mark.start, self._bare)
        return mark if tag is None else Mark(mark.start, TagRole.CALL, mark.start + len(tag))

    def _closes(self, run: Run, key: str, position: int) -> Step[int | None]:
        end = position + len(key) + 1
        return end if (yield from run.more(end)) and run.text[position:end] == f"{key}>" else None

    def _nests(self, run: Run, call: OpenCall, key: str, position: int) -> Step[bool]:
        if run.tools.is_string(call.name, key) and run.tools.declares(call.name, key):
            return False
        return (yield from self._closes(run, key, position)) is not None

    def _begins_parameter(self, run: Run, call: OpenCall, key: str, start: int, at: int, position: int) -> Step[str]:
        # Except in a string, an element is more likely part of the value.
        if not (run.tools.declares(call.name, key) and run.tools.is_string(call.name, key)):
            return ""
        return (yield from super()._begins_parameter(run, call, key, start, at, position))

    def _end_tags(self, key: str) -> tuple[str, ...]:
        return (f"{self.marker}</{key}>",)

    def _string_stream(self, run: Run, call: OpenCall, head: Head, start: int) -> Step[StringStream | None]:
        if not run.tools.declares(call.name, head.name):
            return None
        return (yield from super()._string_stream(run, call, head, start))

    def _read(self, run: Run, call: OpenCall, key: str, typed: str | None, text: str) -> Any:
        schema, root = run.tools.schema(call.name, key)
        if schema is not None and run.tools.is_string(call.name, key):
            return text
        element = self._parse(text)
        if element is None:
            call.defect = f"the elements in {key!r} are not nested"
            return text
        return self._value_of(element, schema, root)

    def _parse(self, text: str) -> _Element | None:
        """The elements of a value; None if its tags do not match, or have text between them."""
        if self.marker not in text:
            return _Element("", 0, text)
        open_elements = [_Element("", 0)]
        position = 0
        for tag in self._element.finditer(text):
            top = open_elements[-1]
            between, position = text[position : tag.start()], tag.end()
            if (not tag[1] or top.children) and between.strip():
                return None
            if not tag[1]:
                if len(open_elements) >= MAX_DEPTH:
                    return None
                open_elements.append(_Element(tag[2], tag.end()))
            elif top.name == tag[2] and len(open_elements) > 1:
                top.text = text[top.start : tag.start()]
                open_elements.pop()
                open_elements[-1].children.append(top)
            else:
                return None
        top = open_elements[-1]
        top.text = text
        return top if len(open_elements) == 1 and not (top.children and text[position:].strip()) else None

    def _value_of(self, element: _Element, schema: object, root: object) -> Any:
        """The value of an element. `_parse` bounds the depth."""
        children = element.children
        if not children:
            if not element.text.strip() and schema is not None:
                if coerce("[]", schema, root) == []:
                    return []
                if coerce("{}", schema, root) == {}:
                    return {}
            return element.text if schema is None else coerce(element.text, schema, root)
        listed = all(child.name == "item" for child in children)
        if schema is not None:
            listed = coerce("[]", schema, root) == [] and (listed or coerce("{}", schema, root) != {})
        if listed:
            items = member(schema, None, root)
            return [self._value_of(child, items, root) for child in children]
        return {child.name: self._value_of(child, member(schema, child.name, root), root) for child in children}

    def _render_call(self, call: RenderCall) -> str:
        parameters = "".join(self._render_element(key, value) for key, value in call.arguments.items())
        return self.call.format(name=call.name, parameters=parameters)

    def _render_element(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            text = "".join(self._render_element(str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            text = "".join(self._render_element("item", item) for item in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{self.marker}<{name}>{text}{self.marker}</{name}>"
