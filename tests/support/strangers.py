"""Requests to a service from those who may not ask it: web pages, names that lead here, other users."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

PAGES = {
    "another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    "another port of this machine": {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:1"},
    "a form of another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Origin": "null"},
    "a frame of another site": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "iframe",
    },
    "a browser without Sec-Fetch-Site": {"Origin": "http://evil.example"},
    "a page without an origin": {"Origin": "null"},
    "the same name with another scheme's port": {"Origin": "http://127.0.0.1"},
    "an origin that is none": {"Origin": "http://[evil"},
    "two origins": {"Origin": "{own}, http://evil.example"},
}
NAMES = {
    "a name that leads here": {"Host": "evil.example:{port}"},
    "such a page's own requests": {
        "Host": "evil.example",
        "Origin": "http://evil.example",
        "Sec-Fetch-Site": "same-origin",
    },
    "a name that begins like ours": {"Host": "127.0.0.1.evil.example:{port}"},
    "a name that begins with localhost": {"Host": "localhost.evil.example"},
    "a name after a user": {"Host": "127.0.0.1@evil.example"},
    "a name after a port": {"Host": "127.0.0.1:{port}@evil.example"},
    "a port that is none": {"Host": "127.0.0.1:evil.example"},
    "another address": {"Host": "93.184.216.34:{port}"},
    "no name": {"Host": ""},
}
"""Headers of requests, by who sends them."""
LAST_WORDS = {
    "waits for the answer": "",
    "ends its side first": "connection.shutdown(socket.SHUT_WR)",
    "is gone at once": "connection.close(); continue",
}
"""What another user does after the request."""

NOBODY = 65534
_OTHER_USER = """
import encodings.idna, os, socket, sys
os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
host, port, request = sys.argv[1:]
for _ in range(20):
    connection = socket.create_connection((host, int(port)))
    connection.sendall(request.encode())
    {last_words}
    print((connection.recv(65536).decode().split() or [0, 0])[1])
"""


async def status_of(url: str, method: str, headers: dict[str, str]) -> int:
    """The status of one request, whose headers may be no valid ones; 0 if the connection is closed without one."""
    where = urlsplit(url)
    assert where.hostname and where.port
    own = f"http://{where.netloc}"
    values = {name: value.format(port=where.port, own=own) for name, value in headers.items()}
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(_request(url, method, {"Host": where.netloc, **values}).encode())
    answer = (await reader.read()).decode("utf-8", "replace")
    writer.close()
    head = answer.partition("\r\n\r\n")[0].lower()
    status = int(answer.split()[1]) if answer else 0
    assert status == 401 or "access-control-allow-origin" not in head, (headers, head)
    return status


def _request(url: str, method: str, headers: dict[str, str]) -> str:
    where = urlsplit(url)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    path = f"{where.path or '/'}{'?' if where.query else ''}{where.query}"
    return f"{method} {path} HTTP/1.1\r\n{lines}Content-Length: 0\r\nConnection: close\r\n\r\n"


async def check_refused(url: str, method: str = "GET", *, answers: int = 200, users: bool = True) -> None:
    """Asserts that the owner's program is answered, and that nobody else is.

    Args:
        answers: the status that the owner gets without further headers; 401 where the service asks for a key.
        users: whether users are told apart. Only root can play another one.
    """
    assert await status_of(url, method, {}) == answers
    for who, headers in (PAGES | NAMES).items():
        assert await status_of(url, method, headers) in (400, 401, 403), who
    # The question of a browser before a request that no form can make.
    if answers != 401:  # with a key, such requests lack it
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        assert await status_of(url, "OPTIONS", asked) in (403, 404, 405)
    if users and os.getuid() == 0:
        for last_words in LAST_WORDS:
            for status in await as_another_user(url, method, last_words):
                assert status in (0, 401, 403), last_words


async def as_another_user(url: str, method: str, last_words: str) -> list[int]:
    """The statuses that another user of this machine gets; 0 where the connection is closed without one."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    where = urlsplit(url)
    script = _OTHER_USER.replace("NOBODY", str(NOBODY)).format(last_words=LAST_WORDS[last_words])
    asked = _request(url, method, {"Host": where.netloc})
    command = [sys.executable, "-I", "-S", "-c", script, where.hostname or "", str(where.port), asked]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]
