"""`lachesis serve ENV --as STANDARD`: the environment as a server of another standard."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from backends.errors import SettingsError
from backends.plugins import Registry
from lachesis import HermesAgentBaseEnv
from lachesis.cli import play_environment, port_number
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.prose import print_prose
from lachesis_doors.serving.host import OnBranches, ServingHost
from lachesis_doors.serving.open_rollout import Clients
from lachesis_tokens.wire.service import WebService


class Standard(Protocol):
    """A server whose clients drive the rollouts of a host; or ask for whole ones, where it has an attribute `plays`."""

    def __call__(self, host: ServingHost, address: str, port: int) -> WebService: ...


STANDARDS: Registry[Standard] = Registry(
    "standard",
    "lachesis.standards",
    {
        "mcp": "lachesis_doors.serving.mcp:McpService",
        "nemogym": "lachesis_doors.serving.nemogym:NeMoGymService",
        "openenv": "lachesis_doors.serving.openenv:OpenEnvService",
        "ors": "lachesis_doors.serving.ors:OrsService",
        "prime": "lachesis_doors.serving.prime:PrimeService",
    },
    package="lachesis-doors",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code."""
    arguments = list(argv or ())
    parser = VerbParser(
        prog="lachesis serve ENV --as",
        usage=f"lachesis serve ENV --as {{{','.join(STANDARDS.names())}}} [options]",
        description=__doc__,
    )
    parser.add_argument("--as", dest="standard", required=True, choices=STANDARDS.names(), help="the standard")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", default=8080, type=port_number, help="0 is a free port")
    parser.add_argument("--items", default=1000, type=int, metavar="N", help="tasks of the split `train`, at most")
    parser.add_argument(
        "--idle", default=900.0, type=float, metavar="S", help="seconds after which a silent client's rollout is closed"
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="write the tasks there, as JSON Lines for nemogym and prime",
    )
    parser.add_argument(
        "--on-branches",
        default="error",
        choices=get_args(OnBranches),
        help="of a rollout of several chains of tokens, nemogym gets none (error), the longest or the last one",
    )
    target = [arguments.pop(0)] if arguments and not arguments[0].startswith("-") else []
    if not target:
        parser.print_help()
        return 0 if {"-h", "--help"} & {*arguments} else 2
    if {"-h", "--help"} & {*arguments}:
        parser.print_help()
        return 0
    given, rest = parser.parse_known_args(arguments)
    if given.items < 1 or given.idle <= 0:
        raise SettingsError("--items and --idle are positive numbers")
    return play_environment.main("serve", [*target, *rest], run=partial(_serve, given))


async def _serve(given: argparse.Namespace, env: HermesAgentBaseEnv) -> None:
    """Serve until SIGTERM or Ctrl-C; a second signal does not wait for the rollouts that are open."""
    stop = asyncio.Event()
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def ask_to_stop() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask_to_stop)
    try:
        standard = STANDARDS.load(given.standard)
    except ModuleNotFoundError as error:
        package = f"lachesis-rl[{given.standard}]"
        raise SettingsError(f"--as {given.standard} needs {error.name}: pip install '{package}'") from error
    if given.rows is not None and not hasattr(standard, "rows"):
        raise SettingsError(f"--rows has no meaning with --as {given.standard}, whose clients list the tasks")

    if given.on_branches != "error" and not hasattr(standard, "takes_one_chain"):
        raise SettingsError(f"--on-branches has no meaning with --as {given.standard}")

    def write(service: Any) -> None:
        if given.rows is not None:
            given.rows.write_text("".join(json.dumps(row) + "\n" for row in service.rows()))

    how = {"items": given.items, "idle": given.idle, "on_branches": given.on_branches}
    await serve(standard, env, stop, given.host, given.port, **how, ready=write)


def _left_out(env: HermesAgentBaseEnv, *, driven: bool) -> Iterator[str]:
    """Switch off what served rollouts cannot have. Yields a sentence for each that the settings had chosen.

    Args:
        driven: a client says what a model would say.
    """
    config = env.config
    if config.tree_at is not None or env.branch_at is not None:
        name = "env.tree_at" if config.tree_at is not None else f"{env.run_name}.branch_at"
        yield f"{name} has no effect: a client asks for one rollout at a time, which does not branch"
    if not driven:
        return
    config.max_infra_retries = 0  # a client cannot be asked to say everything again
    if config.compress_context_at is not None:
        config.compress_context_at = config.compress_context_to = None
        yield "env.compress_context_at has no effect: the client keeps the context of its model itself"
    if "delegate_task" in env.tools and "delegate_task" not in (config.disabled_toolsets or ()):
        config.disabled_toolsets = [*(config.disabled_toolsets or ()), "delegate_task"]
        yield "skipped delegate_task: the client would have to run the sub-agent"


async def serve(
    standard: Standard,
    env: HermesAgentBaseEnv,
    stop: asyncio.Event,
    address: str = "127.0.0.1",
    port: int = 0,
    *,
    items: int = 1000,
    idle: float = 900.0,
    on_branches: OnBranches = "error",
    ready: Any = None,
) -> None:
    """Serve until `stop` is set. `ready` is called with the server once it listens."""
    plays = getattr(standard, "plays", False)
    for note in _left_out(env, driven=not plays):
        print_prose(env.console, f"note: {note}", style="yellow")
    env.use_server(Clients())
    async with (
        env.running(),
        ServingHost(env, items=items, idle=idle, driven=not plays, on_branches=on_branches) as host,
        standard(host, address, port) as service,
    ):
        tasks = ", ".join(f"{number} tasks of {split}" for split, number in host.splits.items())
        if ready is not None:
            ready(service)
        said = f"{host.name} is served at {service.root_url}: {tasks}, {host.places} rollouts at once"
        print(said, file=sys.stderr, flush=True)
        await stop.wait()
        await host.drain()
