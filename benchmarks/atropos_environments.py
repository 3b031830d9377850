"""Plays environments of the atroposlib source distribution against the fake server, and writes what came of it.

    python -m benchmarks.atropos_environments [NAME ...] [--page docs/atropos-environments.md]

Each plays two groups with `lachesis play ... process --drift --json`. Their files come from the distribution, which
`scripts/atropos-environments.sh` downloads; `benchmarks.atropos_catalogue` says what each needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.atropos_catalogue import CASES, Case
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer
from lachesis_tokens.samples.verification import verify_records

GROUPS = 2
SECONDS = 300
START, END = "<!-- table -->", "<!-- end of table -->"


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one environment."""

    case: Case
    exit_code: int
    groups: int
    rollouts: int
    scored: int
    certified: bool
    """Whether `verify` accepts all samples, every sampled token of a scored rollout in one of them."""
    drift: Mapping[str, Any]
    """Totals, as `--json` prints them."""
    output: str

    @property
    def ok(self) -> bool:
        return self.groups >= GROUPS and self.certified and bool(self.drift)


def distribution() -> Path | None:
    """The folder of the unpacked distribution; None where it was not downloaded."""
    named = os.environ.get("LACHESIS_ATROPOS")
    folder = Path(named) if named else Path("~/.cache/lachesis/atroposlib-0.4.0").expanduser()
    return folder if (folder / "environments").is_dir() else None


async def play(case: Case, root: Path, folder: Path) -> Played:
    """Play two groups of one environment in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in case.copied:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((root / name).read_bytes())
    # The greatest number of groups that an environment may decline is not known: it gets more items than groups.
    async with FakeServer(case.answer, logprobs_mode="processed", vary=True) as server:
        tokenizer = folder / "tokenizer"
        server.tokenizer.save_pretrained(str(tokenizer))
        flags = {
            "env.total_steps": GROUPS,
            "env.group_size": 4,
            "env.max_token_length": 4096,
            "env.tokenizer_name": tokenizer,
            "env.max_num_workers": 1,
            "env.data_path_to_save_groups": "groups.jsonl",
            "env.rollout_timeout": 60,
            "env.override_sampling": "{top_p: 1.0, top_k: 0, min_p: 0.0}",
            **case.flags,
            "config": "servers.yaml",
        }
        model = {
            "base_url": server.base_url,
            "model_name": "fake",
            "api_key": "x",
            "server_type": "vllm",
            "tokenizer_name": str(tokenizer),
            "logprobs_mode": "processed",
        }
        servers = [model] * case.servers
        (folder / "servers.yaml").write_text(json.dumps({"openai": servers}), encoding="utf-8")
        target = f"{root / 'environments' / case.path}:{case.cls}"
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("lachesis")), "play", target, "process", "--drift", "--json", *given),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(folder / "hf"),
                "WANDB_MODE": "disabled",
                **case.environment,
            },
        )
        try:
            async with asyncio.timeout(SECONDS):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            said, _ = await process.communicate()
    return _played(case, process.returncode or 0, said.decode(errors="replace"), folder / "groups.jsonl")


def _played(case: Case, exit_code: int, output: str, path: Path) -> Played:
    groups = list(read_lines(path)) if path.exists() else []
    scored = [rollout for group in groups for rollout in group["rollouts"] if rollout["reward"] is not None]
    totals = verify_records(groups)
    drift: Mapping[str, Any] = {}
    for line in output.splitlines():
        if line.startswith('{"environment"'):
            drift = json.loads(line)
    tokens = sum(rollout["completion_tokens"] for rollout in scored)
    return Played(
        case,
        exit_code,
        len(groups),
        sum(len(group["rollouts"]) for group in groups),
        len(scored),
        bool(groups) and totals.ok and totals.delivered == tokens,
        drift,
        output,
    )


def table(results: Sequence[Played]) -> str:
    """The results as Markdown."""
    lines = [
        "| environment | groups | samples | refused | other tokens | first cause | example |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for played in sorted(results, key=lambda played: played.case.path):
        drift = played.drift
        share = f"{100 * drift['differing'] / drift['samples']:.0f} %" if drift["samples"] else "–"
        first = drift["first"]
        cause = max(drift["kinds"], key=drift["kinds"].__getitem__) if drift["kinds"] else "none"
        example = f"`{_code(first['sampled'])}` → `{_code(first['returned'])}`" if first and first["position"] else ""
        if first and first["zeros_and_ones"]:
            cause += ", masks of 0 and 1"
        missing = ", no logprobs" if drift["without_logprobs"] else ""
        name = f"`{played.case.path.removesuffix('.py')}`"
        lines.append(
            f"| {name} | {played.groups} | {drift['samples']} | {drift['refused']} | {share} | {cause}{missing} "
            f"| {example} |"
        )
    samples = sum(played.drift["samples"] for played in results)
    differing = sum(played.drift["differing"] for played in results)
    some = sum(played.drift["differing"] > 0 for played in results)
    lines += [
        "",
        f"{len(results)} environments, {sum(played.groups for played in results)} groups, {samples} samples; "
        f"{differing} samples ({100 * differing / max(samples, 1):.0f} %) of {some} environments have other tokens "
        "than were sampled.",
    ]
    return "\n".join(lines)


def _code(text: str) -> str:
    shown = repr(text)[1:-1].replace("|", "\\|").replace("`", "'")
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


async def _all(cases: Sequence[Case], root: Path, *, at_once: int, keep: Path | None) -> list[Played]:
    free = asyncio.Semaphore(at_once)

    async def one(case: Case) -> Played:
        async with free:
            with tempfile.TemporaryDirectory() as folder:
                place = keep / case.name if keep is not None else Path(folder)
                played = await play(case, root, place)
                if keep is not None:
                    (place / "output.txt").write_text(played.output, encoding="utf-8")
        state = "ok" if played.ok else "FAILED"
        print(
            f"{state:<7}{case.path}:{case.cls}: {played.groups} groups, {played.scored} of {played.rollouts} rollouts "
            f"scored, {played.drift.get('differing', '?')} of {played.drift.get('samples', '?')} differ",
            flush=True,
        )
        return played

    return list(await asyncio.gather(*map(one, cases)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of environments (default: all that can be imported here)")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    root = distribution()
    if root is None:
        print("the source distribution is not here; run scripts/atropos-environments.sh", file=sys.stderr)
        return 2
    cases = [case for case in CASES if (not arguments.names or case.name in arguments.names)]
    missing = {case.name: absent for case in cases if (absent := case.missing())}
    for name, absent in missing.items():
        print(f"skipped {name}: needs {', '.join(absent)}")
    cases = [case for case in cases if case.name not in missing]
    results = asyncio.run(_all(cases, root, at_once=arguments.at_once, keep=arguments.keep))
    good = [played for played in results if played.ok]
    print(f"{len(good)} of {len(results)} played {GROUPS} groups with a certificate for every sample")
    if arguments.page is not None and good:
        text = arguments.page.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        after = rest.partition(END)[2]
        arguments.page.write_text(f"{before}{START}\n\n{table(good)}\n\n{END}{after}", encoding="utf-8")
    return 0 if len(good) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
