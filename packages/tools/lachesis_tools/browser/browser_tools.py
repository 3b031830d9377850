"""The ten tools. Elements of a page are named by refs, such as `@e5`, of the last snapshot."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from lachesis_tools.browser.browser import Browser
from lachesis_tools.browser.program import check_browser_requirements
from lachesis_tools.dispatch import ToolResult
from lachesis_tools.text import cap_text, shortened, to_json
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

SNAPSHOT_CHARS = 20_000
"""Characters of a snapshot that a model gets; with the escapes of JSON they fit into the limit of a tool's result."""
_FIELDS = ("textbox", "searchbox", "spinbutton", "combobox")
_KEY = re.compile(
    r"((Control|Shift|Alt|Meta)\+)*([!-~]|Enter|Tab|Escape|Backspace|Delete|Insert|Space|Home|End|Page(Up|Down)|"
    r"Arrow(Up|Down|Left|Right)|F([1-9]|1[0-2]))"
)
_IMAGES = (
    "[...document.images].slice(0, 100).map(image => "
    "({src: image.src.slice(0, 500), alt: image.alt, width: image.naturalWidth, height: image.naturalHeight}))"
)
_browser = partial(
    tool,
    toolset="browser",
    time_limit=None,  # it limits its time itself
    check=check_browser_requirements,
    errors=(AttributeError, LookupError, TypeError, ValueError),
)
"""An agent with a terminal may have replaced agent-browser, and its answers: that must not end the rollout."""


@_browser()
async def browser_navigate(session: ToolSession, url: str) -> Any:
    """Open a web page in the browser. Returns its address, title and a snapshot, in which elements have refs such as
    @e5 for the other browser tools.

    Args:
        url: The address, beginning with http:// or https://.
    """
    if not url.startswith(("http://", "https://")) and url != "about:blank":  # not the files of the sandbox
        raise ToolFailure(f"{shortened(url)!r} is no address of a page: it has to begin with http:// or https://")
    _, title, page = await _run(session, ("open", url), ("eval", "document.title"), ("snapshot", "-c"))
    return _done(session, url=page["origin"], title=title["result"], **_shown(page))


@_browser()
async def browser_snapshot(session: ToolSession, full: bool = False) -> Any:
    """Get the current page as text: a tree of its elements, in which those that can be used have refs such as @e5. Refs
    change with the page, so take a snapshot after each change.

    Args:
        full: Include elements that only give the page its structure.
    """
    (page,) = await _run(session, ("snapshot",) if full else ("snapshot", "-c"))
    return _done(session, **_shown(page))


@_browser()
async def browser_click(session: ToolSession, ref: str) -> Any:
    """Click an element of the page.

    Args:
        ref: The element's ref in the snapshot, such as @e5.
    """
    ref, role, _ = await _element(session, ref)
    try:
        await _run(session, ("click", ref))
    except ToolFailure as failure:
        if role == "option" and "box model" in str(failure):
            raise ToolFailure(f"{ref} is an option of a list that is closed: type its name into the combobox") from None
        raise
    await _settled(session)
    return _done(session, clicked=ref)


@_browser()
async def browser_type(session: ToolSession, ref: str, text: str) -> Any:
    """Type text into a field of the page, in place of what it has. In a list of options (combobox, listbox) the option
    of this name is chosen.

    Args:
        ref: The field's ref in the snapshot, such as @e5.
        text: The text, or the name of an option.
    """
    ref, role, line = await _element(session, ref)
    if role == "listbox" or (
        role == "combobox" and "<option" in (await _run(session, ("get", "html", ref)))[0]["html"]
    ):
        await _run(session, ("select", ref, text))
    elif role in _FIELDS:
        await _run(session, ("fill", ref, text))
        await _check_value(session, ref, role, text)
    elif "editable" in line.partition(f"ref={ref[1:]}")[2]:
        await _run(session, ("click", ref), ("press", "Control+a"), ("keyboard", "inserttext", text))
    else:
        raise ToolFailure(f"{ref} is a {role}, which takes no text; fields for text are: {', '.join(_FIELDS)}")
    return _done(session, typed=text, element=ref)


@_browser()
async def browser_scroll(session: ToolSession, direction: Literal["up", "down"]) -> Any:
    """Scroll the page by most of a screen. Snapshots have the whole page, also without scrolling.

    Args:
        direction: Where to.
    """
    await _run(session, ("scroll", direction, "500"))
    return _done(session, scrolled=direction)


@_browser()
async def browser_back(session: ToolSession) -> Any:
    """Go back to the page before this one in the browser's history."""
    await _run(session, ("eval", "setTimeout(() => history.back())"), ("wait", "500"))
    (url,) = await _run(session, ("eval", "location.href"))
    return _done(session, url=url["result"])


@_browser()
async def browser_press(session: ToolSession, key: str) -> Any:
    """Press a key, for the element that has the focus.

    Args:
        key: A character, or a name such as Enter, Tab, Escape, Backspace, Space, ArrowDown, PageDown; Control+a.
    """
    if not _KEY.fullmatch(key):
        raise ToolFailure(
            f"{shortened(key)!r} is no key; keys are single characters and names such as Enter or ArrowUp"
        )
    await _run(session, ("press", key))
    await _settled(session)
    return _done(session, pressed=key)


@_browser()
async def browser_get_images(session: ToolSession) -> Any:
    """List the images of the page, at most 100, with their addresses, alternative texts and sizes."""
    (found,) = await _run(session, ("eval", _IMAGES))
    return _done(session, images=found["result"], count=len(found["result"]))


@_browser()
async def browser_vision(session: ToolSession, question: str, annotate: bool = False) -> Any:
    """Take a screenshot of the visible part of the page and look at it, where a snapshot is not enough.

    Args:
        question: What to find out from the picture.
        annotate: Draw the numbers of refs on the elements: 5 is @e5.
    """
    browser = session.state(Browser)
    await _run(session, ("eval", "1"))  # starts the browser; fails under a dialog, where a screenshot would wait
    await _run(session, ("screenshot", browser.screenshot), annotate=annotate)
    try:
        data = await (await session.sandbox()).read_bytes(browser.screenshot, limit=20_000_000)
    except OSError as error:
        raise ToolFailure(f"there is no screenshot: {error.strerror}") from None
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return ToolResult(to_json(_done(session, question=question)), images=(url,))


@_browser()
async def browser_console(session: ToolSession, clear: bool = False, expression: str | None = None) -> Any:
    """Read what the page has written to the console and its errors in JavaScript, or evaluate an expression in it.

    Args:
        clear: Forget the messages afterwards.
        expression: JavaScript to evaluate in the page; returns its value instead of the messages.
    """
    if expression is not None:
        (value,) = await _run(session, ("eval", expression))
        return _done(session, result=value["result"])
    said, errors = await _run(session, ("console",), ("errors",))
    if clear:
        await _run(session, ("console", "--clear"), ("errors", "--clear"))
    messages = [{"type": each["type"], "text": str(each["text"])[:1000]} for each in said["messages"][-50:]]
    return _done(
        session,
        console_messages=messages,
        js_errors=[str(each.get("text") or each)[:1000] for each in errors["errors"][-50:]],
        total_messages=len(said["messages"]),
        total_errors=len(errors["errors"]),
    )


BROWSER_TOOLS = (
    *(browser_navigate, browser_snapshot, browser_click, browser_type, browser_scroll),
    *(browser_back, browser_press, browser_get_images, browser_vision, browser_console),
)


async def _run(session: ToolSession, *commands: tuple[str, ...], annotate: bool = False) -> list[Any]:
    if any("\0" in word for command in commands for word in command):
        raise ToolFailure("a NUL character cannot be typed")
    return await session.state(Browser).run(session, *commands, annotate=annotate)


def _done(session: ToolSession, **found: Any) -> dict[str, Any]:
    browser = session.state(Browser)
    dialogs, browser.dialogs = browser.dialogs, []
    return {"success": True, **found, **({"dialogs": dialogs} if dialogs else {})}


def _shown(page: Mapping[str, Any]) -> dict[str, Any]:
    text, _ = cap_text(page["snapshot"], SNAPSHOT_CHARS)
    return {"snapshot": text, "element_count": len(page["refs"])}


async def _settled(session: ToolSession) -> None:
    """Wait until the page has asked for nothing for half a second, so that what was sent has arrived, and what comes of
    it is in the next snapshot."""
    try:
        await _run(session, ("wait", "--load", "networkidle"))
    except ToolFailure as failure:
        if "imed out" not in str(failure):  # a page that asks all the time
            raise


async def _check_value(session: ToolSession, ref: str, role: str, text: str) -> None:
    try:
        (now,) = await _run(session, ("get", "value", ref))
    except ToolFailure:  # the page went on, as one that searches at once
        return
    if now["value"] != text:
        raise ToolFailure(
            f"the {role} {ref} now has {shortened(now['value'])!r} and not the text: it cannot be changed, or takes "
            "other values; the parts of a date take keys, with browser_click and browser_press"
        )


async def _element(session: ToolSession, ref: str) -> tuple[str, str, str]:
    """The ref, its role and its line in a new snapshot: an old ref would find whatever is called the same."""
    name = ref.strip().removeprefix("@")
    (page,) = await _run(session, ("snapshot",))
    if name not in page["refs"]:
        raise ToolFailure(
            f"no element of the page has the ref {shortened(ref)!r} now: take a browser_snapshot ({page['origin']})"
        )
    line = next((line for line in page["snapshot"].splitlines() if re.search(rf"\bref={name}\b", line)), "")
    return f"@{name}", page["refs"][name]["role"], line
