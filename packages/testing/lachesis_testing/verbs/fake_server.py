"""`lachesis fake-server`: a model server without a model, to try an environment and to measure what it can carry."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from backends.errors import ExitCode
from backends.lazy import quiet_imports
from backends.text import counted
from lachesis.cli import port_number
from lachesis.cli.verb_parser import VerbParser
from lachesis_testing.fake_server import FakeServer, Fault, Lengths, Policy, Scripted
from lachesis_testing.fake_server.faults import fault_plan
from lachesis_testing.fake_server.policies import POLICIES, create_policy
from lachesis_testing.fake_server.updates import PauseMode

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        server = _server(arguments)
    except (ValueError, OSError) as error:
        print(f"lachesis fake-server: {error}", file=sys.stderr)
        return ExitCode.SETTINGS
    return asyncio.run(_serve(server, arguments))


async def _serve(server: FakeServer, arguments: argparse.Namespace) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    if arguments.save_tokenizer is not None:
        server.tokenizer.save_pretrained(str(arguments.save_tokenizer))
    async with server:
        print(_banner(server, arguments), flush=True)
        await stopped.wait()
    for number in SIGNALS:  # `timeout` and some shells send two: the second one must not kill
        signal.signal(number, signal.SIG_IGN)
    counts = server.stats
    print(
        f"{counted(counts['requests'], 'request')}, {counted(counts['completions'], 'completion')}, "
        f"{counted(counts['completion_tokens'], 'token')}, "
        f"{counts['cancelled']} cancelled",
        file=sys.stderr,
    )
    return 0


def _banner(server: FakeServer, arguments: argparse.Namespace) -> str:
    where = f"--openai.base_url {server.base_url} --openai.model_name {server.host.model_name}"
    if arguments.api_key:
        where += f" --openai.api_key {arguments.api_key}"
    folder = arguments.tokenizer or arguments.save_tokenizer or "DIR  (a folder: --save-tokenizer DIR)"
    return (
        f"{server.base_url}\n"
        f"  messages (Phase 1): {where}\n"
        f"  tokens (Phase 2):   {where} --openai.server_type vllm --openai.tokenizer_name {folder}\n"
        f"  counts:             {server.root_url}/fake/stats"
    )


def _policy(arguments: argparse.Namespace) -> Policy:
    policy = create_policy(arguments.policy, lengths=arguments.lengths, script=arguments.say)
    if arguments.by_turn and not isinstance(policy, Scripted):
        raise ValueError("--by-turn is an option of the policy 'script'")
    return Scripted(*arguments.say, by_turn=True) if arguments.by_turn else policy


def _server(arguments: argparse.Namespace) -> FakeServer:
    tokenizer = None
    with quiet_imports():  # transformers warns that there is no PyTorch, which nothing here needs
        import transformers  # noqa: F401
    if arguments.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(arguments.tokenizer), local_files_only=True)
    return FakeServer(
        _policy(arguments),
        faults=dict(arguments.faults),
        tokenizer=tokenizer,
        seed=arguments.seed,
        vary=arguments.vary,
        model_name=arguments.model_name,
        context_length=arguments.context_length,
        api_key=arguments.api_key,
        logprobs_mode=arguments.logprobs_mode,
        tool_call_parser=None if arguments.tool_call_parser == "none" else arguments.tool_call_parser,
        mean_length=arguments.mean_length,
        latency=arguments.latency,
        tokens_per_second=arguments.tokens_per_second,
        max_concurrency=arguments.max_concurrency,
        prefix_cache=arguments.prefix_cache,
        data_parallel_size=arguments.data_parallel_size,
        prefill_tokens_per_second=arguments.prefill_tokens_per_second,
        images=arguments.images,
        update_every=arguments.update_every,
        update_mode=arguments.update_mode,
        update_pause=arguments.update_pause,
        slow_start=arguments.slow_start,
        refuse_until_ready=arguments.refuse_until_ready,
        keep_requests=0,
        record=arguments.record,
        host=arguments.host,
        port=arguments.port,
    )


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis fake-server", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=port_number, default=8000, help="0 takes a free one (default: 8000)")
    add("--model-name", default="fake", help="any other name is answered with 404 (default: fake)")
    add("--api-key", default="", help="requests must carry this key")
    add("--tokenizer", type=Path, metavar="DIR", help="a folder that transformers loads (default: a small BPE)")
    add(
        "--save-tokenizer",
        type=Path,
        metavar="DIR",
        help="write the tokenizer into a folder, for the client",
        rare=True,
    )
    add("--policy", choices=sorted(POLICIES), default="words", help="who answers (default: words)")
    add("--say", action="append", default=[], metavar="TEXT", help="an answer of the policy 'script'; repeatable")
    add(
        "--by-turn",
        action="store_true",
        help="each conversation hears the --say texts from the first (script)",
        rare=True,
    )
    add("--lengths", type=_value(Lengths.parse), metavar="N[-M]", help="tokens of an answer, as 200 or 50-400")
    add(
        "--mean-length",
        type=float,
        default=64.0,
        help="mean tokens of an answer of the policy 'tokens' (default: 64)",
        rare=True,
    )
    add("--seed", type=int, default=0, help="random seed (default: 0)", rare=True)
    add("--vary", action="store_true", help="answer the same prompt differently each time")
    add("--latency", type=_value(_latency), default=(0.0, 0.0), metavar="S[-S]", help="seconds, as 0.5 or 0.2-3")
    add("--tokens-per-second", type=float, help="speed of one completion, on top of --latency")
    add("--max-concurrency", type=int, help="requests worked on at once; the others wait")
    add(
        "--prefix-cache",
        type=int,
        default=0,
        metavar="TOKENS",
        help="kept by each rank; 0 caches nothing (default)",
        rare=True,
    )
    add("--data-parallel-size", type=int, default=1, help="ranks, each with a prefix cache (default: 1)", rare=True)
    add("--prefill-tokens-per-second", type=float, help="speed of a rank for the uncached tokens of prompts", rare=True)
    add("--images", action="store_true", help="take images, with the tokens of Qwen-VL", rare=True)
    add("--update-every", type=float, metavar="S", help="new weights and a new version every S seconds", rare=True)
    add(
        "--update-mode",
        choices=get_args(PauseMode),
        default="abort",
        metavar="MODE",
        help="of requests in flight (default: abort)",
        rare=True,
    )
    add(
        "--update-pause",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that an update takes (default: 0)",
        rare=True,
    )
    add("--context-length", type=int, default=32768, help="tokens of prompt and answer (default: 32768)", rare=True)
    add(
        "--logprobs-mode",
        choices=("raw", "processed"),
        default="raw",
        help="as vLLM's flag, without '_logprobs'",
        rare=True,
    )
    add("--tool-call-parser", default="hermes", help="for the chat route; 'none' leaves calls in the text", rare=True)
    add(
        "--faults",
        type=_value(_faults),
        default=[],
        metavar="NAME=P,...",
        help="what goes wrong, and how often, as rate_limited=0.1; --help-all names all",
        rare=f"what goes wrong, and how often: {', '.join(Fault)}",
    )
    add("--slow-start", type=float, default=0.0, metavar="S", help="seconds of 503 after the start", rare=True)
    add("--refuse-until-ready", action="store_true", help="refuse connections during --slow-start", rare=True)
    add("--record", type=Path, metavar="FILE", help="append a JSON line for each request")
    return parser


def _value(convert: Any) -> Any:
    """A converter whose `ValueError` argparse shows."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _latency(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        pair = float(low), float(high or low)
    except ValueError:
        raise ValueError(f"{text!r} is not a latency; write 0.5, or 0.2-3") from None
    if not 0 <= pair[0] <= pair[1]:
        raise ValueError(f"{text!r} is not a latency: the larger number comes last")
    return pair


def _faults(text: str) -> list[tuple[str, float]]:
    pairs = []
    for part in filter(None, text.split(",")):
        name, _, probability = part.partition("=")
        try:
            pairs.append((name.strip(), float(probability or 1)))
        except ValueError:
            raise ValueError(f"{part!r}: write {name}=0.1") from None
    fault_plan(dict(pairs))
    return pairs
