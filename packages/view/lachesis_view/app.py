"""The web app: pages over an index, and the stream that tells them when it has grown."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import eq, itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import orjson
from aiohttp import web

from backends.errors import cannot_listen
from lachesis.loop.outcome import advice_if_cut_off
from lachesis.other_packages import POOLS
from lachesis_messages.records.groups import rollout_samples
from lachesis_messages.records.jsonl import JsonlError
from lachesis_tokens.wire.visitors import Visitors, is_loopback
from lachesis_view.audits import audits_below
from lachesis_view.curves import curves
from lachesis_view.filters import Filter, ignored
from lachesis_view.group_page import diff_context, group_context, partings
from lachesis_view.html import reward_axis, settings_in_words
from lachesis_view.html.parts import to_json
from lachesis_view.index import FAILURES_OF, Index, NoSuchGroup
from lachesis_view.matrix import comparable, difference, matrix, orders, passes
from lachesis_view.notes import NoteError, folder_of, note_of, write_note
from lachesis_view.reports.training import figures, repaired
from lachesis_view.reports.verdict import between, verdict
from lachesis_view.rollout_page import rollout_context, sample_tokens
from lachesis_view.single_page import HERE, SHARED, file_name, group_of_one, group_page, rollout_page, templates
from lachesis_view.token_text import TokenTexts, vocabulary_of

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the folder."""
PAGE_SIZE = 100
FEW_GROUPS = 20
"""Below this number, curves are folded: with less than two groups a point, they show chance."""
GROUP = r"(?:(?:unscored)?-)?[0-9]{1,16}"  # its number in an address
HEADERS = {
    # Whatever a model wrote into a page: nothing but our own files runs, styles, or is asked for.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Viewer:
    """One index as a web app.

    Args:
        host: the address that it listens on.
        token: who asks must have it; empty where only this machine can ask.
        vocabulary: the texts of tokens; without one, that of each run's tokenizer, where it is on this machine.
        audits: the file or folder of the page of audits; without one, the folder of the index.
        notes: whether who may read may also write notes and tags.
    """

    def __init__(
        self,
        index: Index,
        token: str = "",
        vocabulary: TokenTexts | None = None,
        *,
        host: str = "127.0.0.1",
        audits: Path | None = None,
        notes: bool = True,
    ) -> None:
        self.notes = notes
        self.index = index
        self.vocabulary = vocabulary
        self.audits = audits or index.root
        self._vocabularies: dict[str, TokenTexts | None] = {}
        self.token = token
        others = "start it with --host 0.0.0.0 and give them the address that it prints"
        self.visitors = Visitors("the viewer", host, has_token=bool(token), others=others, links=True)
        self.grown = asyncio.Condition()
        self.changes = 0
        self.failure = ""
        """Why the files are not followed any more."""
        self.templates = templates()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        run, group = "/{run:.+}", f"/{{run:.+}}/{{group:{GROUP}}}"
        app.add_routes(
            [
                web.get("/", self._runs),
                web.get("/audits", self._audits),
                web.get("/curves", self._curves),
                web.get("/diff", self._diff),
                web.get("/events", self._events),
                web.get("/pools", self._pools),
                web.get("/rollouts", self._rollouts),
                web.get("/static/{name}", self._static),
                web.get(f"/run{run}", self._run),
                web.get(f"/group{group}", self._group),
                web.get(f"/rollout{group}/{{n:[0-9]{{1,9}}}}", self._rollout),
                web.post(f"/notes{group}/{{n:[0-9]{{1,9}}}}", self._note),
                web.get(f"/record{group}/{{n:[0-9]{{1,9}}}}", self._save),
                web.get(f"/send{group}/{{n:[0-9]{{1,9}}}}", self._save),
                web.get(f"/send-group{group}", self._save),
                web.get(f"/tokens{group}/{{n:[0-9]{{1,9}}}}/{{sample:[0-9]{{1,9}}}}", self._tokens),
            ]
        )
        app.cleanup_ctx.append(self._follow)
        return app

    # What every answer has

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            lost = error.status == 404
            response = self._error(error.status, f"There is no page {request.path}" if lost else error.reason)
        except NoSuchGroup as error:
            response = self._error(404, str(error))
        except Exception as error:
            self.index.report(error)
            logger.exception("the page %s cannot be made", request.path)
            response = self._error(500, "this page cannot be shown; the viewer's terminal says why")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to a request that is not from who started the viewer."""
        if reason := self.visitors.refusal(request):
            return self._error(403, reason)
        if not self.token:
            return None
        # Cookies are those of all ports of a host.
        port = re.search(r":([0-9]{1,5})$", request.headers.get("Host", ""))
        cookie = f"lachesis-view-{port[1] if port else 80}"
        if self._is_token(request.query.get("token", "")):
            rest = urlencode([pair for pair in request.query.items() if pair[0] != "token"])
            path = "/" + request.rel_url.raw_path.lstrip("/")  # two would begin the name of a host
            moved = web.Response(status=303, headers={"Location": f"{path}{rest and '?'}{rest}"})
            moved.set_cookie(cookie, self.token, httponly=True, samesite="Lax")
            return moved
        if self._is_token(request.cookies.get(cookie, "")):
            return None
        return self._error(403, "the address needs the token that the viewer printed when it started")

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _error(self, status: int, reason: str, record: Any = None) -> web.Response:
        return self._page("error.html.jinja", {"status": status, "reason": reason, "record": record}, status=status)

    def _page(self, template: str, context: Mapping[str, Any], status: int = 200) -> web.Response:
        html = self.templates.page(
            template, left=self.index.left, unread=self.index.unread, failure=self.failure, **context
        )
        # Models write halves of surrogate pairs, which have no UTF-8.
        body = html.encode("utf-8", "backslashreplace")
        return web.Response(body=body, content_type="text/html", charset="utf-8", status=status)

    async def _static(self, request: web.Request) -> web.FileResponse:
        name = request.match_info["name"]
        for path in (HERE / "static" / name, SHARED / name):
            if path.suffix in (".js", ".css") and "/" not in name and path.is_file():
                return web.FileResponse(path)
        raise web.HTTPNotFound

    # Growth

    async def _follow(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._refresh())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.index.stop()

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()

        def changed() -> None:
            asyncio.run_coroutine_threadsafe(self._tell(), loop)

        while True:
            try:
                await asyncio.to_thread(self.index.refresh, changed)
                self.failure = ""
            except Exception as error:  # the disk of the index is full, for example; the pages say so
                self.failure = str(error)
            await asyncio.sleep(INTERVAL)

    async def _tell(self) -> None:
        async with self.grown:
            self.changes += 1
            self.grown.notify_all()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """An event for each growth, at most one a second: what is new is asked for by the pages themselves."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        seen = self.changes
        with suppress(ConnectionError):
            while True:
                await response.write(b": here\n\n")  # notices who has gone
                with suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(15), self.grown:
                        while self.changes == seen:
                            await self.grown.wait()
                if self.changes != seen:
                    seen = self.changes
                    await response.write(b"event: grown\ndata: %d\n\n" % self.index.left)
                    await asyncio.sleep(1)
        return response

    # Pages

    async def _at_once(self, make: Callable[[web.Request], web.Response], request: web.Request) -> web.Response:
        """A page of figures side by side, all of one moment of a run that goes on."""

        def made() -> web.Response:
            with self.index.moment():
                return make(request)

        return await asyncio.to_thread(made)

    async def _runs(self, request: web.Request) -> web.Response:
        return await self._at_once(self._runs_page, request)

    def _runs_page(self, request: web.Request) -> web.Response:
        runs = self.index.runs()
        if chosen := _chosen(request, [run["name"] for run in runs]):
            return self._compared(request, runs, chosen)
        return self._page("runs.html.jinja", {"runs": runs, "axis": _axis(runs), "root": str(self.index.root)})

    async def _audits(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(audits_below, self.audits)
        return self._page("audits.html.jinja", {**found, "root": str(self.audits)})

    async def _run(self, request: web.Request) -> web.Response:
        chosen = [request.match_info["run"]]
        return await self._at_once(lambda request: self._compared(request, self.index.runs(), chosen), request)

    async def _pools(self, request: web.Request) -> web.Response:
        pools = await POOLS.load("statuses")() if "statuses" in POOLS.names() else []
        return self._page("pools.html.jinja", {"pools": pools})

    def _compared(self, request: web.Request, runs: list[dict[str, Any]], chosen: list[str]) -> web.Response:
        found = [run for name in chosen for run in runs if run["name"] == name]
        if len(found) < len(chosen):
            missing = ", ".join(sorted(set(chosen) - {run["name"] for run in found}))
            return self._error(404, f"there is no run {missing} in {self.index.root}")
        if len(found) == 2:  # the later one is looked at, beside the earlier one
            found.sort(key=itemgetter("latest"))
            chosen = [run["name"] for run in found]
        rows = _settings([run["settings"] for run in found])
        own = found[-1] if len(found) == 2 else found[0]
        against = chosen[0] if len(found) == 2 else request.query.get("against", "")
        others = comparable(self.index, own["name"], [run["name"] for run in runs])
        against = against if against in others else ""
        offered = orders(against, trained=own["trained"], scored=own["scored"] or not own["declined"])
        order, page = request.query.get("order", ""), request.query.get("page", "")
        order = order if order in offered else offered[0]
        page_number = max(1, int(page)) if page.isdecimal() and len(page) < 8 else 1
        shown = matrix(self.index, own["name"], against, order, page_number) if len(chosen) == 1 or against else None
        steps = [] if own["rollouts"] else self.index.steps(own["name"])
        context = {
            "runs": found,
            "axis": _axis(found),
            "figures": figures(steps),
            "repaired": repaired(steps),
            "verdict": verdict(steps, {}),
            "between": self._between(chosen),
            "own": own,
            "advice": "" if own["trained"] else advice_if_cut_off(own["outcomes"], own["rollouts"]),
            "matrix": shown,
            "ends": reward_axis(each[0] for row in shown["rows"] for each in row["samples"] + row["others"])
            if shown
            else None,
            "orders": offered,
            "others": others,
            "passes": passes(self.index, own["name"]) if own["evaluation"] else None,
            "difference": difference(self.index, own["name"], against) if against else None,
            "differences": [row for row in rows if len(set(row[1])) > 1],
            "settings": rows,
            "metrics": self.index.measured(chosen),
            "unscored": self.index.unscored(chosen[0]) if len(chosen) == 1 else [],
            "tools": self.index.tool_failures(chosen[0]) if len(chosen) == 1 else [],
            "failures_of": FAILURES_OF,
            "few_groups": FEW_GROUPS,
            "over": request.query.get("over", ""),
            "fixed": [("runs", name) for name in chosen if len(chosen) > 1],
            "curves": "/curves?" + urlencode([("runs", name) for name in chosen]),
        }
        return self._page("run.html.jinja", context)

    def _between(self, runs: Sequence[str]) -> str:
        return between({run: self.index.steps(run) for run in runs}) if len(runs) == 2 else ""

    async def _curves(self, request: web.Request) -> web.Response:
        names = request.query.getall("runs", [])
        over = request.query.get("over", "groups")
        found = await asyncio.to_thread(curves, self.index, names, over)
        return web.Response(body=orjson.dumps(found), content_type="application/json")

    async def _rollouts(self, request: web.Request) -> web.Response:
        filter = Filter.of(request.query)
        page, choices = await asyncio.gather(
            asyncio.to_thread(self.index.rollouts, filter, PAGE_SIZE), asyncio.to_thread(self.index.choices)
        )
        context = {
            "filter": filter,
            "page": page,
            "axis": reward_axis(row["reward"] for row in page.rows),
            "ignored": ignored(request.query, choices),
            "choices": choices,
            "page_size": PAGE_SIZE,
        }
        response = self._page("rollouts.html.jinja", context)
        if request.headers.get("HX-Trigger") == "filter":  # its form sends empty fields too
            query = filter.to_query()
            response.headers["HX-Push-Url"] = f"/rollouts{query and '?'}{query}"
        return response

    async def _rollout(self, request: web.Request) -> web.Response:
        filter = Filter.of(request.query)
        (run, number), n = _group_of(request), int(request.match_info["n"])
        group = await asyncio.to_thread(self._read, run, number, n)
        before, after = await asyncio.to_thread(self.index.neighbours, filter, (run, number, n))
        name = await asyncio.to_thread(self.index.name_of, run, number)
        frame = {"run": run, "number": number, "name": name, "n": n, "before": before, "after": after, "filter": filter}
        frame |= {"note": await asyncio.to_thread(self.index.note, run, number, n), "may_note": self.notes}

        def make() -> web.Response:
            place = f"{self.index.file_of(run, number)}#{group['rollouts'][n]['rollout_id'][:12]}"
            again = "" if "step" in group else f"lachesis chat --replay {shlex.quote(place)}"  # trainers keep no record
            siblings = partings(group, n)
            context = {
                **rollout_context(group, n, again),
                "settings": self.index.settings(run),
                "partings": siblings,
                "rival": max(siblings, key=lambda each: abs(each["advantage"] or 0.0), default=None),
                "elsewhere": self.index.elsewhere(run, group["item_key"]),
                "frame": frame | {"siblings": self.index.of_item(run, number)},
            }
            return self._page("rollout.html.jinja", context)

        return await self._of_record(group, make)

    async def _note(self, request: web.Request) -> web.Response:
        """Write what a person says of a rollout. `_guard` has refused the pages of other sites; they cannot send this
        type of content either."""
        if not self.notes:
            return web.Response(text="this viewer was started without --notes", status=403)
        if request.content_type != "application/json":
            return web.Response(text="send application/json", status=415)
        (run, number), n = _group_of(request), int(request.match_info["n"])
        group = await asyncio.to_thread(self.index.group, run, number)
        if n >= len(group["rollouts"]):
            raise NoSuchGroup(f"{run}, group {number}: there is no rollout {n}")
        path = (await asyncio.to_thread(self.index.file_of, run, number)).relative_to(self.index.root)
        try:
            line = note_of(path, number, n, group, await request.json())
            await asyncio.to_thread(write_note, self.index.root / folder_of(path), line)
        except (NoteError, JsonlError, ValueError, LookupError, RecursionError) as error:
            return web.Response(text=str(error)[:300], status=400)
        await asyncio.to_thread(self.index.read_notes)
        await self._tell()
        return web.Response(
            body=orjson.dumps({name: line[name] for name in ("tags", "note")}), content_type="application/json"
        )

    async def _of_record(self, group: Mapping[str, Any], make: Callable[[], web.Response]) -> web.Response:
        """A page of a group's line, which may be of any shape; as it is, where the page cannot be made of it."""
        try:
            return await asyncio.to_thread(make)
        except NoSuchGroup:
            raise
        except Exception as error:
            logger.exception("a group is not of the shape that its page takes")
            reason = f"this record is not as its page takes it ({type(error).__name__}: {error}); it is shown as it is"
            return await asyncio.to_thread(self._error, 422, reason, group)

    async def _tokens(self, request: web.Request) -> web.Response:
        """The tokens of one sample, as JSON."""
        run, number = _group_of(request)
        n, sample = int(request.match_info["n"]), int(request.match_info["sample"])

        group = await asyncio.to_thread(self._read, run, number)

        def make() -> web.Response:
            rollouts = group["rollouts"]
            if n >= len(rollouts) or sample >= len(rollout_samples(group, rollouts[n])):
                raise NoSuchGroup(f"{run}, group {number}, rollout {n}: there is no sample {sample}")
            found = sample_tokens(group, n, sample, self._vocabulary_of(run))
            body = orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS)
            return web.Response(body=body, content_type="application/json")

        return await self._of_record(group, make)

    async def _diff(self, request: web.Request) -> web.Response:
        """Two rollouts of any runs side by side: `?a=RUN/GROUP/N&b=...`, where an address of a page is a place, too."""
        places = [_place(request.query.get(name, "")) for name in ("a", "b")]
        # One after the other: where one fails, no thread is left that asks an index which may be closed by then.
        a, b = [await asyncio.to_thread(self._read, *place) for place in places]
        sides = (a, places[0][2]), (a if places[0][:2] == places[1][:2] else b, places[1][2])

        def make() -> web.Response:
            runs = [self.index.settings(place[0]) for place in places]
            same = repr(runs[0].get("tokenizer")) == repr(runs[1].get("tokenizer"))
            rows = _settings(runs)
            parts = [[run, *self.index.name_of(run, number).split(", "), f"rollout {n}"] for run, number, n in places]
            parts = [part[:-1] if part[-2].startswith("rollout ") else part for part in parts]  # a group of one
            shared = [*map(eq, parts[0][:-1], parts[1][:-1]), False].index(False)
            context = {
                **diff_context(*sides, self._vocabulary_of(places[0][0]), same_vocabulary=same),
                "places": places,
                "names": [", ".join(part[shared:]) for part in parts],
                "of": ", ".join(parts[0][:shared]),
                "differences": [row for row in rows if row[1][0] != row[1][1]],
            }
            return self._page("diff.html.jinja", context)

        return await self._of_record(a, make)

    async def _save(self, request: web.Request) -> web.Response:
        """A rollout or a group as a page of one file, or a rollout's record as a groups file, to be saved."""
        (run, number), n = _group_of(request), request.match_info.get("n")
        at = None if n is None else int(n)
        group = await asyncio.to_thread(self._read, run, number, at)

        def make() -> web.Response:
            name = str(group["item_key"] if at is None else group["rollouts"][at]["rollout_id"][:12])
            if at is not None and request.path.startswith("/record/"):
                line = {key: value for key, value in group.items() if key != "tree_credit"}
                return _file(to_json(group_of_one(line, at)) + b"\n", file_name("rollout", name, ".jsonl"))
            called = self.index.name_of(run, number)
            page = group_page(group, called) if at is None else rollout_page(group, at, called)
            name = file_name("group" if at is None else "rollout", name, ".html")
            return _file(page.encode("utf-8", "backslashreplace"), name)

        return await self._of_record(group, make)

    def _read(self, run: str, number: int, n: int | None = None) -> dict[str, Any]:
        """A group, with the setting of its run by which `trees` gives advantages.

        Raises NoSuchGroup, also if it has no rollout `n`.
        """
        group = self.index.group(run, number)
        if n is not None and n >= len(group["rollouts"]):
            raise NoSuchGroup(f"{run}, group {number}: there is no rollout {n}")
        return {**group, "tree_credit": self.index.settings(run).get("tree_credit")}

    def _vocabulary_of(self, run: str) -> TokenTexts | None:
        """The one that was given, or that of the run's tokenizer. Reads a file at first: not for the event loop."""
        if self.vocabulary is not None:
            return self.vocabulary
        settings = self.index.settings(run)
        named = repr(settings.get("tokenizer"))
        if named not in self._vocabularies:
            self._vocabularies[named] = vocabulary_of(settings)
        return self._vocabularies[named]

    async def _group(self, request: web.Request) -> web.Response:
        run, number = _group_of(request)
        only = [int(n) for n in request.query.get("only", "").split(",") if n.isdecimal() and len(n) < 10]
        group = await asyncio.to_thread(self._read, run, number)
        name = await asyncio.to_thread(self.index.name_of, run, number)
        frame = {"run": run, "number": number, "name": name, "filter": Filter.of(request.query)}

        def make() -> web.Response:
            context = group_context(group, self._vocabulary_of(run), only)
            return self._page("group.html.jinja", {**context, "frame": frame})

        return await self._of_record(group, make)


async def serve(
    index: Index,
    host: str,
    port: int,
    vocabulary: TokenTexts | None = None,
    audits: Path | None = None,
    *,
    notes: bool = False,
) -> tuple[web.AppRunner, str]:
    """Serve an index; the runner, to be cleaned up, and the address to open.

    Args:
        notes: who has the token may write notes; who asks from this machine always may.

    Raises:
        SettingsError: the host or the port cannot be used.
    """
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    app = Viewer(index, token, vocabulary, host=host, audits=audits, notes=notes or not token).app()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error) from error
    bound = runner.addresses[0][1]
    name = "localhost" if host in ("127.0.0.1", "::1") else f"[{host}]" if ":" in host else host
    return runner, f"http://{name}:{bound}/" + (f"?token={token}" if token else "")


def _chosen(request: web.Request, known: list[str]) -> list[str]:
    """The runs of `?runs=a,b` and of `?runs=a&runs=b`; a name may hold a comma."""
    found = [
        name
        for value in request.query.getall("runs", [])
        for name in ([value] if value in known else value.split(","))
        if name
    ]
    return list(dict.fromkeys(found))[:12]


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings of several runs side by side."""
    said = [settings_in_words(settings) for settings in runs]
    return [(name, [settings.get(name, "") for settings in said]) for name in sorted({*chain(*said)})]


def _axis(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    means = [run["reward"] for run in runs if run["reward"]]
    return reward_axis(end for mean in means for end in (mean.low, mean.mean, mean.high))


def _place(text: str) -> tuple[str, int, int]:
    """Run, group and number of `RUN/GROUP/N`, or of the address of a rollout's page. Raises HTTPBadRequest."""
    address = re.match(r"(?:https?://[^/?#]*)?(/[^?#]*)", text.strip())
    path = unquote(address[1]).removeprefix("/rollout/") if address else text
    found = re.fullmatch(rf"(.+)/({GROUP})/([0-9]{{1,9}})", path.strip(), re.DOTALL)
    if found is None:
        raise web.HTTPBadRequest(reason="a rollout is RUN/GROUP/N, or the address of its page")
    return found[1], int(found[2].removeprefix("unscored")), int(found[3])


def _group_of(request: web.Request) -> tuple[str, int]:
    return request.match_info["run"], int(request.match_info["group"].removeprefix("unscored"))


def _file(body: bytes, name: str) -> web.Response:
    """An answer that a browser saves."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return web.Response(body=body, content_type="application/octet-stream", headers=headers)
