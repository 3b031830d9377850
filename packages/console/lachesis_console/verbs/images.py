"""`lachesis images build|list|prune`: make images of Dockerfiles, list and remove layers that builds have left."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from backends.images import Build, image_for, listed, prune
from lachesis.cli.subcommands import add_backend, backend_of
from lachesis.cli.verb_parser import VerbParser

_DAY = 86_400.0


def parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis images", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="build the image of a Dockerfile, and print the value for SandboxSpec.image")
    build.add_argument("context", type=Path, help="folder of the build context")
    build.add_argument("--file", default="Dockerfile", help="the Dockerfile, below the context (default: %(default)s)")
    build.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="value of an ARG")
    build.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g")
    add_backend(build, "backend whose sandboxes will use the image")
    verbs.add_parser("list", help="every layer on this machine, the last used ones first")
    pruning = verbs.add_parser("prune", help="remove layers that nobody has used for some time")
    pruning.add_argument("--unused", type=float, default=30.0, metavar="DAYS", help="default: %(default)g; 0: all")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsing = parser()
    arguments = parsing.parse_args(argv)
    if arguments.verb == "build":
        if wrong := [each for each in arguments.arg if "=" not in each]:
            parsing.error(f"--arg takes NAME=VALUE, not {wrong[0]!r}")
        args = dict(each.split("=", 1) for each in arguments.arg)
        build = Build(arguments.context, arguments.file, args, arguments.timeout)

        def tell(line: str) -> None:
            print(line, file=sys.stderr)

        image = asyncio.run(image_for(build, backend_of(arguments), tell=tell))
        print(image.image)
        return 0
    layers = listed() if arguments.verb == "list" else prune(arguments.unused * _DAY)
    for layer in layers:
        age = (time.time() - layer.used) / _DAY
        size = f"{layer.size / (1 << 20):.1f} MiB"
        print("  ".join([layer.key[:12], f"{age:.1f} days unused", size, layer.instruction]))
    word = "layer" if len(layers) == 1 else "layers"
    done = "" if arguments.verb == "list" else " removed"
    print(f"{len(layers)} {word}{done}", file=sys.stderr)
    return 0
