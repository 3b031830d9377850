"""`lachesis pool`: run sandboxes on many machines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web

from backends import BackendUnavailable, SandboxSpec, create_backend
from backends.errors import ExitCode, LachesisError, SettingsError
from backends.owner import new_id
from lachesis.cli.verb_parser import VerbParser

from .engines.engine import ENGINES, StartLedger
from .link import PoolLink
from .places import folder, known_pool, publish, published, reserved, withdraw
from .pool import Pool
from .profiles import ProfileSettings, read_profiles
from .wire import TOKEN
from .worker import PoolWorker, drained_by_signals

_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lachesis pool`; the exit code."""
    given = _parser().parse_args(argv)
    try:
        verb: Any = given.verb
        return int(asyncio.run(verb(given)))
    except LachesisError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis pool", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    up = verbs.add_parser("up", help="run a pool, and start its workers")
    up.set_defaults(verb=_up)
    up.add_argument("--name", default="default", help="of the pool, for `status` and `down`")
    up.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="what runs and workers connect to")
    up.add_argument("--url", default="", help="how they reach it, if not by the address of --listen")
    up.add_argument("--engine", choices=[*ENGINES.names(), "none"], default="processes", help="what starts workers")
    up.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the engine; see its docs",
    )
    up.add_argument("--least", type=int, default=0, help="workers that are kept without work")
    up.add_argument("--most", type=int, default=1, help="workers at most")
    up.add_argument("--starting", type=int, default=8, help="workers that start at once")
    up.add_argument(
        "--idle", type=float, default=300.0, metavar="S", help="seconds until a worker without work is ended"
    )
    up.add_argument("--failures", type=float, default=0.5, help="the share of starts that may fail (0 to 1)")
    up.add_argument(
        "--lifetime", type=float, default=math.inf, metavar="S", help="seconds after which the engine ends a worker"
    )
    up.add_argument("--profiles", default="", metavar="FILE", help="workers of several kinds; see the docs")
    up.add_argument("--most-of-all", type=float, default=math.inf, metavar="N", help="workers of all profiles at most")
    up.add_argument("--end-with-input", action="store_true", help="end with standard input")
    up.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="seconds until a worker is ready")
    worker = verbs.add_parser("worker", help="serve sandboxes of this machine to a pool")
    worker.set_defaults(verb=_work)
    worker.add_argument("--connect", required=True, metavar="URL", help=f"the pool; its key is in {TOKEN}")
    worker.add_argument("--name", default="", help="unique in the pool")
    worker.add_argument("--profile", default="", help="what it is good for")
    worker.add_argument("--claimed", type=Path, metavar="FILE", help="wait until this file has the name: in a warm pod")
    worker.add_argument(
        "--end-with-input", action="store_true", help="read the key from standard input, and end with it"
    )
    for each in (up, worker):
        each.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="sandboxes of a worker at once")
        each.add_argument("--backend", default="local", help="what makes them")
        each.add_argument("--options", default={}, type=_options, metavar="JSON", help="options of that backend")
        each.add_argument(
            "--spec", default={}, type=_options, metavar="JSON", help="fields of SandboxSpec that rollouts leave open"
        )
        each.add_argument(
            "--warm", action="store_true", help="make sandboxes before they are asked for, and use them again"
        )
    for name, call, text in (("status", _status, "what a pool does"), ("down", _down, "end a pool and its workers")):
        each = verbs.add_parser(name, help=text)
        each.set_defaults(verb=call)
        each.add_argument("name", nargs="?", default="", help="of the pool; not needed if there is one")
    verbs.choices["status"].add_argument("--json", action="store_true", help="for programs")
    return parser


def _options(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("options are a JSON object")
    return found


async def _input(pipe: TextIO) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _up(given: argparse.Namespace) -> int:
    profiles = read_profiles(given.profiles, _settings(given))
    if len(profiles) > 1 and sum(max(1, each.least) for each in profiles.values()) > given.most_of_all:
        raise SettingsError("--most-of-all leaves no worker for some profile. Next step: raise it, or lower least")
    with reserved(given.name):
        return await _serve(given, profiles)


async def _serve(given: argparse.Namespace, profiles: Mapping[str, ProfileSettings]) -> int:
    host, _, port = given.listen.rpartition(":")
    token = os.environ.get(TOKEN) or secrets.token_hex(24)
    try:
        listening = socket.create_server((host.strip("[]"), int(port)), family=_family(host), reuse_port=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--listen {given.listen}: {error}. Next step: HOST:PORT, with port 0 for any") from None
    shown = _own_address() if host in ("0.0.0.0", "[::]") else host
    url = (given.url or f"http://{shown}:{listening.getsockname()[1]}").rstrip("/")
    pool = Pool(
        token,
        {name: settings.profile(name, url, token) for name, settings in profiles.items()},
        most=given.most_of_all,
        start_timeout=given.start_timeout,
        ledger=StartLedger(given.name),
    )
    runner = web.AppRunner(pool.application(), access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    place = publish(given.name, url, token)
    print(f"pool {given.name} is at {url}; runs on this machine find it, others need LACHESIS_POOL_URL and {TOKEN}")
    print(f"the key is in {place}", flush=True)
    drained_by_signals(pool.stop)
    if given.end_with_input:
        ended = asyncio.create_task((await _input(sys.stdin)).read())
        ended.add_done_callback(lambda _: pool.stop())
    try:
        await pool.keep()
    finally:
        withdraw(given.name)
        await runner.cleanup()
    said = pool.described()
    left = pool.ledger.left()
    rest = f"these workers may be left: {', '.join(left)}" if left else "nothing is left"
    print(f"pool {given.name} has ended: {said['leases']} leases, {said['lost']} lost with workers, {rest}")
    return 1 if left else 0


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def _own_address() -> str:
    """By which others most likely reach this machine. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("10.255.255.255", 1))
            return str(asking.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _settings(given: argparse.Namespace) -> ProfileSettings:
    options: dict[str, Any] = {}
    for each in given.engine_option:
        name, equals, value = each.partition("=")
        if not equals:
            raise SettingsError(f"--engine-option {each!r} is not NAME=VALUE")
        options[name] = value
    names = {each.name for each in fields(ProfileSettings)} - {"engine_options"}
    return ProfileSettings(**{name: getattr(given, name) for name in names}, engine_options=options)


async def _work(given: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    token = os.environ.get(TOKEN, "")
    name = given.name or f"{socket.gethostname()}-{new_id()[-6:]}"
    ended = None
    if given.end_with_input:
        reader = await _input(sys.stdin)
        token = (await reader.readline()).decode().strip()
        ended = asyncio.create_task(reader.read())
    backend = create_backend(given.backend, **given.options)
    available = await backend.check()
    if not available.ok:
        raise SettingsError(f"backend {given.backend!r}: {available.detail}. Next step: {available.fix}")
    if given.claimed is not None and not (name := await _claimed(given.claimed)):
        return 0
    try:
        defaults = SandboxSpec(**given.spec)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--spec: {error}") from None
    worker = PoolWorker(
        given.connect,
        token,
        backend,
        name=name,
        slots=given.slots,
        profile=given.profile,
        defaults=defaults,
        warm=given.warm,
    )
    drained_by_signals(worker.drain)
    serving = asyncio.create_task(worker.serve())
    await asyncio.wait({serving, *([ended] if ended is not None else [])}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():  # whoever has started it is gone
        serving.cancel()
        await asyncio.wait({serving})
        return 0
    if ended is not None:
        ended.cancel()
    serving.result()
    return 0


async def _claimed(file: Path) -> str:
    """What a file has once something is in it; empty if this process has to end before."""
    ended = asyncio.Event()
    drained_by_signals(ended.set)
    while not ended.is_set():
        with contextlib.suppress(OSError):
            if name := file.read_text().strip():
                return name
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.2)
    return ""


async def _ask(method: str, path: str, pool: str) -> Any:
    try:
        return await PoolLink(partial(asyncio.to_thread, known_pool, pool=pool)).ask(method, path)
    except BackendUnavailable as error:
        step = f"if it was killed, `lachesis pool up` removes what it left; its file is in {folder()}"
        raise SettingsError(f"{error}; {step}") from None


async def _status(given: argparse.Namespace) -> int:
    said = await _ask("GET", "status", given.name)
    if given.json:
        print(json.dumps(said))
        return 0
    states = ", ".join(f"{count} {state}" for state, count in said["slots"].items() if count)
    engine, workers = said["engine"] or "no engine", len(said["workers"])
    print(f"pool {said['pool']} ({engine}): {workers} workers, {said['starting']} starting")
    print(f"slots: {states or 'none'}; {said['waiting']} leases wait")
    print(f"so far: {said['leases']} leases, {said['refused']} refused, {said['lost']} lost with their workers")
    for worker in said["workers"]:
        print(
            f"  {worker['name']:<40} {worker['busy']} of {worker['slots']}{' draining' if worker['draining'] else ''}"
        )
    return 0


async def _down(given: argparse.Namespace) -> int:
    try:
        url, _ = known_pool(pool=given.name)
    except BackendUnavailable as error:
        raise SettingsError(str(error)) from None
    await _ask("POST", "stop", given.name)
    while any(place["url"] == url for place in published().values()):  # noqa: ASYNC110  (another process removes it)
        await asyncio.sleep(0.1)
    print("the pool and its workers have ended")
    return 0
