"""A headless Chromium, driven over its own protocol: pages as a person sees them, with their errors and screenshots."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")


class Page:
    """One tab. `errors` has what its console complained about, exceptions and refused loads included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = message.json()
            if (answer := self._answers.pop(event.get("id"), None)) is not None:
                answer.set_result(event)
            elif event.get("method") == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "assert"):
                self.errors.append(str(event["params"]["args"]))
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                entry = event["params"]["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol. AssertionError where it fails."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await self._answers[number]
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def open(self, url: str) -> None:
        """Go to an address; back once its `load` event is over, scripts of `defer` included."""
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({url.partition('#')[0]!r}) && document.readyState === 'complete'")

    async def eval(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(60):
            while True:
                if (await self.send("Runtime.evaluate", expression=f"Boolean({script})"))["result"].get("value"):
                    return
                await asyncio.sleep(0.02)

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_page(width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """A page in a Chromium of its own, which ends with it."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(  # noqa: ASYNC220  # it ends in here
            [
                *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *("--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}"),
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": profile},  # killed, it leaves its folders
            start_new_session=True,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    address = next(tab for tab in await answer.json() if tab["type"] == "page")["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.send(f"{domain}.enable")
                    await page.resize(width, height)
                    yield page
                await listening
        finally:
            os.killpg(process.pid, 9)
            process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> str:
    async with asyncio.timeout(60):
        while not (file.exists() and (words := file.read_text().split())):
            assert process.poll() is None, "Chromium ended"
            await asyncio.sleep(0.05)
    return words[0]
