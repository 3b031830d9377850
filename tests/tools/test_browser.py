"""A browser in the sandbox: pages are used as asked, and whatever they do is an answer for the model."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from backends import BackendError
from lachesis.settings.agent_tools import AgentTools, chosen_tools
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis.tool_context.tool_context import ToolContext
from lachesis_tools import BUILTIN_TOOLS, ToolRegistry, ToolResult, ToolSession, ToolsetError, call_tool
from lachesis_tools.browser import BROWSER_TOOLS, Browser, check_browser_requirements
from lachesis_tools.distributions import draw_toolsets
from lachesis_tools.toolsets import has_toolset
from tests.support.browsers import needs_browser, on_request

TOOLS = ToolRegistry(BROWSER_TOOLS)
PAGES = {
    "form": """<h1>Form</h1><label>Name <input></label><label>Kind <select><option>red<option>green</select></label>
<label>Fixed <input readonly></label><label>Day <input type=date></label><div contenteditable>old</div>
<label>Many <select multiple><option>aa<option>bb</select></label><button disabled>Off</button>
<button onclick="this.remove()">Gone</button><a href=two>Two</a>
<button onclick="document.title = confirm('Sure?')">Ask</button>
<button onclick="alert('Wrong')">Tell</button><button onclick="for(;;);">Hang</button><img src=x alt=Pear>""",
    "two": """<title>Second</title><h1>Two</h1><a href=two>Two</a>
<script>console.log('hello'); setTimeout(() => x.y)</script>""",
    "covered": "<button>Below</button><div style='position:fixed;inset:0'>Above</div>",
    "loads": "<h1>Loads</h1><script>alert('Welcome')</script>",
    "again": "<script>for(;;)alert('Again')</script>",
    "hungry": "<button onclick='a=[];for(;;)a.push(new Uint8Array(1e7).fill(1))'>Eat</button>",
    "windows": "<h1>Windows</h1><button onclick=\"for(let i=0;i<30;i++)open('two')\">Open</button>",
}
Use = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
async def use(session: ToolSession) -> AsyncIterator[Use]:
    """`await use("click", ref=...)`, in a sandbox with a server of the pages."""
    sandbox = await session.sandbox()
    for name, page in PAGES.items():
        await sandbox.write_bytes(f"site/{name}", f"<!doctype html><meta charset=utf-8>{page}".encode())
    serve = (
        "import http.server as h; h.SimpleHTTPRequestHandler.extensions_map[''] = 'text/html'; "
        "h.test(h.SimpleHTTPRequestHandler, h.ThreadingHTTPServer, port=8000, bind='127.0.0.1')"
    )
    server = await sandbox.start(f'cd site && exec {sandbox.python} -u -c "{serve}" 2>/dev/null')
    assert b"Serving" in (await server.read(wait=60)).data

    async def run(name: str, **arguments: object) -> ToolResult:
        return await call_tool(f"browser_{name}", arguments, session, registry=TOOLS)

    yield run


async def at(use: Use, page: str) -> Callable[[str], str]:
    """Open a page. What is given finds the ref of an element by its role and name."""
    opened = await use("navigate", url=f"http://127.0.0.1:8000/{page}")
    assert opened.error is None, opened.error
    lines = json.loads(opened.content)["snapshot"].splitlines()

    def ref(begins: str) -> str:
        (line,) = [line for line in lines if f"- {begins}" in line and "ref=" in line]
        return "@" + str(line).partition("ref=")[2].partition("]")[0].partition(",")[0]

    return ref


@needs_browser
async def test_a_page_is_read_and_used(use: Use, session: ToolSession) -> None:
    ref = await at(use, "form")
    for field, text in (('textbox "Name"', '--json "Ada" $x'), ('combobox "Kind"', "green"), ('listbox "Many"', "bb")):
        assert (await use("type", ref=ref(field), text=text)).error is None
    assert (await use("type", ref=ref("generic"), text="new")).error is None
    refused = await use("type", ref=ref("heading"), text="x")
    assert "is a heading, which takes no text" in str(refused.error)
    asked = json.loads((await use("click", ref=ref('button "Ask"'))).content)
    assert asked["dialogs"] == ["confirm: Sure? (answered with OK)"]
    values = "[...document.querySelectorAll('input,select')].map(e => e.value)"
    values += ".concat(document.title, document.querySelector('div').innerText)"
    read = json.loads((await use("console", expression=values)).content)["result"]
    assert read == ['--json "Ada" $x', "green", "", "", "bb", "true", "new"]
    seen = await use("vision", question="What is there?", annotate=True)
    assert seen.error is None and seen.images[0].startswith("data:image/png;base64,iVBOR")
    assert json.loads((await use("get_images")).content)["images"][0]["alt"] == "Pear"
    gone = ref('button "Gone"')
    assert (await use("click", ref=gone)).error is None
    assert "no element of the page has the ref" in str((await use("click", ref=gone)).error)
    stale = ref("link")
    assert (await use("click", ref=stale)).error is None
    assert "no element of the page has the ref" in str((await use("click", ref=stale)).error), "its namesake is another"
    said = json.loads((await use("console", clear=True)).content)
    assert said["console_messages"][0]["text"] == "hello" and said["total_errors"] == 1
    assert json.loads((await use("back")).content)["url"].endswith("/form")
    assert "Form" in (await ToolContext(session, TOOLS).browser_snapshot())["snapshot"]
    missing = await ToolContext(session, TOOLS).browser_navigate("http://127.0.0.1:8001/")
    assert "ERR_CONNECTION_REFUSED" in missing["error"]


@on_request
async def test_what_an_element_cannot_take_is_refused(use: Use) -> None:
    ref = await at(use, "form")
    refusals = {
        "now has '' and not the text": ("type", {"ref": ref('textbox "Fixed"'), "text": "x"}),
        "parts of a date": ("type", {"ref": ref('spinbutton "Day'), "text": "7"}),
        "No option matched": ("type", {"ref": ref('combobox "Kind"'), "text": "blue"}),
        "is disabled": ("click", {"ref": ref('button "Off"')}),
        "list that is closed": ("click", {"ref": ref('option "green"')}),
        "no element of the page has the ref '@e999'": ("click", {"ref": "@e999"}),
        "NUL": ("type", {"ref": ref('textbox "Name"'), "text": "\0"}),
        "is no key": ("press", {"key": "Entr"}),
        "has to begin with http": ("navigate", {"url": "file:///etc/passwd"}),
        "INTERNET_DISCONNECTED": ("navigate", {"url": "http://example.org/"}),
        "ReferenceError": ("console", {"expression": "nothing.here"}),
    }
    for message, (name, arguments) in refusals.items():
        assert message in str((await use(name, **arguments)).error), message
    ref = await at(use, "covered")
    assert "is covered by" in str((await use("click", ref=ref("button"))).error)
    assert (await use("console", expression="location = 'file:///etc/passwd'")).error is None
    assert json.loads((await use("console", expression="location.href")).content)["result"].startswith("http://")


@on_request
async def test_whatever_a_page_does_the_model_goes_on(use: Use, session: ToolSession) -> None:
    ref = await at(use, "form")
    told = json.loads((await use("click", ref=ref('button "Tell"'))).content)
    assert told["dialogs"] == ["alert: Wrong (answered with OK)"]
    assert "did not answer" in str((await use("click", ref=ref('button "Hang"'))).error)
    loads = json.loads((await use("navigate", url="http://127.0.0.1:8000/loads")).content)
    assert "Loads" in loads["snapshot"] and loads["dialogs"] == ["alert: Welcome (answered with OK)"]
    assert "dialogs in a row" in str((await use("navigate", url="http://127.0.0.1:8000/again")).error)
    ref = await at(use, "windows")
    assert (await use("click", ref=ref("button"))).error is None
    ref = await at(use, "hungry")
    await use("click", ref=ref("button"))  # with an error or without, but never an exception
    sandbox = await session.sandbox()
    ending = "for p in /proc/[0-9]*; do grep -qs user-data-dir $p/cmdline && kill -9 ${p#/proc/}; done"
    for kill in (ending, "kill -9 $(cat /tmp/browser-*/s.pid)", "rm -rf /tmp/browser-*"):
        await sandbox.exec(kill, timeout=20, fresh=True)
        await use("snapshot")
        await at(use, "two")
    forged = b'#!/bin/sh\necho \'[{"success": true, "result": {}}]\''
    await sandbox.write_bytes("/tmp/agent-browser", forged, mode=0o755)
    for name, arguments in (("snapshot", {}), ("back", {}), ("console", {}), ("vision", {"question": "?"})):
        await use(name, **arguments)
    before = len(await processes(session))
    await session.state(Browser).close()
    assert len(await processes(session)) < before
    assert not [each for each in await processes(session) if each in ("chromium", "agent-browser")]
    await at(use, "two")


async def processes(session: ToolSession) -> list[str]:
    done = await (await session.sandbox()).exec("cat /proc/[0-9]*/comm", timeout=20, fresh=True)
    return done.stdout.decode().split()


@on_request
async def test_a_browser_that_does_not_start_is_tried_elsewhere(
    use: Use, session: ToolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await session.sandbox()
    await sandbox.exec("chmod 555 /tmp", timeout=20, fresh=True)
    spoilt = await use("snapshot")
    assert "no browser starts in this sandbox, where one does in a new sandbox" in str(spoilt.error)
    await sandbox.exec("chmod 777 /tmp", timeout=20, fresh=True)
    await at(use, "two")
    await session.state(Browser).close()
    monkeypatch.setenv("AGENT_BROWSER_EXECUTABLE_PATH", "/usr/bin/false")
    with pytest.raises(BackendError, match="does not start, also in a new sandbox"):
        await use("snapshot")


def test_what_is_missing_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_BROWSER_PATH", str(tmp_path / "agent-browser"))
    assert "npm install agent-browser@" in str(check_browser_requirements())
    assert str(tmp_path) in str(check_browser_requirements())
    only: dict[str, Any] = {"enabled_toolsets": ["browser"]}
    with pytest.raises(ToolsetError, match=r"the browser needs agent-browser.*npm install"):
        AgentTools(HermesAgentEnvConfig(**only), BUILTIN_TOOLS).definitions()


def test_the_toolset_is_there_where_it_is_named_and_can_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_BROWSER_PATH", sys.executable)  # any program: none is started
    monkeypatch.setenv("AGENT_BROWSER_EXECUTABLE_PATH", sys.executable)

    def tools_of(**settings: Any) -> ToolRegistry:
        return chosen_tools(BUILTIN_TOOLS, HermesAgentEnvConfig(**settings), "run", user=False)

    assert tools_of() is BUILTIN_TOOLS is tools_of(enabled_toolsets=["terminal"])
    named = tools_of(enabled_toolsets=["browser"])
    definitions = AgentTools(HermesAgentEnvConfig(enabled_toolsets=["browser"]), named).definitions()
    assert [each["function"]["name"] for each in definitions] == list(TOOLS)
    drawing = tools_of(distribution="browser_only")
    drawn = draw_toolsets("browser_only", "key", exists=lambda name: has_toolset(name, registry=drawing))
    assert drawn == ["browser"]
