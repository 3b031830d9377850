"""`lachesis batch`: run a file of prompts into ShareGPT files; a second start continues where the first one stopped.

The flags are those of `batch_runner.py`, and more; `lachesis batch --help-all` lists all. Settings of environments and
servers have their own names, --env.NAME and --openai.NAME (`lachesis process ENV --help-all`), also in --config FILE.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any
from urllib.parse import urlsplit

from backends.errors import ExitCode, SettingsError
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser, count
from lachesis.runs.prose import print_table
from lachesis.runs.run_folder import name_problem
from lachesis.settings.flags import close_names, truth

DATA = Path("data")
BATCH_SIZE = 1000
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
AS_SETTINGS = {
    "model": "openai.model_name",
    "base_url": "openai.base_url",
    "api_key": "openai.api_key",
    "max_turns": "env.max_agent_turns",
    "max_tokens": "env.max_token_length",
    "temperature": "env.agent_temperature",
    "distribution": "env.distribution",
    "ephemeral_system_prompt": "env.ephemeral_system_prompt",
}
"""Flag -> the setting that it is another name for."""
PRICES = ("openai.price_per_million_input", "openai.price_per_million_output")
"""The settings that `--prices` sets."""
SAME_NAMES = (
    *("run_name", "batch_size", "concurrency", "samples", "seed", "grace_period", "retry_failed"),
    *("keep_without_reasoning", "allow_missing_toolsets"),
)
"""Flags that are fields of `BatchSettings`."""
RARE = {
    *("dataset_split", "batch_size", "list_distributions", "allow_missing_toolsets", "seed", "provider_sort"),
    *("ephemeral_system_prompt", "prefill_messages_file", "reasoning_disabled", "providers_allowed"),
    *("providers_ignored", "providers_order", "keep_without_reasoning", "resume", "grace_period", "ray", "shards"),
    *("verbose", "log_prefix_chars", "max_total_tokens", "reasoning_effort", "max_seconds", "max_cost", "prices"),
    *("shard", "distribution"),
}
"""Flags that only `--help-all` shows."""
INSTEAD = {
    "env.total_steps": "--max-samples",
    "env.group_size": "--samples",
    "env.max_num_workers": "--concurrency",
    "env.max_num_workers_per_node": "--concurrency",
    "env.data_path_to_save_groups": "--run-name and --output",
}
"""Settings of `process` that have another name here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, or merge shards; the exit code."""
    arguments = list(argv or ())
    if arguments[:1] == ["merge"]:
        return _merge(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--dataset-file={arguments[0]}"
    if sum(text.partition("=")[0].replace("-", "_") == "__dataset_file" for text in arguments) > 1:
        raise SettingsError("the file of prompts is named twice; keep one of them")
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if given.list_distributions:
        return _list_distributions()
    _reject_unknown(parser, rest)
    if given.dataset_file is None and given.env is None:
        parser.error("name the file of prompts: lachesis batch prompts.jsonl --model NAME; or --env ENV")
    given.named = given.run_name is not None or given.shard != (1, 1)
    if given.run_name is None:
        given.run_name = _run_name(given.dataset_file or given.env)
    if problem := name_problem(given.run_name):
        parser.error(f"--run-name {given.run_name!r} {problem}; --output chooses another folder than data")
    if given.verbose:
        logging.basicConfig(level=logging.INFO)
    if given.ray is not None or given.shards is not None:
        return _on_ray(given, arguments)
    return _run(given, rest)


def _run_name(source: str) -> str:
    """For a run without a name: that of its file, dataset or environment."""
    name = source.partition(":")[0]
    return Path(name).stem if name.endswith((".py", ".jsonl", ".json", ".csv", ".parquet")) else name.replace("/", "-")


def _on_ray(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    from lachesis_data.batch.on_ray import play_on_ray

    if given.ray is None or given.shards is None or given.shard != (1, 1):
        raise SettingsError("--ray ADDRESS and --shards N go together, and without --shard: set both")
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--ray")
    own.add_argument("--shards")
    return play_on_ray(given.ray, given.shards, own.parse_known_args(arguments)[1], given.output / given.run_name)


def _parser() -> VerbParser:
    parser = VerbParser(
        prog="lachesis batch",
        description=__doc__,
        usage="%(prog)s FILE --model NAME [--base-url URL] [options]",
    )

    def add(name: str, help_text: str, *others: str, **kwargs: Any) -> None:
        long = [f"--{each}" for each in (*others, name) if not each.startswith("-")]
        short = [each for each in others if each.startswith("-")]
        parser.add_argument(*short, *long, dest=name, help=help_text, rare=name in RARE, **kwargs)

    def number(name: str, help_text: str, *others: str, default: int | None = None) -> None:
        """`others` are its short name, and names of other verbs that go before its own."""
        add(name, help_text, *others, type=count, default=default, metavar="N")

    def switch(name: str, help_text: str) -> None:
        add(name, help_text, nargs="?", const=True, default=False, type=truth, metavar="BOOL")

    add("dataset_file", ".jsonl, .csv, .parquet, or a dataset of the hub (NAME or NAME:CONFIG)", metavar="FILE")
    add("dataset_split", "split of a dataset of the hub (default: train)", default="train", metavar="NAME")
    number("batch_size", f"lines of one batch file (default: {BATCH_SIZE})", default=BATCH_SIZE)
    add("run_name", "the run writes into data/NAME (default: the name of the file)", metavar="NAME")
    add(
        "output", "folder in which the run's folder is (default: data)", "-o", type=Path, default=DATA, metavar="FOLDER"
    )
    add("env", f"the environment that scores: {ENVIRONMENT}", metavar="ENV")
    number("samples", "rollouts of each prompt (default: 1)", "-r", "rollouts", default=1)
    number("concurrency", "rollouts at once (default: 32)", "-c", "num_workers", default=32)
    number("max_samples", "items to run: the first N prompts (default: all)", "-n", "items")
    add(
        "model",
        "name of the model on its server; or embedded, or a GGUF file (default: that of --env or --config)",
        "-m",
        metavar="NAME",
    )
    add("base_url", "URL of the OpenAI-compatible server", "-b", metavar="URL")
    add("api_key", "API key of the server", "-k", metavar="KEY")
    number("max_turns", "limit of turns in a rollout (default: 10)")
    number("max_tokens", "limit of tokens in one answer (default: 2048)", "-t")
    add("temperature", "sampling temperature (default: 1.0)", "-T", type=float, metavar="T")
    add("distribution", "named probabilities of toolsets, drawn for each prompt (default: default)", metavar="NAME")
    switch("list_distributions", "list the distributions and exit")
    switch("allow_missing_toolsets", "skip toolsets that have no tools here")
    add("seed", "seed for drawing toolsets (default: 0)", type=int, default=0, metavar="N")
    add("ephemeral_system_prompt", "appended to requests' system message; in no trajectory", metavar="TEXT")
    add("prefill_messages_file", "JSON list of messages that requests begin with; in no trajectory", metavar="FILE")
    add("reasoning_effort", ", ".join(REASONING_EFFORTS), choices=REASONING_EFFORTS, metavar="LEVEL")
    switch("reasoning_disabled", "the same as --reasoning-effort none")
    for name in ("providers_allowed", "providers_ignored", "providers_order"):
        add(name, "OpenRouter's providers, separated by commas", metavar="A,B")
    add(
        "provider_sort",
        "OpenRouter's order of providers: price, throughput or latency",
        choices=("price", "throughput", "latency"),
        metavar="BY",
    )
    switch("keep_without_reasoning", "keep rollouts without any reasoning, which are otherwise discarded")
    switch("retry_failed", "run rollouts again that failed in earlier starts")
    switch("resume", "accepted: a run always continues what is in its folder")
    add("max_seconds", "end after this many seconds of this start", type=_positive, metavar="SECONDS")
    number("max_total_tokens", "end after this many completion tokens of the run")
    add("max_cost", "end when the run has cost this much; needs --prices", type=_positive, metavar="COST")
    add("prices", "of a million tokens of prompts and of completions: 0.5,1.5", type=_prices, metavar="IN,OUT")
    add(
        "grace_period",
        "seconds for rollouts in flight to finish at the end (default: 60)",
        type=float,
        default=60.0,
        metavar="SECONDS",
    )
    add("shard", "run part I of N, from 1, into data/NAME/shard_I_of_N", type=_shard, default=(1, 1), metavar="I/N")
    add("ray", "run the shards as tasks of a Ray cluster, and merge them; needs --shards", metavar="ADDRESS")
    number("shards", "parts that --ray runs")
    switch("verbose", "log what the run does")
    add("log_prefix_chars", "accepted: no previews are logged, the report shows the rollouts", metavar="N")
    return parser


def _run(given: argparse.Namespace, rest: Sequence[str]) -> int:
    from rich.console import Console

    from lachesis.cli.environment_classes import environment_class
    from lachesis.figures.costs import prices_of
    from lachesis.runs.command_line import announce, note_misspelt_hooks, read_settings
    from lachesis.runs.own_process import run
    from lachesis.runs.results import print_result
    from lachesis_data.batch.prompts import over_rows
    from lachesis_data.batch.rows import Rows
    from lachesis_data.batch.run import BatchSettings, run_batch
    from lachesis_data.batch.shards import shard_folder
    from lachesis_data.batch.totals import Caps

    base = None if given.env is None else environment_class(given.env)
    names = [text.partition("=")[0] for text in rest]
    if base is None and given.model is None and not {"--openai.model_name", "--config"} & {*names}:
        raise SettingsError("name the model: --model NAME --base-url URL, or --model embedded for the small model here")
    if given.dataset_file is None and given.max_samples is None:
        raise SettingsError("--env without --dataset-file runs the environment's own items: set --max-samples")
    env_cls = over_rows(base, seed=given.seed)
    _, arguments = read_settings(
        env_cls, ["process", *rest, *_as_flags(given, base is None, names)], prog="lachesis batch"
    )
    config, servers = arguments["config"], arguments["server_configs"]
    prices = prices_of(servers)
    if given.max_cost is not None and prices is None:
        raise SettingsError("--max-cost needs the prices of a million tokens: --prices IN,OUT")
    announce(f"{given.run_name}: batch, ", servers, Console(emoji=False, stderr=True))
    note_misspelt_hooks(env_cls, Console(emoji=False, stderr=True))
    if given.prefill_messages_file is not None:
        config.prefill_messages = _prefill(given.prefill_messages_file)
    if extra := _extra_body(given, servers[0].base_url or ""):
        config.extra_body = {**(config.extra_body or {}), **extra}
    for server in servers:
        server.num_max_requests_at_once = max(server.num_max_requests_at_once, given.concurrency)
    folders = config.terminal_backend in ("local", "ssh")
    settings = BatchSettings(
        named=given.named,
        folder=shard_folder(given.output / given.run_name, given.shard),
        rows=Rows(
            given.dataset_file,
            split=given.dataset_split,
            prompt_field=config.prompt_field if base is None else None,
            images="none" if config.sandbox == "none" else "folder" if folders else "name",
            limit=given.max_samples,
            shard=given.shard,
        ),
        caps=Caps(seconds=given.max_seconds, tokens=given.max_total_tokens, cost=given.max_cost, prices=prices),
        **{name: getattr(given, name) for name in SAME_NAMES},
    )
    result = run(run_batch(env_cls(**arguments), settings))
    print_result(Console(emoji=False), result)
    return ExitCode.STOPPED if result.reason in Signals.__members__ else int(result.failed)


def _as_flags(given: argparse.Namespace, prompts: bool, names: Sequence[str]) -> list[str]:
    """The flags of the settings that have another name here."""
    values = {setting: getattr(given, name) for name, setting in AS_SETTINGS.items()}
    values |= dict(zip(PRICES, given.prices or (), strict=False))
    if prompts:  # of `batch_runner.py`; an environment has its own
        if not {"--env.enabled_toolsets", "--env.distribution", "--config"} & {*names}:
            # Not chosen: what has no tools here is left out, with a note.
            given.allow_missing_toolsets = given.allow_missing_toolsets or values["env.distribution"] is None
            values["env.distribution"] = values["env.distribution"] or "default"
        if not {"--env.max_agent_turns", "--config"} & {*names}:
            values["env.max_agent_turns"] = values["env.max_agent_turns"] or 10
    chosen = {setting: value for setting, value in values.items() if value is not None}
    if twice := next((setting for setting in chosen if f"--{setting}" in names), None):
        raise SettingsError(f"--{twice} is given twice: it has another name here (see --help); keep one of the two")
    return [f"--{setting}={value}" for setting, value in chosen.items()]


def _extra_body(given: argparse.Namespace, base_url: str) -> dict[str, Any]:
    """Fields of requests, as OpenRouter names them or as the others do."""
    router = (urlsplit(base_url).hostname or "").endswith("openrouter.ai")
    lists = {"only": given.providers_allowed, "ignore": given.providers_ignored, "order": given.providers_order}
    provider: dict[str, Any] = {name: text.split(",") for name, text in lists.items() if text}
    if given.provider_sort:
        provider["sort"] = given.provider_sort
    if provider and not router:
        raise SettingsError(
            f"--providers-* and --provider-sort are fields of OpenRouter; the server is {base_url or 'another one'}: "
            "leave them out, or name its fields with --openai.extra_body"
        )
    body: dict[str, Any] = {"provider": provider} if provider else {}
    effort = "none" if given.reasoning_disabled else given.reasoning_effort
    if effort is not None and router:
        body["reasoning"] = {"enabled": False} if effort == "none" else {"effort": effort}
    elif effort is not None:
        body["reasoning_effort"] = effort
    return body


def _prefill(path: str) -> list[Mapping[str, Any]]:
    try:
        messages = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"--prefill-messages-file {path}: cannot be read as JSON ({error})") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise SettingsError(f"--prefill-messages-file {path}: expected a list of messages")
    return messages


def _reject_unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    for text in rest:
        name = text.partition("=")[0]
        if (setting := name.removeprefix("--")) in INSTEAD:
            raise SettingsError(f"{name} is a setting of `process`; here it is {INSTEAD[setting]}")
        if name.startswith("--") and not name.startswith(("--env.", "--openai.")) and name != "--config":
            flags = [flag for action in parser._actions for flag in action.option_strings]
            near = close_names(name, flags)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise SettingsError(f"unknown flag {name}; {hint}")


def _list_distributions() -> int:
    from rich.console import Console
    from rich.table import Table

    from lachesis_tools.distributions import DISTRIBUTIONS
    from lachesis_tools.toolsets import has_toolset

    table = Table("distribution", "toolsets, in percent", box=None, pad_edge=False)
    for name, chances in DISTRIBUTIONS.items():
        table.add_row(name, ", ".join(f"{each} {percent}" for each, percent in chances.items()))
    print_table(Console(emoji=False), table)
    toolsets = sorted({each for chances in DISTRIBUTIONS.values() for each in chances if not has_toolset(each)})
    Console(emoji=False).print(f"without tools here: {', '.join(toolsets)}", highlight=False)
    return 0


def _merge(argv: Sequence[str]) -> int:
    from lachesis_data.batch.shards import merge_shards

    parser = VerbParser(prog="lachesis batch merge", description="Join the shards of a run.")
    parser.add_argument("run", type=Path, metavar="data/RUN", help="the folder that contains shard_I_of_N")
    out = "where to (default: data/RUN/merged; an earlier one is replaced)"
    parser.add_argument("-o", "--output", old=["--out"], dest="out", type=Path, help=out)
    arguments = parser.parse_args(argv)
    said, complete = merge_shards(arguments.run, arguments.out or arguments.run / "merged")
    print("\n".join(said))
    return int(not complete)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _prices(text: str) -> tuple[float, float]:
    try:
        prompts, completions = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers such as 0.5,1.5, got {text!r}") from None
    return prompts, completions


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()) or not 1 <= int(number) <= int(count):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(number), int(count)
