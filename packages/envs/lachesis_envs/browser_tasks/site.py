"""The web server of a task, which runs in the sandbox with its Python: only the standard library is there.

It reads the site as a line of JSON from its standard input, and writes its port and then each form that it receives as
a line of JSON to its standard output, which nothing in a page can reach.
"""

from __future__ import annotations

import json
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

MAX_BODY = 65_536


class Site(BaseHTTPRequestHandler):
    pages: dict[str, str] = {}  # noqa: RUF012
    """Path with query -> HTML."""
    guarded: tuple[str, ...] = ()
    """Paths that need a log-in, those of forms too."""
    next_page: dict[str, str] = {}  # noqa: RUF012
    """Path of a form -> page after it; the others lead to /thanks."""
    login: tuple[str, ...] = ()
    """Name and password."""
    cookie = f"session={secrets.token_hex(8)}"

    def do_GET(self) -> None:
        if self.path in self.guarded and not self._is_known():
            self._redirect("/login")
        elif self.path in self.pages:
            self._answer(200, self.pages[self.path])
        else:
            self._answer(404, "<h1>There is no such page</h1>")

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY:
            self._answer(413, "<h1>This is too long</h1>")
            return
        fields = parse_qsl(self.rfile.read(size).decode(errors="replace"), keep_blank_values=True)
        if self.path == "/login":
            if [value for _, value in fields] == list(self.login):
                self._redirect(self.next_page["/login"], self.cookie)
            else:
                self._answer(
                    200, self.pages["/login"].replace("<form", "<p role=alert>Wrong name or password</p><form")
                )
        elif self.path in self.guarded and not self._is_known():
            self._redirect("/login")
        else:
            print(json.dumps({"path": self.path, "fields": fields}), flush=True)
            self._redirect(self.next_page.get(self.path, "/thanks"))

    def _is_known(self) -> bool:
        return self.cookie in self.headers.get("Cookie", "")

    def _redirect(self, path: str, cookie: str = "") -> None:
        self.send_response(303)
        self.send_header("Location", path)
        if cookie:
            self.send_header("Set-Cookie", f"{cookie}; HttpOnly")
        self.end_headers()

    def _answer(self, status: int, html: str) -> None:
        body = html.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        pass  # the output is the record


def main() -> None:
    for name, value in json.loads(sys.stdin.readline()).items():
        setattr(Site, name, value)
    try:
        server = _Server(("127.0.0.1", 8000), Site)
    except OSError:  # where sandboxes share a network
        server = _Server(("127.0.0.1", 0), Site)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
