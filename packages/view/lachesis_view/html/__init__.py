"""Pages of one file, without network and scripts of others: style, conversations, and how they are written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import orjson

from lachesis.loop.outcome import in_words

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Templates:
    """The templates of a folder, which can include those next to this module. All values are escaped, and `visible`.

    What a form sends back must be as it was: `value="{{ name | e }}"` is escaped only. `filters` are further ones.
    """

    def __init__(self, folder: Path, filters: Mapping[str, Any] | None = None) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=visible,
        )
        self._environment.filters |= {
            "pretty": pretty,
            "figure": figure,
            "amount": amount,
            "brief": brief,
            "decimals": decimals,
            "tone": tone,
            "axis": reward_axis,
            "ended": ended,
            "in_words": in_words,
            "settings": settings_in_words,
            "changed": changed_settings,
            "used": used_settings,
            **(filters or {}),
        }

    def page(self, name: str, /, **values: Any) -> str:
        """What a template makes of the values."""
        return self._environment.get_template(name).render(values)

    def part(self, name: str, macro: str, *values: Any) -> str:
        """What a macro of a template makes of the values."""
        return str(getattr(self._environment.get_template(name).module, macro)(*values))


def write_page(path: Path, html: str) -> None:
    """Write a page, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    # Models write halves of surrogate pairs, which have no UTF-8.
    temporary.write_text(html, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def pretty(value: Any) -> str:
    """JSON, or text that is JSON, indented; everything else as it is."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, str) and not isinstance(content, dict | list):
            return value
        if isinstance(content, dict):
            if len(content) == 1 and isinstance(text := content.get("code", content.get("command")), str):
                return text
            if set(content) == {"output", "exit_code", "error"} and isinstance(content["output"], str):
                return _terminal(content)
        return _indented(content)
    except (ValueError, RecursionError):  # models nest brackets by the thousand
        with suppress(RecursionError):
            return str(value)
        return "(nested too deeply to be shown)"


def settings_in_words(settings: Mapping[str, Any], depth: int = 4) -> dict[str, str]:
    """Settings for people, by name: one that holds others is one for each of these, down to a `depth` from which on it
    is JSON. What is not set is left out, but not an empty list: null may stand for everything there."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        parts = dict(enumerate(value)) if isinstance(value, list) and not all(map(_is_plain, value)) else value
        if isinstance(parts, Mapping) and depth:
            found |= settings_in_words({f"{name}.{part}": each for part, each in parts.items()}, depth - 1)
        elif isinstance(parts, Mapping):
            found[name] = pretty(value)
        elif text := ", ".join(map(_setting, parts)) or "none" if isinstance(parts, list) else _setting(parts):
            found[name] = text
    return found


_FACTS = ("environment", "model", "evaluation", "model_file", "template_report", "tokenizer")
"""What a manifest has among the settings, and pages say elsewhere."""


@cache
def _defaults() -> dict[str, str]:
    from lachesis.settings.server_settings import ServerConfig  # late: most pages show no settings
    from lachesis.settings.settings import HermesAgentEnvConfig

    of_server = {f"openai.{name}": [value] for name, value in ServerConfig().model_dump(mode="json").items()}
    return settings_in_words(HermesAgentEnvConfig().model_dump(mode="json") | of_server)


def changed_settings(settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The settings of a run of an environment that differ from the defaults, as name, value and default, and the
    environment's own, whose defaults are not recorded; none of other runs, as those of a trainer."""
    if "max_agent_turns" not in settings:
        return []
    defaults, found = _defaults(), settings_in_words(settings)
    evaluated = ("group_size",) if settings.get("evaluation") else ()  # always 1: nobody chose it
    own = {name for name in settings if name not in (*_FACTS, *evaluated)}
    return [
        (name, value, defaults.get(name, ""))
        for name, value in sorted(found.items())
        if (name in own or name.partition(".")[0] in own) and defaults.get(name) != value and value != "none"
    ]


def used_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without a tokenizer that stands there by default, and that the run did not load."""
    loaded = settings.get("tokenizer")
    named = loaded.get("name") if isinstance(loaded, Mapping) else None
    idle = "tokenizer_name" in settings and settings["tokenizer_name"] != named
    if idle and "max_agent_turns" in settings and _defaults()["tokenizer_name"] == settings["tokenizer_name"]:
        return {name: value for name, value in settings.items() if name != "tokenizer_name"}
    return dict(settings)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Mapping | list)


def _setting(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def visible(value: Any) -> Any:
    """A text with escapes, as `\\u{202e}`, for control characters and those that reverse the text around them.

    Line ends, tabs and joiners, as in emoji and Persian, are kept. A value that is not text, or is finished markup, is
    returned unchanged.
    """
    if type(value) is not str or not _HIDDEN.search(value):
        return value
    return _HIDDEN.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", value.replace("\r\n", "\n"))


def figure(value: Any) -> str:
    """A number for people: its whole digits, and at least four. What is none is shown as it is, if short."""
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)[:100]
    if abs(value) < 1e15 and (abs(value) >= 1000 or value == int(value)):
        return f"{round(value):,}"
    return f"{value if isinstance(value, float) else Decimal(value):.4g}"  # JSON has numbers that no float holds


def decimals(value: float, digits: int = 2, sign: str = "") -> str:
    """A number with a true minus; what rounds to 0 has no sign."""
    text = f"{value:{sign}.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else text.lstrip("+-")


def brief(value: float) -> str:
    """A reward in a small cell. What is not whole never reads as if it were: 0.996 is <1."""
    if abs(value) >= 10 or value == int(value):
        return figure(value)
    short = f"{value:.2g}"
    rounded = float(short)
    return short if rounded != int(rounded) else f"{'<' if value < rounded else '>'}{rounded:.0f}"


def reward_axis(rewards: Iterable[float | None]) -> tuple[float, float]:
    """On which rewards are drawn and coloured: from 0 to 1, or further out."""
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    return min([0.0, *known]), max([1.0, *known])


def tone(reward: float | None, axis: tuple[float, float]) -> str:
    """The class of the colour of a reward, on all pages: eleven steps from the low to the high end of an axis."""
    if reward is None:
        return "none"
    share = (reward - axis[0]) / (axis[1] - axis[0])
    return f"r{int(10 * min(max(0.0, share), 1.0))}"


def ended(outcome: str) -> str:
    """The class of the colour of an outcome: it came to its end, something broke, or it was cut off."""
    return "done" if outcome == "completed" else "broke" if outcome in ("infra_error", "model_error") else "cut"


def amount(value: float) -> str:
    """A count for people: its digits up to 99,999, then thousands and millions."""
    if value < 100_000:
        return f"{value:,.0f}"
    return f"{value / 1e3:.0f} k" if value < 1e6 else f"{value / 1e6:,.1f} M"


def _indented(content: Any) -> str:
    """json writes with an indent in Python, which leaves a cycle of closures for each of a report's 100,000 values."""
    with suppress(orjson.JSONEncodeError):  # numbers over 64 bits, halves of surrogate pairs
        written = orjson.dumps(content, option=orjson.OPT_INDENT_2, default=str)
        if b"null" not in written:  # which may be NaN
            return written.decode()
    return json.dumps(content, indent=2, ensure_ascii=False, default=str)


def _terminal(result: Mapping[str, Any]) -> str:
    """The output of a command as a terminal shows it, and its exit code if that is not 0."""
    notes = [f"exit code {result['exit_code']}"] if result["exit_code"] else []
    notes += [str(result["error"])] if result["error"] else []
    ending = f"[{'; '.join(notes)}]" if notes else "" if result["output"] else "[no output]"
    return "\n".join(part for part in (result["output"].rstrip("\n"), ending) if part)
