"""Runs in the interpreter of a guest: serves its environments over lines of JSON.

python host.py SCRIPT TARGET ARGUMENTS

Standard library only, for Python 3.8 and later. SCRIPT is a module of this folder with a class `Guest`. A request is
`{"id", "call", "session", "with"}`; the answer is `{"id", "value"}` or `{"id", "error", "kind", "traceback"}`, after
`{"id", "begun"}` when it is its turn. A `ping` has no `id`, and no answer but that.
Whatever the guest prints goes to standard error. The process ends with its standard input.
"""

import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback

DECLARED = {"size": None, "rewards": "sum", "sessions": None, "network": None}
"""What a guest says of itself, and what holds where it says nothing."""


class GuestHost:
    """One guest, and its sessions."""

    def __init__(self, guest, answers):
        self.guest = guest
        self.answers = answers
        self.sessions = {}

    async def serve(self, request):
        self.say({"id": request["id"], "begun": True})
        if request["call"] == "ping":
            return
        try:
            answer = {"value": await self.value_of(request)}
        except (Exception, SystemExit) as error:
            kind = "lost" if getattr(error, "lost", False) else type(error).__name__
            answer = {"error": str(error) or repr(error), "kind": kind, "traceback": traceback.format_exc()}
        try:
            self.say({"id": request["id"], **answer})
        except Exception as error:
            self.say({"id": request["id"], "error": "not JSON: %r" % error, "kind": "TypeError", "traceback": ""})

    def say(self, answer):
        line = json.dumps(answer, default=plain).encode()
        self.answers.write(line + b"\n")
        self.answers.flush()

    async def value_of(self, request):
        call, session = request["call"], request.get("session")
        given = request.get("with") or {}
        if call == "open":
            # A task, for a session may be closed while it opens.
            self.sessions[session] = asyncio.ensure_future(self.opened(given))
            opened = await self.sessions[session]
            return {"prompt": opened.prompt, "solution": getattr(opened, "solution", None)}
        if call == "versions":
            return versions(**given)
        if session is None:
            return await settled(getattr(self.guest, call)(**given))
        if call == "close":
            opening = self.sessions.pop(session, None)
            if opening is not None:
                await asyncio.wait([opening])
            if opening is None or opening.exception() is not None:
                return None
            opened = opening.result()
            return await settled(opened.close()) if hasattr(opened, "close") else None
        if session not in self.sessions:
            raise SessionLost("the session was in a process that has ended")
        return await settled(getattr(await self.sessions[session], call)(**given))

    async def opened(self, given):
        try:
            return await settled(self.guest.open(**given))
        except SystemExit as error:
            raise RuntimeError("it exits: %s" % error) from error


class SessionLost(Exception):
    lost = True


async def settled(value):
    return await value if inspect.isawaitable(value) else value


def versions(module):
    """Of the distributions that have a module."""
    names = getattr(importlib.metadata, "packages_distributions", dict)().get(module, ())
    return {name: importlib.metadata.version(name) for name in names}


def plain(value):
    """numpy's scalars and arrays, and other things with a form in JSON."""
    for name in ("tolist", "model_dump", "_asdict"):
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, (set, tuple)):
        return list(value)
    raise TypeError("a %s" % type(value).__name__)


async def main(script, target, arguments):
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a guest prints is no answer
    given = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what a guest reads is no request
    os.close(nothing)
    sys.path[0] = os.getcwd()  # not this folder: its modules have the names of the packages that they play
    spec = importlib.util.spec_from_file_location("lachesis_guest", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loop, requests = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for line in given:
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        os._exit(0)  # the owner is gone: whatever runs here is of no use

    threading.Thread(target=read, daemon=True).start()
    first = await requests.get()
    host = GuestHost(None, answers)

    async def load():
        host.guest = await settled(module.Guest(target, **arguments))
        return {name: getattr(host.guest, name, default) for name, default in DECLARED.items()}

    host.value_of, value_of = (lambda request: load()), host.value_of
    await host.serve(first)
    host.value_of = value_of
    running = set()
    while True:
        task = asyncio.ensure_future(host.serve(await requests.get()))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
