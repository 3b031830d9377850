"""A registry of container images on loopback, with one image, for clients that pull."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registry:
    """`name` is the image to pull. `requests` lists the method and path of each request."""

    def __init__(self, layer: bytes, login: tuple[str, str] | None) -> None:
        """`layer` is a tar file of the whole image; `login` is a user and a password that every request needs."""
        self._login = base64.b64encode(":".join(login).encode()).decode() if login else None
        self.requests: list[str] = []
        packed = gzip.compress(layer, 1)
        config = json.dumps(
            {
                "architecture": _MACHINES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": {"Env": ["PATH=/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        parts = {
            "config": ("application/vnd.docker.container.image.v1+json", config),
            "layer": ("application/vnd.docker.image.rootfs.diff.tar.gzip", packed),
        }
        described = {
            key: {"mediaType": kind, "size": len(data), "digest": _digest(data)} for key, (kind, data) in parts.items()
        }
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST}
        manifest |= {"config": described["config"], "layers": [described["layer"]]}
        text = json.dumps(manifest).encode()
        self._files = {f"/v2/team/tool/blobs/{_digest(data)}": (kind, data) for kind, data in parts.values()}
        for reference in ("1.0", _digest(text)):
            self._files[f"/v2/team/tool/manifests/{reference}"] = (_MANIFEST, text)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.requests.append(f"{self.command} {self.path}")
                if registry._login and self.headers.get("Authorization") != f"Basic {registry._login}":
                    return self._answer(401, "application/json", b'{"errors": [{"code": "UNAUTHORIZED"}]}')
                if self.path == "/v2/":
                    return self._answer(200, "application/json", b"{}")
                kind, data = registry._files.get(self.path, ("application/json", b""))
                if not data:
                    return self._answer(404, kind, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
                return self._answer(200, kind, data)

            do_HEAD = do_GET

            def _answer(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
                if status == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="registry"')
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Docker-Content-Digest", _digest(data))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.name = f"{self.host}/team/tool:1.0"


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def image_registry(layer: bytes, login: tuple[str, str] | None = None) -> Iterator[Registry]:
    registry = Registry(layer, login)
    thread = threading.Thread(target=registry.server.serve_forever)
    thread.start()
    try:
        yield registry
    finally:
        registry.server.shutdown()
        registry.server.server_close()
        thread.join()
