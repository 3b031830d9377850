"""`lachesis compress`: fit long trajectories into a budget of tokens, with a summary instead of their middle turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from backends.errors import SettingsError
from backends.text import counted
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.progress import Progress, Standing
from lachesis.runs.prose import print_table
from lachesis.runs.results import program
from lachesis.runs.run_folder import refuse_files_of_runs
from lachesis_data.compression.compressor import NOT_VALID, Compressor, Summarizer
from lachesis_data.compression.files import (
    CompressionJob,
    EntrySample,
    compress_file,
    compressed_lines,
    find_jobs,
    left_out,
    read_progress,
    sampled_lines,
)
from lachesis_data.compression.metrics import CompressionTotals, write_metrics
from lachesis_data.compression.settings import CompressionFileSettings, read_settings
from lachesis_data.compression.summary import (
    Passage,
    SummaryAnswer,
    SummaryFailed,
    clean_summary,
    extractive_summary,
    summary_request,
)
from lachesis_messages.records.jsonl import JsonlError

if TYPE_CHECKING:
    from lachesis_client import OpenAIServer
    from lachesis_tokens.templates.conversation_tokens import ConversationTokens

DEFAULT_CONFIG: Final = Path("configs/trajectory_compression.yaml")
LOCAL_CONTEXT: Final = 8192
"""Tokens of context of a summariser that runs here."""
LOCAL_REQUESTS: Final = 2
"""More at once make each as much slower, up to its timeout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compress, write the metrics and print a table; the exit code: 1 where an entry could not be compressed, or where
    there is none."""
    parser = _parser()
    given = parser.parse_args(argv)
    if (given.file is None) is (given.input is None):
        parser.error("name one file or folder: lachesis compress PATH, or --input PATH")
    given.input = given.input or given.file
    settings = _settings(given)
    jobs = find_jobs(given.input, given.output, settings.output.output_suffix)
    for job in jobs:
        refuse_files_of_runs(job.output)
    if others := left_out(given.input, jobs):
        names = ", ".join(path.name for path in others)
        print(f"note: left out {names}; to compress one, name it: lachesis compress {others[0]}", file=sys.stderr)
    return asyncio.run(_run(given, settings, jobs))


async def _run(given: argparse.Namespace, settings: CompressionFileSettings, jobs: Sequence[CompressionJob]) -> int:
    console, totals, kept = Console(emoji=False), CompressionTotals(), 0
    counter = await asyncio.to_thread(_counter, settings.tokenizer.name, settings.tokenizer.trust_remote_code)
    sample = EntrySample(given.sample_percent, given.seed)
    with Progress(console, "compress") as progress, ThreadPoolExecutor(settings.processing.num_workers) as threads:

        def show(*, last: bool = False) -> None:
            note = f"{totals.sums['was_compressed']} compressed, {totals.sums['failed']} failed"
            progress.show(Standing(totals.sums["entries"], -1, "entries", note), last=last)

        def report(metrics: dict[str, Any], earlier: bool = False) -> None:
            nonlocal kept
            kept += earlier
            totals.add(metrics)
            show()

        async with _summarizer(settings, counter, given) as (summarize, concurrency):
            compressor = Compressor(settings, counter, summarize, threads)
            for job in jobs:
                if given.dry_run:
                    lines = sampled_lines(job.source, sample)
                    async with aclosing(compressed_lines(job.source, lines, compressor, concurrency)) as surveyed:
                        async for _, _, done in surveyed:
                            report(done.metrics)
                    continue
                await compress_file(
                    job,
                    compressor,
                    settings=_digest(settings, given),
                    sample=sample,
                    concurrency=concurrency,
                    save_over_limit=settings.processing.save_over_limit,
                    report=report,
                )
        show(last=True)
    if kept:
        console.print(f"{counted(kept, 'line')} finished by an earlier start", highlight=False)
    if not given.dry_run:
        _finish(jobs, settings, totals, folder=given.input.is_dir(), console=console)
    if totals.sums["entries"]:
        print_table(console, _table(settings, totals, dry_run=given.dry_run))
    if totals.over:
        print(f"  {_why_over(settings, totals)}", file=sys.stderr)
    for kind, entries in totals.errors.items():
        print(f"  left as they were: {counted(entries, 'line')}, {kind}", file=sys.stderr)
    if totals.sums["entries"] and totals.errors[NOT_VALID] == totals.sums["entries"]:
        said = "none of its lines is a conversation; `lachesis batch` runs a file of prompts"
        print(f"error: {given.input}: {said}", file=sys.stderr)
    left = totals.sums["entries"] - (0 if settings.processing.save_over_limit else len(totals.over))
    if given.input.is_file() and not given.input.stat().st_size:
        return 0
    if not totals.sums["entries"]:
        print(f"error: {given.input} has no entries", file=sys.stderr)
    elif given.dry_run:
        return 1 if totals.sums["failed"] else 0
    elif not left:
        print("error: no entry is left: with save_over_limit false, those over the limit are left out", file=sys.stderr)
    elif totals.errors[NOT_VALID] < totals.sums["entries"]:
        written = jobs[-1].output  # of a run: those that completed
        out = quote(str(written.with_name(f"{written.stem}_openai.jsonl")))
        print(f"next  {program()} trajectories convert {quote(str(written))} --to openai -o {out}   (or trl, parquet)")
    return 1 if totals.sums["failed"] or not left else 0


def _finish(
    jobs: Sequence[CompressionJob],
    settings: CompressionFileSettings,
    totals: CompressionTotals,
    *,
    folder: bool,
    console: Console,
) -> None:
    """Write the metrics, then remove the progress files."""
    first = jobs[0].output
    path = first.parent / settings.metrics.output_file if folder else first.with_name(f"{first.stem}_metrics.json")
    outputs = f"{counted(len(jobs), 'file')} in {first.parent}" if folder else str(first)
    metrics = path if settings.metrics.enabled else "none"
    if settings.metrics.enabled:
        rows = ({"file": job.output.name, **row} for job in jobs for row in read_progress(job))
        try:
            write_metrics(path, totals, rows if settings.metrics.per_trajectory else None)
        except JsonlError as error:
            reason = f"{error.reason}; the entries are written: make room, and start again for the metrics"
            raise JsonlError(path, reason) from error
    for job in jobs:
        job.progress.unlink()
    console.print(f"{outputs}; metrics: {metrics}", highlight=False, soft_wrap=True)


@asynccontextmanager
async def _summarizer(
    settings: CompressionFileSettings, counter: ConversationTokens, given: argparse.Namespace
) -> AsyncIterator[tuple[Summarizer | None, int]]:
    """What writes the summaries, and how many entries are worked on at once."""
    concurrency, tokens = settings.processing.max_concurrent_requests, settings.compression.summary_target_tokens
    if given.dry_run:
        yield None, concurrency
    elif given.extractive:

        async def extract(passages: Sequence[Passage]) -> SummaryAnswer:
            return SummaryAnswer(await asyncio.to_thread(extractive_summary, passages, tokens, counter.text))

        yield extract, settings.processing.num_workers
    else:
        async with _server(settings) as (server, longest):
            concurrency = server.settings.max_concurrency
            yield partial(_summarize, settings, counter, server, longest), concurrency


async def _summarize(
    settings: CompressionFileSettings,
    counter: ConversationTokens,
    server: OpenAIServer,
    longest: int | None,
    passages: Sequence[Passage],
) -> SummaryAnswer:
    from lachesis_client.errors import InferenceError, ServerUnavailable, Unauthorized
    from lachesis_messages.messages import FinishReason

    tokens = settings.compression.summary_target_tokens
    request = await asyncio.to_thread(summary_request, passages, tokens, max_tokens=longest, count=counter.text)
    try:
        answer = await server.chat(
            [{"role": "user", "content": request}],
            max_tokens=2 * tokens,
            temperature=settings.summarization.temperature,
        )
    except Unauthorized:
        raise  # no entry would get a summary
    except InferenceError as error:
        raise SummaryFailed(str(error), error.attempts if isinstance(error, ServerUnavailable) else 1) from error
    if answer.finish_reason is FinishReason.LENGTH:
        raise SummaryFailed(f"it was not finished after {2 * tokens} tokens", answer.attempts)
    return SummaryAnswer(clean_summary(answer.message.text), answer.attempts)


@asynccontextmanager
async def _server(settings: CompressionFileSettings) -> AsyncIterator[tuple[OpenAIServer, int | None]]:
    """A client of the summariser, and the longest request that it takes. Starts a model that runs here."""
    from lachesis.settings.server_settings import EMBEDDED, key_for
    from lachesis_client import OpenAIServer, ServerSettings
    from lachesis_tokens.engines.embedded import EmbeddedServer

    own, processing = settings.summarization, settings.processing
    client: dict[str, Any] = {
        "timeout": processing.per_trajectory_timeout,
        "max_retries": own.max_retries,
        "first_retry_delay": own.retry_delay,
        "retry_deadline": processing.per_trajectory_timeout,
    }
    if own.model == EMBEDDED or own.model.endswith(".gguf"):
        parallel = min(LOCAL_REQUESTS, processing.max_concurrent_requests)
        model = "smollm2" if own.model == EMBEDDED else Path(own.model)
        room = LOCAL_CONTEXT - 2 * settings.compression.summary_target_tokens
        if room <= 0:
            raise SettingsError(f"compression.summary_target_tokens is too much for {own.model}; set 2000 or less")
        async with (
            EmbeddedServer(model, threads=os.cpu_count() or 1, parallel=parallel, context=LOCAL_CONTEXT) as embedded,
            OpenAIServer(embedded.settings(**client, tool_call_parser=None)) as server,
        ):
            # Its tokenizer may be another than the counter's, and its template writes a little too.
            yield server, min(own.max_prompt_tokens or room, room * 3 // 4)
        return
    if not own.model or not own.base_url:
        missing = "model" if not own.model else "base_url"
        raise SettingsError(
            f"summarization.{missing} is not set: name a model and its server in the YAML file, or take --extractive"
        )
    key = os.environ.get(own.api_key_env, "") if own.api_key_env else ""
    client |= {"max_concurrency": processing.max_concurrent_requests, "api_key": key or key_for(own.base_url)}
    async with OpenAIServer(ServerSettings(own.base_url, own.model, **client)) as server:
        await server.check()
        yield server, own.max_prompt_tokens


def _counter(name: str, trust_remote_code: bool) -> ConversationTokens:
    """What counts tokens with the tokenizer `name` and its chat template. Blocks."""
    from lachesis_client.errors import PromptError
    from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
    from lachesis_tokens.server.serving import named_tokenizer
    from lachesis_tokens.templates.conversation_tokens import ConversationTokens

    tokenizer = named_tokenizer(name, "tokenizer", trust_remote_code=trust_remote_code)
    try:
        return ConversationTokens(DatasetPrompts(tokenizer))
    except (OSError, ValueError, PromptError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError(f"tokenizer {name!r} cannot be used ({reason}); name another with --tokenizer") from error


def _settings(given: argparse.Namespace) -> CompressionFileSettings:
    changes: dict[str, dict[str, Any]] = {}
    if given.target_max_tokens is not None:
        changes["compression"] = {"target_max_tokens": given.target_max_tokens}
    if given.tokenizer is not None:
        changes["tokenizer"] = {"name": given.tokenizer}
    return read_settings(given.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None), changes)


def _digest(settings: CompressionFileSettings, given: argparse.Namespace) -> bytes:
    """Everything that the output depends on, apart from the input."""
    sections = settings.model_dump(mode="json", include={"tokenizer", "compression", "protected_turns", "output"})
    processing = {name: getattr(settings.processing, name) for name in ("skip_under_target", "save_over_limit")}
    summary = "extractive" if given.extractive else settings.summarization.model_dump(mode="json")
    said = [sections, processing, summary, given.sample_percent, given.seed]
    return blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=32).digest()


def _why_over(settings: CompressionFileSettings, totals: CompressionTotals) -> str:
    """Why entries are longer than the target although nothing failed, and what to change."""
    budget, turns = settings.compression, settings.protected_turns
    target, summary = budget.target_max_tokens, budget.summary_target_tokens
    alone = [tokens for tokens in totals.over if tokens > target]
    said = [f"still over the limit, {len(totals.over):,} of {totals.sums['entries']:,}"]
    if alone:
        typical, most = int(median(alone)), max(alone)
        said.append(
            f"in {len(alone)} the protected turns alone take {typical:,} tokens (at most {most:,}), and the limit is "
            f"{target:,}"
        )
    if rest := [tokens for tokens in totals.over if tokens <= target]:
        said.append(
            f"in {len(rest)} the protected turns take {int(median(rest)):,} of {target:,}, which leaves too little for "
            f"a summary (compression.summary_target_tokens is {summary:,}) or for turns that stay"
        )
    first = [f"first_{role}" for role in ("system", "human", "gpt", "tool") if getattr(turns, f"first_{role}")]
    protecting = ", ".join([f"last_n_turns {turns.last_n_turns}", *first])
    return f"{'; '.join(said)}. Raise --target-max-tokens, or protect less (protected_turns in --config: {protecting})"


def _table(settings: CompressionFileSettings, totals: CompressionTotals, *, dry_run: bool) -> Table:
    sums, record = totals.sums, totals.to_record()
    left = f"{record['averages']['avg_compression_ratio']:.1%}"
    table = Table(
        title="What would be compressed" if dry_run else "Compression", title_justify="left", show_header=False
    )
    for name, value in (
        ("target", f"{settings.compression.target_max_tokens:,} tokens of {settings.tokenizer.name}"),
        ("entries", f"{sums['entries']:,}"),
        ("compressed", f"{sums['was_compressed']:,}"),
        ("already short enough", f"{sums['skipped_under_target']:,}"),
        ("still over the limit", f"{sums['still_over_limit']:,}"),
        ("unchanged because of an error", f"{sums['failed']:,}"),
        ("tokens", f"{sums['original_tokens']:,} -> {sums['compressed_tokens']:,}"),
        ("turns", f"{sums['original_turns']:,} -> {sums['compressed_turns']:,}"),
        *([("tokens left of a compressed entry", left)] if sums["was_compressed"] else []),
        ("requests for summaries", f"{sums['summarization_api_calls']:,}, {sums['summarization_errors']:,} failed"),
        ("seconds", f"{record['processing']['duration_seconds']:.1f}"),
    ):
        table.add_row(name, value)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis compress", description=__doc__)
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="PATH", help="JSON Lines of trajectories, a folder of them, or of a run")
    add("--input", type=Path, metavar="PATH", help="the same, as a flag")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="file or folder (default: the input's name with output_suffix)",
    )
    add("--config", type=Path, metavar="FILE", help=f"YAML with the settings (default: {DEFAULT_CONFIG}, if it exists)")
    help_text = "longest entry, whatever the settings say"
    add("--target_max_tokens", type=int, metavar="N", help=help_text)
    help_text = "folder, GGUF file, name of the hub, or embedded: the model that is trained"
    add("--tokenizer", metavar="NAME", help=help_text)
    help_text = "compress this share of the entries and leave the others out (default: 100)"
    add("--sample_percent", type=_percent, default=100.0, metavar="P", help=help_text)
    add("--seed", type=int, default=42, metavar="N", help="seed of that choice (default: %(default)s)")
    add("--dry_run", action="store_true", help="only count, and say what would be compressed")
    add("--extractive", action="store_true", help="make summaries of the beginnings of turns, without a model")
    return parser


def _percent(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not over 0 and at most 100")
    return value
