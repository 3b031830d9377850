"""`lachesis view [FOLDER]`: show a folder of runs in a browser, while it grows, or the JSON files of audits."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from lachesis.cli import port_number
from lachesis.cli.verb_parser import VerbParser

PORT = 7007


def address() -> str:
    """Where the pages are without options."""
    return f"http://127.0.0.1:{PORT}"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the pages until Ctrl+C."""
    parser = VerbParser(prog="lachesis view", description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("data"),
        metavar="FOLDER",
        help="folder of the runs, one of its files, or a JSON file of `lachesis audit` (default: data)",
    )
    parser.add_argument("--port", type=port_number, default=PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: %(default)s); beyond this machine, the pages ask for a token",
    )
    parser.add_argument(
        "--index", type=Path, help="where the index is kept (default: a file in ~/.cache/lachesis/view)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer.json, a folder with one, or a .gguf file: the texts of tokens (default: the run's own)",
    )
    parser.add_argument(
        "--notes", action="store_true", help="with --host: let anyone who has the token write notes and tags"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments = parser.parse_args(argv)
    if arguments.folder.suffix == ".jsonl" and arguments.folder.is_file():
        arguments.folder = arguments.folder.parent
    if arguments.folder.is_file() and arguments.folder.suffix != ".json":
        parser.error(f"{arguments.folder} is neither a folder of runs nor a JSON file of `lachesis audit`")
    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    from lachesis_view.app import serve
    from lachesis_view.index import Index
    from lachesis_view.token_text import read_vocabulary

    vocabulary = read_vocabulary(arguments.tokenizer) if arguments.tokenizer else None
    shown = arguments.folder
    index = Index(shown.parent if shown.is_file() else shown, arguments.index)
    audits = shown if shown.is_file() else None
    runner, url = await serve(index, arguments.host, arguments.port, vocabulary, audits, notes=arguments.notes)
    url = url.replace("/?", "/audits?") if "?" in url and shown.is_file() else url + "audits" * shown.is_file()
    print(f"{url}\nshows {shown if shown.is_file() else index.root}; Ctrl+C stops it", flush=True)
    if audits is None and not await asyncio.to_thread(_has_runs, index.root):
        print(f"no runs below {index.root} yet; make one with `lachesis process ENV`", file=sys.stderr)
    if arguments.open:
        import webbrowser

        await asyncio.to_thread(webbrowser.open, url)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        await asyncio.get_running_loop().shutdown_default_executor()  # pages that are being made use the index
        index.close()
    return 0


def _has_runs(root: Path) -> bool:
    """Of the files: what the index has is not all of them at a first start."""
    from lachesis_view.files import kind_of

    return any(map(kind_of, root.rglob("*.jsonl")))
