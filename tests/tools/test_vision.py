"""`vision_analyze`: a policy that sees, and a second model at its server."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis_testing.scripted_server import ScriptedServer, say
from lachesis_tools import BUILTIN_TOOLS, ToolRegistry, ToolSession, call_tool
from lachesis_tools.asking import ServiceUnavailable
from lachesis_tools.dispatch import ToolResult
from lachesis_tools.tool_registry import tool
from lachesis_tools.toolsets import ToolsetError, has_toolset, resolve_tools
from lachesis_tools.vision import MAX_IMAGE_BYTES, browser_seen_by, look_of, vision_tools
from tests.support.job_groups import PICTURE

PIXEL = base64.b64decode(PICTURE.partition(",")[2])


async def seen(session: ToolSession, image: str, setting: str = "policy") -> ToolResult:
    registry = ToolRegistry(vision_tools(look_of(setting, pause=0)))
    return await call_tool(
        "vision_analyze", {"image_url": image, "question": "What is it?"}, session, registry=registry
    )


async def test_a_policy_that_takes_images_sees_the_file(session: ToolSession) -> None:
    await (await session.sandbox()).write_bytes("pixel.png", PIXEL)
    for image in ("pixel.png", PICTURE):
        result = await seen(session, image)
        assert result.error is None and result.images == (PICTURE,) and "What is it?" in result.content


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no image", "no image in PNG"),
        (b"", "no image in PNG"),
        (PIXEL + b"\0" * MAX_IMAGE_BYTES, "more than 5000000 bytes"),
    ],
)
async def test_a_file_that_is_no_image_is_told_to_the_model(session: ToolSession, data: bytes, told: str) -> None:
    await (await session.sandbox()).write_bytes("odd.png", data)
    assert told in ((await seen(session, "odd.png")).error or "")


async def test_names_that_lead_to_no_image(session: ToolSession) -> None:
    await (await session.sandbox()).write_bytes("nine.png", PIXEL)
    for image, told in (
        ("none.png", "did you mean 'nine.png'?"),
        (".", "is a directory"),
        ("https://example.org/a.png", "save it as a file first"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:text/plain;base64,aGk=", "no image in PNG"),
        ("data:image/png;base64,aGk=", "no image in PNG"),
    ):
        assert told in ((await seen(session, image)).error or ""), image


async def test_a_second_model_answers(session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISION_API_KEY", "the-key")
    async with ScriptedServer([503, say("A dot.")]) as server:
        result = await seen(session, PICTURE, f"qwen@vl@{server.base_url}")
    assert (result.content, result.images) == ("A dot.", ())
    [_, request] = server.requests
    assert request["model"] == "qwen@vl" and request["messages"][0]["content"][1]["image_url"]["url"] == PICTURE
    assert server.headers[0]["Authorization"] == "Bearer the-key"


async def test_a_rejected_image_is_told_and_a_model_that_takes_none_is_a_failure(session: ToolSession) -> None:
    def picky(body: dict[str, Any]) -> dict[str, Any] | int:
        return 400 if body["messages"][0]["content"][1]["image_url"]["url"] == PICTURE else say("white")

    async with ScriptedServer(picky) as server:
        assert "cannot be looked at" in ((await seen(session, PICTURE, f"m@{server.base_url}")).error or "")
    for refused in (say(None, refusal="No."), say("  "), 403, 500):
        # Whatever a server makes of this image and this question, it answers others.
        async with ScriptedServer(lambda body, told=refused: told if PICTURE in str(body) else say("white")) as server:
            assert "cannot be looked at" in ((await seen(session, PICTURE, f"m@{server.base_url}")).error or "")
    for answers in ([400], [404], [401], [500], [say(None)]):
        async with ScriptedServer(answers) as server:
            with pytest.raises(ServiceUnavailable, match=server.base_url):
                await seen(session, PICTURE, f"m@{server.base_url}")


def test_the_toolset_exists_where_somebody_looks_at_images() -> None:
    registry = BUILTIN_TOOLS.extended(*vision_tools(look_of("policy")))
    assert has_toolset("vision", registry=registry) and not has_toolset("vision", registry=BUILTIN_TOOLS)
    with pytest.raises(ToolsetError, match=r"--env\.vision"):
        resolve_tools(["vision"], registry=BUILTIN_TOOLS)
    for setting in ("", "qwen", "@http://x", "m@ftp://x"):
        with pytest.raises(SettingsError, match="neither policy nor MODEL@URL"):
            look_of(setting)


async def test_a_second_model_looks_at_the_browser_too(session: ToolSession) -> None:
    @tool(toolset="browser")
    async def browser_vision(session: ToolSession, question: str, annotate: bool = False) -> ToolResult:
        """Show the page."""
        return ToolResult(json.dumps({"success": True, "question": question}), images=(PICTURE,))

    async with ScriptedServer([say("A dot.")]) as server:
        look = look_of(f"m@{server.base_url}", pause=0)
        registry = browser_seen_by(ToolRegistry([browser_vision]), look)
        result = await call_tool("browser_vision", {"question": "What is it?"}, session, registry=registry)
    assert json.loads(result.content) == {"success": True, "question": "What is it?", "analysis": "A dot."}
    assert result.images == ()
    assert browser_seen_by(registry, look_of("policy")) is registry
