"""Reads a JSON object as a call, whatever the text around it.

Models misspell keys, put arguments beside the name, repeat a member, forget a brace. If only one call can be
meant, the object is that call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from tool_call_parsers.arguments import FoundArguments, no_arguments, plain_name, read_arguments
from tool_call_parsers.engine import SPACE, BlockGrammar, Needles, Run, Step
from tool_call_parsers.json_scan import MANY_REJECTIONS, JsonMember, JsonScan, JsonValue, read_damaged, read_value
from tool_call_parsers.literals.literal import MAX_DEPTH, LiteralError
from tool_call_parsers.literals.strict import read_json
from tool_call_parsers.types import CallStatus

_CLOSING_BRACE = re.compile(r"[ \t\r\n]*\}")
_BESIDES = frozenset({"id", "type", "tool_call_id", "index"})
"""Members of a call object besides its name and arguments."""
LAX_NAMES = ("name", "tool_name", "function", "tool", "function_name", "action")
LAX_ARGUMENTS = (
    *("arguments", "parameters", "args", "input", "params", "kwargs"),
    *("tool_args", "tool_input", "tool_arguments", "tool_parameters", "function_args", "action_input"),
)


class ReadCall(NamedTuple):
    """A call object as read."""

    status: CallStatus
    start: int
    end: int
    name: str = ""
    arguments: dict[str, Any] | None = None
    raw: str = ""
    error: str | None = None
    native_id: str | None = None


class CallObjects(BlockGrammar):
    """Reads call objects. A subclass defines their spelling, and reads the text around them."""

    # Fields of `JsonBlocks`, which describes them.
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    name_key: str
    argument_keys: tuple[str, ...]
    id_key: str | None
    single_key: bool
    bare_offered: bool
    written: str

    _ends = cached_property(lambda self: Needles(*self.opens, *self.closes))

    @cached_property
    def _first_keys(self) -> Needles:
        """The first key of an object without a marker, if it is a call."""
        return Needles(*(f'"{key}"' for key in (self.name_key, *self.argument_keys, "id", "type", "function")))

    @cached_property
    def _usual(self) -> re.Pattern[str]:
        """The usual beginning of a call, up to its arguments."""
        blank, word = r"[ \t\r\n]*", r'[^"\\\s\x00-\x1f]+'
        if self.single_key:
            return re.compile(rf'\{{{blank}"(?P<name>{word})"(?P<id>){blank}:{blank}(?=\{{)')
        native = "(?P<id>)"
        if self.id_key:
            native = rf'(?:"{re.escape(self.id_key)}"{blank}:{blank}"(?P<id>{word})"{blank},{blank})'
            native += "" if self._writes_id else "?"
        name = rf'"{re.escape(self.name_key)}"{blank}:{blank}"(?P<name>{word})"'
        key = re.escape(self.argument_keys[0])
        return re.compile(rf'\{{{blank}{native}{name}{blank},{blank}"{key}"{blank}:{blank}(?=\{{)')

    _writes_id = cached_property(lambda self: bool(self.id_key) and f'"{self.id_key}"' in self.written)
    """Whether the model writes an id in every call."""

    def _object(self, run: Run, position: int, bare: bool, begin: int | None) -> Step[ReadCall | None]:
        """The call object at `position`; None if a bare one is not a call. `begin`: of a block that has not begun."""
        if (
            not run.streams
            and run.rejections < MANY_REJECTIONS
            and (match := self._usual.match(run.text, position)) is not None
        ):
            try:
                literal = read_json(run.text, match.end())
                closing = _CLOSING_BRACE.match(run.text, literal.end)
                unoffered = bare and self.bare_offered and match["name"] not in run.tools.names()
                # The enclosing object adds a level, which may be one too many.
                brackets = run.text.count("{", match.end(), literal.end) + run.text.count("[", match.end(), literal.end)
                flawless = not literal.notes and plain_name(match["name"], run.tools) is None
                if closing is not None and not unoffered and flawless and brackets < MAX_DEPTH:
                    raw = run.text[match.end() : literal.end]
                    name, native = match["name"], match["id"] or None
                    return ReadCall(CallStatus.OK, position, closing.end(), name, literal.value, raw, native_id=native)
            except LiteralError:
                run.rejections += 1
        if bare:
            key = yield from run.skip_space(position + 1)
            if (yield from run.starts(key, self._first_keys)) is None:
                return None
        watch = _Watch(run, self, begin, bare) if run.streams else None
        read = yield from read_value(run, position, None if bare else self._ends, watch)
        if read.scan is None:
            scan = JsonScan(position)
            scan.advance(run.text)
            read = replace(read, scan=scan)
        if bare and not self._is_call(run, read):
            if read.status is not CallStatus.OK:
                run.strayed += read.end - read.start
            return None
        return self._classify(run, read)

    def _is_call(self, run: Run, read: JsonValue) -> bool:
        """Whether an object without a marker is clearly a call, with a name and arguments."""
        keys, name = read.scan.members.keys() if read.scan is not None else (), self._scanned_name(run, read.scan)
        if isinstance(read.value, dict):
            members = read.value
            if isinstance(inner := members.get("function"), dict) and self.name_key not in members:
                members = inner
            keys, name = members.keys(), name or members.get(self.name_key)
            given = next((members[key] for key in LAX_ARGUMENTS if key in members), None)
            if isinstance(given, dict) and "properties" in given and "type" in given:
                return False  # the definition of a tool
        if not isinstance(name, str):
            return False
        if any(key in keys for key in self.argument_keys):
            return name in run.tools.names() if self.bare_offered else True
        return name in run.tools.names() and any(key in keys for key in LAX_ARGUMENTS)

    def _classify(self, run: Run, read: JsonValue) -> ReadCall:
        """The object as a call with a status."""
        if read.status is CallStatus.INCOMPLETE:
            return self._cut_call(run, read)
        if read.status is CallStatus.INVALID_JSON:
            if read.scan is not None and (repaired := self._repair(run, read, read.scan)) is not None:
                return repaired
            name = self._scanned_name(run, read.scan) or ""
            native = self._scanned_id(run, read.scan)
            return ReadCall(read.status, read.start, read.end, name, error=read.error, native_id=native)
        scan = read.scan
        assert scan is not None
        notes = [read.error] if read.error else []
        value: dict[str, Any] = read.value
        if scan.doubles:
            value, doubled = self._first_members(run, value, scan)
            notes += [f"{key!r} comes twice" for key in doubled]
        if isinstance(inner := value.get("function"), dict) and self.name_key not in value:
            value, scan = {**value, **inner}, JsonScan(read.start)
            notes.append("an object under 'function'")
        name_key, key = self._keys(value, notes)
        named: object = name_key if name_key == key else value.get(name_key)
        if not isinstance(named, str) or not named.strip():
            native = self._scanned_id(run, read.scan)
            error = "the call names no tool"
            return ReadCall(CallStatus.MISSING_NAME, read.start, read.end, error=error, native_id=native)
        name = self._plain(run, named, notes)
        if key is None:
            flat = {k: v for k, v in value.items() if k not in _BESIDES and k not in (name_key, self.name_key)}
            if flat and not any(run.tools.declares(name, k) for k in flat):
                key = self._misspelt(run, name, flat)
                if key is None and any(isinstance(member, dict) for member in flat.values()):
                    error = f"no arguments under {self.argument_keys[0]!r}"
                    return ReadCall(CallStatus.MALFORMED, read.start, read.end, name, error=error)
                if key is not None:
                    notes.append(f"{key!r} instead of {self.argument_keys[0]!r}")
        if key is None:
            arguments = no_arguments("nothing")
            if not flat and run.tools.required(name):
                return ReadCall(CallStatus.MALFORMED, read.start, read.end, name, error="the call has no arguments")
            if flat:
                notes.append("arguments beside the name")
                arguments = FoundArguments(CallStatus.OK, flat, json.dumps(flat, ensure_ascii=False))
            else:
                notes.append(arguments.error or "")
        else:
            member = scan.members.get(key)
            raw = run.text[member.start : member.end] if member is not None and member.end is not None else ""
            if not raw and isinstance(value[key], dict):
                raw = json.dumps(value[key], ensure_ascii=False)
            arguments = read_arguments(value[key], raw)
            if arguments.error:
                notes.append(arguments.error)
            others = (own for own in value if own not in (name_key, key, self.id_key) and own != "function")
            if (other := next(others, None)) is not None:
                notes.append(f"a member {other!r} besides")
        native = value.get(self.id_key) if self.id_key else None
        if native is None and self._writes_id:
            notes.append(f"no {self.id_key!r}")
        status = CallStatus.REPAIRED if arguments.status is CallStatus.OK and notes else arguments.status
        return ReadCall(
            status,
            read.start,
            read.end,
            name,
            arguments.value,
            arguments.raw,
            "; ".join(notes) or None,
            str(native) if type(native) in (str, int) else None,
        )

    def _plain(self, run: Run, named: str, notes: list[str]) -> str:
        """The tool that is named."""
        name = named.strip()
        if name != named:
            notes.append("blanks around the name")
        if (plain := plain_name(name, run.tools)) is not None:
            notes.append(f"the name is written {name!r}")
            return plain
        return name

    def _misspelt(self, run: Run, name: str, members: Mapping[str, Any]) -> str | None:
        """The only member that holds parameters of the tool, whatever its key."""
        if len(members) != 1:
            return None
        ((key, inner),) = members.items()
        fits = isinstance(inner, dict) and inner and all(run.tools.declares(name, own) for own in inner)
        return key if fits else None

    def _repair(self, run: Run, read: JsonValue, scan: JsonScan) -> ReadCall | None:
        """A call whose complete arguments are repeated after themselves, or whose last brace is missing in a list; None
        if the call is broken in another way."""
        name = self._scanned_name(run, scan)
        member = self._scanned_arguments(scan)
        if not name or member is None or member.end is None or run.text[member.start] != "{":
            return None
        raw = run.text[member.start : member.end]
        position = member.end
        while position + len(raw) <= read.end and run.text.startswith(raw, position):
            position += len(raw)
        after = SPACE.match(run.text, position).end()  # type: ignore[union-attr]  # matches anywhere
        if after > read.end:
            return None
        if position > member.end and after < read.end and run.text[after] == "}":
            end, error = after + 1, "the arguments are repeated"
        elif position == member.end and run.text.startswith("]", after):
            end, error = position, "a closing brace is missing"
        else:
            return None
        try:
            arguments = read_json(raw).value
        except LiteralError:
            return None
        native = self._scanned_id(run, scan)
        return ReadCall(CallStatus.REPAIRED, read.start, end, name, arguments, raw, error, native)

    def _keys(self, value: Mapping[str, Any], notes: list[str]) -> tuple[str, str | None]:
        """The key of the name and the key of the arguments. Both are the same if the key is the name."""
        if self.single_key and len(value) == 1:
            (only,) = value
            return only, only
        name_key: str = self.name_key
        if name_key not in value:
            name_key = next((lax for lax in LAX_NAMES if isinstance(value.get(lax), str)), name_key)
        if name_key != self.name_key and name_key in value:
            notes.append(f"{name_key!r} instead of {self.name_key!r}")
        elif self.single_key:
            notes.append("name and arguments as members")
        key = next((own for own in value if own in self.argument_keys), None)
        if key is None:
            key = next((lax for lax in LAX_ARGUMENTS if lax in value and lax != name_key), None)
        if key not in (None, self.argument_keys[0]):
            notes.append(f"{key!r} instead of {self.argument_keys[0]!r}")
        return name_key, key

    def _first_members(self, run: Run, value: Mapping[str, Any], scan: JsonScan) -> tuple[dict[str, Any], list[str]]:
        """The first of repeated names or arguments counts, because a stream has sent it already."""
        first, doubled = dict(value), []
        keys = (self.name_key, *self.argument_keys, *((self.id_key,) if self.id_key else ()))
        for key in scan.members:
            member = scan.members[key]
            if key in scan.doubles and member.end is not None and (key in keys or self.single_key):
                try:
                    first[key] = read_damaged(run.text, member.start, member.end).value
                except LiteralError:
                    continue
                doubled.append(key)
        return first, doubled

    def _scanned_name(self, run: Run, scan: JsonScan | None) -> str | None:
        """The name, if the scan has read it completely."""
        if scan is not None and self.single_key:
            name = next(iter(scan.members), "").strip()
        else:
            name = (_scanned_text(run, scan, self.name_key) or "").strip()
        return (plain_name(name, run.tools) or name) if name else None

    def _scanned_id(self, run: Run, scan: JsonScan | None) -> str | None:
        """The call's native id, if the scan has read it completely."""
        return _scanned_text(run, scan, self.id_key) if self.id_key else None

    def _scanned_arguments(self, scan: JsonScan) -> JsonMember | None:
        """The first member with arguments, as far as the scan has read it."""
        keys = scan.members if self.single_key else self.argument_keys
        return next((scan.members[key] for key in scan.members if key in keys), None)

    def _cut_call(self, run: Run, read: JsonValue) -> ReadCall:
        """An object that the end of the text cuts off. It is a call if only its closing brace is missing."""
        scan, name = read.scan, self._scanned_name(run, read.scan)
        native = self._scanned_id(run, scan)
        if scan is not None and name and scan.depth == 1:
            keys = (next(iter(scan.members)),) if self.single_key else self.argument_keys
            member = next((scan.members[key] for key in keys if key in scan.members), None)
            if member is not None and member.end is not None and run.text[member.start] == "{":
                raw = run.text[member.start : member.end]
                try:
                    value = read_json(raw).value
                    error = "the closing brace is missing"
                    return ReadCall(CallStatus.REPAIRED, read.start, read.end, name, value, raw, error, native)
                except LiteralError:
                    pass
        return ReadCall(CallStatus.INCOMPLETE, read.start, read.end, name or "", error=read.error, native_id=native)


def _scanned_text(run: Run, scan: JsonScan | None, key: str) -> str | None:
    """The value of a string member, if the scan has read it completely."""
    member = scan.members.get(key) if scan is not None else None
    if member is None or member.end is None or run.text[member.start] != '"':
        return None
    try:
        return str(json.loads(run.text[member.start : member.end]))
    except ValueError:
        return None


class _Watch:
    """Sends the events of a call object while the model writes it."""

    def __init__(self, run: Run, grammar: CallObjects, begin: int | None, bare: bool) -> None:
        self.run, self.grammar, self.begin, self.bare = run, grammar, begin, bare
        self.sent: int | None = None

    def __call__(self, scan: JsonScan) -> None:
        run, grammar = self.run, self.grammar
        if self.sent is None:
            name = grammar._scanned_name(run, scan)
            member = grammar._scanned_arguments(scan)
            native = grammar._scanned_id(run, scan)
            if not name or member is None or run.text[member.start] != "{":
                return
            if grammar.id_key and not native and not self._has_no_id(scan):
                return  # the id must come first
            if self.bare and grammar.bare_offered and name not in run.tools.names():
                return
            if self.begin is not None:
                run.begin_block(self.begin, grammar.separators)
            run.start_call(name, native)
            self.sent = member.start
        member = next(m for key, m in scan.members.items() if grammar.single_key or key in grammar.argument_keys)
        end = member.end if member.end is not None else scan.position
        if end > self.sent:
            run.send_arguments(run.text[self.sent : end])
            self.sent = end

    def _has_no_id(self, scan: JsonScan) -> bool:
        """Whether the object is complete and contains no id."""
        return scan.closed and self.run.text.find(f'"{self.grammar.id_key}"', scan.start, scan.position) < 0
