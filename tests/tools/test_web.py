"""The tools of the web: a corpus, live providers at the wire, their failures, and the replay of what they said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.errors import BackendError, SettingsError
from lachesis_tools import BUILTIN_TOOLS, ToolFailure, ToolRegistry, ToolSession, call_tool, get_tool_definitions
from lachesis_tools.asking import ServiceUnavailable
from lachesis_tools.tool_session import waiting_of
from lachesis_tools.toolsets import ToolsetError, has_toolset, resolve_tools
from lachesis_tools.vision import look_of
from lachesis_tools.web import Corpus, Provider, WebPage, provider_of, web_tools
from lachesis_tools.web.addresses import is_public, public_resolver
from lachesis_tools.web.live import Firecrawl, SearXNG
from lachesis_tools.web.recorded import Recorded

HTML = """<html><head><title>On pumps</title></head><body><nav><a href="/">Home</a></nav><article><h1>Pumps</h1>
<p>A pump moves water from a low place to a high one, and it needs power for that.</p>
<p>The first pumps were turned by oxen, which walked in a circle all day long.</p></article>
<footer>Imprint of the site</footer></body></html>"""
PAGES = [
    WebPage("a", "Pumps", "A pump moves water."),
    WebPage("b", "Rivers", "A river moves water to the sea, and pumps move it back."),
    WebPage("c", "Bread", "Bread is made of flour."),
    WebPage("d", "Same", "Salt is white."),
    WebPage("e", "Same", "Salt is white."),
]


async def no_sandbox() -> Any:
    raise AssertionError("the web needs no sandbox")


async def said(provider: Provider, name: str, **arguments: object) -> str:
    """What a model reads."""
    registry = ToolRegistry(web_tools(provider))
    return (await call_tool(name, arguments, ToolSession("t", no_sandbox), registry=registry)).content


async def found(provider: Provider, query: str, limit: int = 5) -> list[dict[str, Any]]:
    answer = json.loads(await said(provider, "web_search", query=query, limit=limit))
    assert answer["success"] is True
    rows: list[dict[str, Any]] = answer["data"]["web"]
    return rows


@asynccontextmanager
async def served(**routes: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """A server with a handler for each path, `v2_search` being /v2/search."""
    app = web.Application()
    for name, handler in routes.items():
        app.router.add_route("*", f"/{name.replace('_', '/')}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# --- the corpus


async def test_a_corpus_ranks_by_relevance_and_equal_pages_by_their_order() -> None:
    corpus = Corpus(lambda: PAGES)
    rows = await found(corpus, "pump")
    assert [row["url"] for row in rows] == ["a", "b"], "the stem counts, and the title most"
    assert rows[0] == {"url": "a", "title": "Pumps", "description": "A pump moves water.", "position": 1}
    assert [row["url"] for row in await found(corpus, "salt")] == ["d", "e"]
    assert [row["url"] for row in await found(corpus, "salt", limit=1)] == ["d"]
    assert await found(corpus, "nothing here") == await found(corpus, 'NEAR( "') == []
    assert await found(Corpus(lambda: PAGES), "water moves") == await found(corpus, "water moves")


async def test_pages_of_a_corpus_are_read_by_their_address() -> None:
    corpus = Corpus(lambda: [*PAGES, WebPage("long", "Long", "x" * 9_000)])
    read = json.loads(await said(corpus, "web_extract", urls=["c", "nowhere", "long"]))["results"]
    assert read[0] == {"url": "c", "title": "Bread", "content": "Bread is made of flour.", "error": None}
    assert read[1]["error"].startswith("there is no page 'nowhere'") and read[1]["content"] == ""
    assert read[2]["content"].endswith("x\n[1000 more characters]")
    assert "there is no page 'x'" in await said(corpus, "web_extract", urls=["x"])
    assert "no words" in await said(corpus, "web_search", query="?!")
    assert "urls" in await said(corpus, "web_extract", urls=list("abcdef")), "at most five"


async def test_a_folder_and_lines_are_corpora(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "pumps.html").write_text(HTML)
    (folder / "note.md").write_text("# About salt\n\nIt is white.\n")
    (folder / "plain.txt").write_text("An ox is an animal.")
    (folder / "picture.png").write_bytes(b"salt")
    corpus = provider_of(f"corpus:{folder}", tmp_path / "unused")
    page = json.loads(await said(corpus, "web_extract", urls=["deep/pumps.html"]))["results"][0]
    assert page["title"] == "On pumps" and "turned by oxen" in page["content"]
    assert "Imprint" not in page["content"] and "Home" not in page["content"]
    assert [(row["url"], row["title"]) for row in await found(corpus, "salt")] == [("note.md", "About salt")]
    assert [row["title"] for row in await found(corpus, "animal")] == ["plain"]
    lines = tmp_path / "pages.jsonl"
    lines.write_text('{"url": "u", "title": "T", "text": "salt"}\n\n')
    assert [row["url"] for row in await found(provider_of(f"corpus:{lines}", lines), "salt")] == ["u"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"url": "u", "title": "T"}', "line 1: not a page"),
        ("[", "line 1: not a page"),
        ('{"url": "u", "title": "", "text": ""}\n' * 2, "two pages with the address 'u'"),
    ],
)
async def test_a_broken_corpus_is_an_error_of_the_settings(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "pages.jsonl").write_text(text)
    with pytest.raises(SettingsError, match=told):
        await Corpus.at(tmp_path / "pages.jsonl").search("x", 1)


# --- live providers


async def test_searxng_is_asked_for_json_and_its_pages_are_opened(tmp_path: Path) -> None:
    asked = []

    async def search(request: web.Request) -> web.Response:
        asked.append((request.method, dict(request.query)))
        rows = [{"url": f"http://x/{n}", "title": f"T{n}", "content": f"C{n}", "score": 1.5} for n in range(9)]
        return web.json_response({"results": rows})

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=HTML, content_type="text/html")

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("/page")

    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=b"\x89PNG", content_type="image/png")

    async def endless(request: web.Request) -> web.Response:
        raise web.HTTPFound("/endless")

    async with served(search=search, page=page, moved=moved, picture=picture, endless=endless) as url:
        provider = SearXNG(f"{url}/", private_pages=True)
        rows = await found(provider, "a pump", limit=2)
        assert rows[1] == {"url": "http://x/1", "title": "T1", "description": "C1", "position": 2} and len(rows) == 2
        assert asked == [("GET", {"q": "a pump", "format": "json"})]
        urls = [f"{url}/{name}" for name in ("moved", "picture", "missing", "endless")]
        moved_page, *failed = json.loads(await said(provider, "web_extract", urls=urls))["results"]
        assert moved_page["title"] == "On pumps" and "turned by oxen" in moved_page["content"]
        assert [each["error"].partition(" ")[2] for each in failed] == [
            "is image/png, which cannot be read as text",
            "answers 404 Not Found",
            "redirects more than 5 times",
        ]
    assert "cannot be opened" in await said(provider, "web_extract", urls=[url]), "the model has chosen this server"


async def test_pages_are_read_in_the_charset_that_their_server_names_and_however_they_begin() -> None:
    said_in = {
        "koi8-r": "Насос поднимает воду.",
        "latin-1": "Die Pumpe läuft über.",
        "nobody-knows": "A pump.",
        "idna": "A belt.",
    }

    def page(kind: str, charset: str, text: str) -> Any:
        data = text.encode("ascii" if text.startswith("A ") or "<p>A " in text else charset)

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=data, headers={"Content-Type": f"{kind}; charset={charset}"})

        return answer

    pages = {f"text{at}": page("text/plain", *each) for at, each in enumerate(said_in.items())}
    pages |= {f"html{at}": page("text/html", name, f"<p>{text}</p>") for at, (name, text) in enumerate(said_in.items())}
    async with served(**pages) as url:
        provider = SearXNG(f"{url}/", private_pages=True)
        for kind in ("text", "html"):
            read = [(await provider.page(f"{url}/{kind}{at}")).text for at in range(len(said_in))]
            assert read == list(said_in.values())


async def test_firecrawl_gets_two_posts_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRECRAWL_API_KEY", "fc-1")
    asked: list[Any] = []

    async def search(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], await request.json()))
        return web.json_response(
            {"success": True, "data": {"web": [{"url": "u", "title": "T", "description": "D", "position": 1}]}}
        )

    async def scrape(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((request.headers["Authorization"], body))
        if body["url"].endswith("gone"):
            return web.json_response({"success": True, "data": {"markdown": "", "metadata": {"statusCode": 404}}})
        if body["url"].endswith("dead"):
            answer = {"success": False, "code": "SCRAPE_ALL_ENGINES_FAILED", "error": "no engine could open it"}
            return web.json_response(answer, status=500)
        about = {"title": "T", "statusCode": 200}
        return web.json_response({"success": True, "data": {"markdown": "# Hi", "metadata": about}})

    async with served(v2_search=search, v2_scrape=scrape) as url:
        provider = Firecrawl(url)
        assert await found(provider, "q") == [{"url": "u", "title": "T", "description": "D", "position": 1}]
        urls = [f"http://1.1.1.1/{name}" for name in ("page", "gone", "dead")]
        read = json.loads(await said(provider, "web_extract", urls=urls))["results"]
    assert read[0] == {"url": urls[0], "title": "T", "content": "# Hi", "error": None}
    assert [each["error"] for each in read[1:]] == [f"{urls[1]} answers 404", "no engine could open it"]
    assert asked[0] == ("Bearer fc-1", {"query": "q", "limit": 5})
    assert asked[1] == ("Bearer fc-1", {"url": urls[0], "formats": ["markdown"], "onlyMainContent": True})


@pytest.mark.parametrize(("status", "attempts"), [(429, 6), (503, 3), (403, 1), (404, 1), (200, 3)])
async def test_a_provider_that_fails_is_no_answer_for_the_model(status: int, attempts: int) -> None:
    asked = []

    async def failing(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="<html>overloaded", status=status)

    async with served(search=failing, v2_search=failing) as url:
        for provider in (SearXNG(url, pause=0), Firecrawl(url, pause=0)):
            with pytest.raises(BackendError, match=url):
                await said(provider, "web_search", query="q")
    assert asked == ["/search"] * attempts + ["/v2/search"] * attempts
    with pytest.raises(ServiceUnavailable, match=r"does not answer.*check that it runs"):
        await said(SearXNG(url, pause=0), "web_search", query="q")


async def test_a_provider_that_recovers_is_asked_again() -> None:
    asked = []

    async def search(request: web.Request) -> web.Response:
        asked.append(1)
        return web.json_response({"results": []}, status=200 if len(asked) == 3 else 429)

    async with served(search=search) as url:
        assert await found(SearXNG(url, pause=0), "q") == []


def in_seconds(seconds: float) -> str:
    return f"{seconds:g}"


def at_a_time(seconds: float) -> str:
    return formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("status", "header"), [(429, in_seconds), (503, at_a_time)])
@pytest.mark.parametrize("who", ["searxng", "firecrawl", "vision"])
async def test_a_pause_that_a_service_asks_for_is_given_by_all_rollouts(
    who: str, status: int, header: Callable[[float], str]
) -> None:
    opens_at, taken, early, known = 0.0, 0, 0, asyncio.Event()

    async def limited(request: web.Request) -> web.Response:
        nonlocal opens_at, taken, early
        if not opens_at:
            opens_at = time.monotonic() + 2
            return web.json_response({}, status=status, headers={"Retry-After": header(2)})
        early += time.monotonic() < opens_at
        taken += 1
        said = {"choices": [{"message": {"content": "white"}}]}
        return web.json_response({"results": [], "success": True, "data": {"web": []}, **said})

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        known.set()
        yield

    async with served(search=limited, v2_search=limited, v1_chat_completions=limited) as url:
        provider = SearXNG(url) if who == "searxng" else Firecrawl(url)
        look = look_of(f"m@{url}/v1")

        async def ask(number: int) -> Any:
            waiting_of.set(noted)
            return await (look("data:", "?") if who == "vision" else provider.search(f"q{number}", 1))

        first = asyncio.create_task(ask(0))
        async with asyncio.timeout(60):
            await known.wait()
        await asyncio.gather(first, *(ask(number) for number in range(1, 6)))
    assert (taken, early) == (6, 0)


async def test_the_pause_of_a_service_is_no_time_of_the_agent(tmp_path: Path) -> None:
    asked = []

    async def search(request: web.Request) -> web.Response:
        asked.append(1)
        headers = {"Retry-After": "1"} if len(asked) == 1 else {}
        return web.json_response({"results": []}, status=429 if headers else 200, headers=headers)

    async with served(search=search) as url:
        session = ToolSession("t", no_sandbox)
        registry = ToolRegistry(web_tools(Recorded(tmp_path / "web.jsonl", SearXNG(url))))
        for _ in range(2):
            await call_tool("web_search", {"query": "q"}, session, registry=registry)
    assert len(asked) == 2 and session.waited >= 1


async def test_a_pause_that_is_too_long_ends_the_request_at_once() -> None:
    asked = []

    async def search(request: web.Request) -> web.Response:
        asked.append(1)
        return web.json_response({}, status=429, headers={"Retry-After": "3600"})

    async with served(search=search) as url:
        with pytest.raises(ServiceUnavailable, match=r"/search answers 429 and wants a pause of 3600 s, and a request"):
            await SearXNG(url).search("q", 1)
    assert len(asked) == 1


OTHER_FORMS: list[tuple[str, str, Any]] = [
    *(("search", "/search", {"results": rows}) for rows in (["x"], [None], {"url": "u"}, "xyz", "", None, 5)),
    ("search", "/search", "<html>"),
    *(("search", "/v2/search", {"success": True, "data": {"web": rows}}) for rows in (["x"], {"url": "x"}, "", 5)),
    *(("search", "/v2/search", {"success": True, "data": data}) for data in ([{"url": "u"}], None, "x")),
    *(
        ("page", "/v2/scrape", {"success": True, "data": {"markdown": "t", "metadata": about}})
        for about in ({"statusCode": "n/a"}, {"statusCode": [200]}, {"statusCode": float("inf")}, ["x"], "x")
    ),
    ("page", "/v2/scrape", {"success": True, "data": {}}),
    *(("page", "/v2/scrape", {"success": True, "data": data}) for data in ({"markdown": ["a"]}, ["t"])),
    ("page", "/v2/scrape", '{"success": true, "data": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    ("page", "/v2/scrape", {"data": {}}),
]


@pytest.mark.parametrize("number", range(len(OTHER_FORMS)))
async def test_an_answer_of_another_form_is_the_providers_failure(tmp_path: Path, number: int) -> None:
    kind, path, body = OTHER_FORMS[number]
    good = False
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if good:
            data: dict[str, Any] = {"web": [], "markdown": "", "metadata": {}}
            return web.json_response({"results": [], "success": True, "data": data})
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, content_type="application/json")

    async with served(search=answer, v2_search=answer, v2_scrape=answer) as url:
        live = SearXNG(url, pause=0) if path == "/search" else Firecrawl(url, pause=0)
        provider = Recorded(tmp_path / "web.jsonl", live)
        arguments: Any = {"query": "q"} if kind == "search" else {"urls": ["http://1.1.1.1/"]}
        name = "web_search" if kind == "search" else "web_extract"
        with pytest.raises(ServiceUnavailable, match=rf"{url}{path} answers 200 in another form than that of its API"):
            await said(provider, name, **arguments)
        assert asked == [path] * 3 and not (tmp_path / "web.jsonl").exists()
        good = True
        assert await said(provider, name, **arguments)


async def test_an_answer_without_an_end_is_not_read_to_it() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" " * (1 << 20))
        return response

    async with served(search=endless, v2_search=endless, v2_scrape=endless) as url:
        for provider in (SearXNG(url), Firecrawl(url)):
            with pytest.raises(ServiceUnavailable, match=r"answers with more than 32000000 bytes"):
                await said(provider, "web_search", query="q")
        told = await said(Firecrawl(url), "web_extract", urls=["http://1.1.1.1/"])
    assert "http://1.1.1.1/ has more than 32000000 bytes" in told, "the model has chosen this page"


async def test_a_search_that_takes_too_long_is_the_providers_and_a_page_is_the_models() -> None:
    async def late(request: web.Request) -> web.Response:
        return web.json_response({"success": False, "error": "timed out"}, status=408)

    async with served(v2_search=late, v2_scrape=late) as url:
        with pytest.raises(ServiceUnavailable, match="answers 408: timed out"):
            await said(Firecrawl(url), "web_search", query="q")
        assert "timed out" in await said(Firecrawl(url), "web_extract", urls=["http://1.1.1.1/"])


# --- private addresses


def test_only_addresses_of_the_internet_are_public() -> None:
    assert all(map(is_public, ("1.1.1.1", "2606:4700::1111")))
    private = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "0.0.0.0", "224.0.0.1", "100.64.0.1"]
    private += ["::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"]
    assert not any(map(is_public, private))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/page",
        "http://localhost:{port}/page",
        "http://2130706433:{port}/page",
        "http://[::ffff:127.0.0.1]:{port}/page",
        "http://user@127.0.0.1:{port}/page",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "ftp://1.1.1.1/x",
        "http://[::1/",
        "http://1.1.1.1:99999/",
        "page",
    ],
)
async def test_a_model_reaches_nothing_private_by_a_live_provider(url: str) -> None:
    reached = []

    async def any_path(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(text="secret")

    async with served(page=any_path, v2_scrape=any_path) as server:
        address = url.replace("{port}", server.rpartition(":")[2])
        for provider in (SearXNG(server), Firecrawl(server)):
            answer = await said(provider, "web_extract", urls=[address])
            assert "private network" in answer or "is not an address of a page" in answer
    assert reached == []


async def test_the_address_is_checked_again_when_the_connection_resolves_the_name() -> None:
    # On a machine without an address of its own, no look-up finds localhost.
    told = r"localhost is an address of a private network|the name localhost cannot be looked up"
    with pytest.raises((ToolFailure, ServiceUnavailable), match=told):
        await public_resolver().resolve("localhost", 80)


# --- this machine's own network

OPENS = """
import asyncio, encodings.idna, resource, sys
import aiohttp
from pathlib import Path
from lachesis_tools.web.live import SearXNG
from lachesis_tools.web.recorded import Recorded

async def main():
    provider = Recorded(Path(sys.argv[1]), SearXNG("http://127.0.0.1:1", private_pages="any" in sys.argv))
    if "full" in sys.argv:  # no socket can be opened, and the loop is
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        print(await provider.page(sys.argv[2]))
    except Exception as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://93.184.216.34/", (), "Network is unreachable"),
        ("http://[2606:4700::1111]/", (), "Network is unreachable|Cannot assign requested address"),
        ("http://page.example/", (), "the name page.example cannot be looked up"),
        ("http://page.example/", ("any",), "Next step: repair the network of this machine"),
    ],
)
def test_a_network_that_this_machine_has_lost_is_no_answer_of_a_page(
    tmp_path: Path, url: str, options: tuple[str, ...], said: str
) -> None:
    alone = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("a process without a network cannot be started here")
    record = tmp_path / "web.jsonl"
    command = [*alone, sys.executable, "-c", OPENS, str(record), url, *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("ServiceUnavailable") and re.search(said, told), told
    assert not record.exists()


def test_an_address_of_ipv6_is_a_choice_where_this_machine_has_the_other_kind(tmp_path: Path) -> None:
    alone = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up; ip route add default dev lo; "$@"']
    if not all(map(shutil.which, ("unshare", "ip"))) or subprocess.run([*alone, "-", "true"], check=False).returncode:
        pytest.skip("a process with a network of its own cannot be started here")
    command = [*alone, "-", sys.executable, "-c", OPENS, str(tmp_path / "web.jsonl"), "http://[2606:4700::1111]/"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("ToolFailure") and "cannot be opened" in told, told


def test_a_process_without_a_free_file_has_seen_no_page(tmp_path: Path) -> None:
    record = tmp_path / "web.jsonl"
    command = [sys.executable, "-c", OPENS, str(record), "http://127.0.0.1:1/", "any", "full"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith("ServiceUnavailable") and "ulimit -n" in told, told
    assert not record.exists()


async def test_a_server_that_takes_no_connection_is_an_answer_for_the_model(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        recorded = Recorded(tmp_path / "web.jsonl", SearXNG(url, private_pages=True))
        assert "cannot be opened: Cannot connect" in await said(recorded, "web_extract", urls=[url])
    assert "failure" in json.loads((tmp_path / "web.jsonl").read_text())


# --- recorded answers


async def test_a_replay_gives_the_same_bytes_without_the_server(tmp_path: Path) -> None:
    asked = []

    async def search(request: web.Request) -> web.Response:
        asked.append(request.query["q"])
        row = {"url": "http://x", "title": f"Übung \ud800 {len(asked)}", "content": "é"}
        return web.json_response({"results": [row]})

    record = tmp_path / "new" / "web.jsonl"
    calls: list[tuple[str, dict[str, Any]]] = [
        ("web_search", {"query": "one"}),
        ("web_search", {"query": "one"}),
        ("web_search", {"query": "one", "limit": 2}),
        ("web_extract", {"urls": ["http://10.0.0.1/"]}),
    ]
    async with served(search=search) as url:
        recorded = Recorded(record, SearXNG(url))
        first = [await said(recorded, name, **arguments) for name, arguments in calls]
    assert asked == ["one", "one"] and first[0] == first[1] != first[2]
    again = provider_of(f"replay:{record}", tmp_path / "unused")
    assert [await said(again, name, **arguments) for name, arguments in calls] == first
    assert len(record.read_text().splitlines()) == 3
    continued = Recorded(record, SearXNG(url, pause=0))
    assert await said(continued, "web_search", query="one") == first[0]
    for provider, told in ((again, "needs the same requests"), (continued, "does not answer")):
        with pytest.raises(ServiceUnavailable, match=told):
            await said(provider, "web_search", query="two")


async def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    record = tmp_path / "web.jsonl"
    whole = json.dumps({"request": ["page", "a"], "pages": [{"url": "a", "title": "old", "text": "old"}]})
    record.write_text(f'{whole}\n{{"request": ["page", "b"], "pa')
    recorded = Recorded(record, Corpus(lambda: PAGES))
    assert (await recorded.page("a")).title == "old" and (await recorded.page("b")).title == "Rivers"
    assert (await Recorded(record, None).page("b")).title == "Rivers"


# --- settings and toolsets


@pytest.mark.parametrize("setting", ["", "corpus:", "bing:x", "searxng:", "searxng:localhost:8080", "firecrawl:x"])
def test_a_setting_that_names_no_provider_says_what_to_write(tmp_path: Path, setting: str) -> None:
    with pytest.raises(SettingsError, match=r"corpus:FOLDER|http://localhost:8080"):
        provider_of(setting, tmp_path / "web.jsonl")


def test_what_a_provider_lacks_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIRECRAWL_API_KEY", raising=False)
    for setting, told in (
        ("corpus:/no/where", "does not exist"),
        ("replay:/no/where", "no file"),
        ("firecrawl", "API_KEY"),
    ):
        with pytest.raises(SettingsError, match=told):
            provider_of(setting, tmp_path / "web.jsonl")
    assert isinstance(provider_of("firecrawl:http://localhost:3002", tmp_path / "web.jsonl"), Recorded)


def test_the_toolsets_exist_where_there_is_a_provider() -> None:
    registry = BUILTIN_TOOLS.extended(*web_tools(Corpus(lambda: PAGES)))
    assert resolve_tools(["web"], registry=registry) == ["web_search", "web_extract"]
    assert resolve_tools(["search"], registry=registry) == ["web_search"]
    assert resolve_tools(registry=registry) == [*BUILTIN_TOOLS, "web_search", "web_extract"]
    assert resolve_tools() == [*BUILTIN_TOOLS] and not has_toolset("web") and not has_toolset("search")
    for name in ("web", "search", "web_extract"):
        with pytest.raises(ToolsetError, match=f"'{name}' has no tools here.*--env.web.*corpus:pages.jsonl"):
            get_tool_definitions([name, "file"])
