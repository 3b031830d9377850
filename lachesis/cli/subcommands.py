"""Shared by commands with subcommands: choosing one, and the backend that it works on."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from backends import Backend, BackendError, backend_names, create_backend
from backends.errors import SettingsError
from lachesis.cli import command
from lachesis.cli.verb_parser import VerbParser


def run_subcommand(
    prog: str, description: str | None, subcommands: Mapping[str, tuple[str, str]], argv: Sequence[str] | None
) -> int:
    """Run one subcommand; the exit code.

    Args:
        subcommands: by name: a function (`module:name`), imported only when it is called, which takes the arguments and
            gives the exit code, or the name of a verb that another package has; and the help.
    """
    parser = VerbParser(prog=prog, description=description)
    listed = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, (_, text) in subcommands.items():
        listed.add_parser(name, help=text, add_help=False)  # each parses its own arguments
    parsed, rest = parser.parse_known_args(argv)
    place = subcommands[parsed.subcommand][0]
    if ":" not in place:
        return command(place)(rest)
    module, _, function = place.partition(":")
    code: int = getattr(importlib.import_module(module), function)(rest)
    return code


def add_backend(parser: argparse.ArgumentParser, use: str) -> None:
    """The flags --backend and --options, for `backend_of`."""
    choices = ", ".join(backend_names())
    parser.add_argument("--backend", default="local", help=f"{use}: {choices}, or package.module:Class")
    parser.add_argument("--options", default="{}", metavar="YAML", help="the backend's own options")


def backend_of(arguments: argparse.Namespace) -> Backend:
    """The backend that the flags name.

    Raises:
        SettingsError: there is none of that name, or it does not have these options.
    """
    try:
        return create_backend(arguments.backend, **options_of(arguments.options))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def options_of(text: str) -> dict[str, Any]:
    """The value of `--options`. Raises SettingsError."""
    try:
        options = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SettingsError(f"--options is not YAML: {error}") from None
    if not isinstance(options, dict):
        raise SettingsError("--options takes a mapping such as '{host: worker-1}'")
    return options


async def check(backend: Backend) -> None:
    """Raises `BackendError` where it cannot make sandboxes here."""
    available = await backend.check()
    if not available.ok:
        raise BackendError(f"{backend.name}: {available.detail}. Next step: {available.fix}")
