"""The tool `vision_analyze`: the policy itself sees an image, or a second model answers a question about it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from backends.errors import SettingsError
from lachesis_tools.asking import ServiceUnavailable, asked
from lachesis_tools.dispatch import ToolResult
from lachesis_tools.files import file_error
from lachesis_tools.gate import Gate
from lachesis_tools.text import to_json
from lachesis_tools.tool_registry import Tool, ToolFailure, ToolRegistry, tool
from lachesis_tools.tool_session import ToolSession

MAX_IMAGE_BYTES: Final = 5_000_000
"""What the smallest of the known servers takes."""
KEY: Final = "VISION_API_KEY"
_TIMEOUT: Final = 120.0
_PROBE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR42mP4TwAwjCoYVTCqYKQqAAA/"
    "aPwuqUTQyAAAAABJRU5ErkJggg=="
)
"""A square of 32 pixels."""
_STARTS: Final = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}

Look: TypeAlias = Callable[[str, str], Awaitable[ToolResult]]
"""Answers a question about an image, given by its data URL."""


async def shown(image: str, question: str) -> ToolResult:
    """The image itself, for a policy that takes images."""
    return ToolResult(f"The image is below. {question}", images=(image,))


def look_of(setting: str, *, pause: float = 1.0) -> Look:
    """Who looks at images.

    Args:
        setting: `policy`, or `MODEL@URL` of a server with OpenAI's chat route; its key is in `VISION_API_KEY`.
        pause: Seconds before the second attempt.

    Raises:
        SettingsError: it is neither.
    """
    if setting == "policy":
        return shown
    model, _, url = setting.rpartition("@")
    if not model or not url.startswith(("http://", "https://")):
        raise SettingsError(f"vision: {setting!r} is neither policy nor MODEL@URL, such as qwen-vl@http://host:8000/v1")

    gate = Gate(pause)

    def read(status: int, answer: Mapping[str, Any]) -> tuple[int, str | None, str]:
        if status != 200:
            return status, None, str(answer.get("error") or answer)
        text = answer["choices"][0]["message"].get("content")
        return status, text if isinstance(text, str) and text.strip() else None, str(answer.get("error") or answer)

    async def ask(image: str, question: str) -> tuple[int, str | None, str]:
        """The status, the answer if there is one, and what the server said."""
        parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": image}}]
        key = os.environ.get(KEY)
        return await asked(
            "POST",
            f"{url.rstrip('/')}/chat/completions",
            read,
            gate=gate,
            timeout=_TIMEOUT,
            pause=pause,
            json={"model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0.0},
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def look(image: str, question: str) -> ToolResult:
        try:
            status, text, told = await ask(image, question)
            failure = ServiceUnavailable(f"vision: {model} at {url} answers {status}: {told:.300}")
        except ServiceUnavailable as error:
            text, told, failure = None, "the server fails on it", error
        if text is not None:
            return ToolResult(text)
        # Is it this image, or this question? A server that is at fault, or takes no images, fails on any.
        with contextlib.suppress(ServiceUnavailable):
            if (await ask(_PROBE, "What is this?"))[1] is not None:
                raise ToolFailure(f"the image cannot be looked at: {told:.300}")
        raise failure

    return look


def vision_tools(look: Look) -> tuple[Tool, ...]:
    """`vision_analyze`, whose images are looked at by `look`."""

    @tool(toolset="vision", concurrency_safe=True, time_limit=None)  # the server's time is limited
    async def vision_analyze(
        session: ToolSession, image_url: str, question: Annotated[str, Field(min_length=1)]
    ) -> ToolResult:
        """Look at an image, and answer a question about it.

        Args:
            image_url: The path of an image file (PNG, JPEG, GIF or WebP), or a data URL.
            question: What to find out.
        """
        return await look(await _image(session, image_url), question)

    return (vision_analyze,)


def browser_seen_by(tools: ToolRegistry, look: Look) -> ToolRegistry:
    """The same tools, with a `browser_vision` whose screenshots `look` looks at, if there is one."""
    found = tools.get("browser_vision")
    if found is None or look is shown:
        return tools

    async def browser_vision(session: ToolSession, question: str, annotate: bool = False) -> ToolResult:
        result = await found(session, question, annotate)
        seen = await look(result.images[0], question)
        return ToolResult(to_json({**json.loads(result.content), "analysis": seen.content}))

    return tools.replaced(replace(found, function=browser_vision))


async def _image(session: ToolSession, named: str) -> str:
    """The data URL of a file, or of a data URL that holds an image."""
    if named.startswith(("http://", "https://")):
        raise ToolFailure(f"{named:.100} is on the web; save it as a file first, and give its path")
    if named.startswith("data:"):
        head, _, encoded = named.partition(";base64,")
        try:
            data = base64.b64decode(encoded, validate=True) if head.startswith("data:image/") else b""
        except ValueError as error:
            raise ToolFailure(f"the data of the image is not base64: {error}") from None
    else:
        sandbox, path = await session.sandbox(), await session.path(named)
        try:
            data = await sandbox.read_bytes(path, limit=MAX_IMAGE_BYTES + 1)
        except OSError as error:
            raise await file_error(sandbox, path, error) from None
    return data_url(data, named)


def data_url(data: bytes, name: str) -> str:
    """Of an image, whose kind its first bytes tell. Raises `ToolFailure`."""
    kind = next((kind for start, kind in _STARTS.items() if data.startswith(start)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if not kind:
        raise ToolFailure(f"{name:.100} is no image in PNG, JPEG, GIF or WebP")
    if len(data) > MAX_IMAGE_BYTES:
        raise ToolFailure(f"{name:.100} has more than {MAX_IMAGE_BYTES} bytes; make it smaller first")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
