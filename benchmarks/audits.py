"""Audits the public environments that play here, and writes what was found.

    python -m benchmarks.audits [SCHEME ...] [--into docs/audits] [--items 3] [--item-seconds 10]
    python -m benchmarks.audits --page

Each audit is `lachesis audit` in a process of its own. A line is written to `SCHEME.jsonl` when it ends; environments
that are there already are not audited again, so the program goes on where it stopped. `--page` prints the tables of
docs/audits.md from those files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from backends.errors import SettingsError
from lachesis_doors.processes import PACKAGES, interpreter

ROOT = Path(__file__).resolve().parents[1]
LISTS = {
    "textarena": """
from textarena.envs.registration import ENV_REGISTRY
names = [name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train"))]
""",
    "gymnasium": """
import gymnasium
names = [name for name, spec in gymnasium.registry.items() if "toy_text" in str(spec.entry_point)]
""",
    "bfcl": """
from pathlib import Path
import bfcl_eval
files = Path(bfcl_eval.__file__).parent.glob("data/BFCL_v4_*.json")
names = [path.stem.removeprefix("BFCL_v4_") for path in files]
""",
    "tau2": """
names = [name + "?user=scripted" for name in ("mock", "airline", "retail", "telecom")]
""",
    "nemogym": """
import nemo_gym
from pathlib import Path
folder = Path(nemo_gym.__file__).parents[1] / "resources_servers"
names = [path.parent.name for path in folder.glob("*/app.py")]
""",
}
"""By scheme: what its interpreter runs to name its environments."""
NO_MOVE = "found no legal move"
"""What the door of TextArena says of an opponent that it does not know how to play: no fault of the game."""
OPPONENT = "say who plays"
"""What a game for several players answers that was opened without them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schemes", nargs="*", metavar="SCHEME", help="default: all that are installed")
    parser.add_argument("--into", type=Path, default=ROOT / "docs/audits", metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="environments with this text in their name")
    parser.add_argument("--items", type=int, default=3)
    parser.add_argument("--item-seconds", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of one audit")
    parser.add_argument("--at-once", type=int, default=1, help="audits beside each other")
    parser.add_argument("--page", action="store_true", help="print the tables of docs/audits.md, and audit nothing")
    given = parser.parse_args()
    if given.page:
        print(page(given.into))
        return
    if unknown := set(given.schemes) - set(LISTS):
        parser.error(f"no list of environments for {', '.join(sorted(unknown))}; there are {', '.join(LISTS)}")
    given.into.mkdir(parents=True, exist_ok=True)
    for scheme in given.schemes or LISTS:
        try:
            names = named(scheme)
        except SettingsError as error:
            print(f"{scheme}: left out: {error}", flush=True)
            continue
        path = given.into / f"{scheme}.jsonl"
        done = {each["environment"].partition("?")[0] for each in read(path)}
        left = [
            target
            for name in names
            if given.only in name and (target := f"{scheme}:{name}").partition("?")[0] not in done
        ]
        with ThreadPoolExecutor(given.at_once) as pool, path.open("a") as file:
            for number, record in enumerate(pool.map(lambda target: audited(target, given), left), 1):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                codes = " ".join(each["code"] for each in record["findings"] if each["severity"] != "note")
                said = record["not_audited"] or codes or "no error, no warning"
                print(f"{number}/{len(left)} {record['environment']}: {record['seconds']:.0f} s: {said}", flush=True)


def named(scheme: str) -> list[str]:
    """The environments that the scheme's package has.

    Raises:
        SettingsError: there is no interpreter with the package.
    """
    python = interpreter(scheme, PACKAGES[scheme])
    program = f"import json, sys\nout, sys.stdout = sys.stdout, sys.stderr\n{LISTS[scheme]}\njson.dump(names, out)"
    listed = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return sorted(json.loads(listed.stdout))


def audited(target: str, given: argparse.Namespace) -> dict[str, Any]:
    """The record of an audit, made short. A game for several players is played against random moves."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "audit.json")
        limits = ["--items", given.items, "--item-seconds", given.item_seconds, "--seconds", given.seconds]
        command = [sys.executable, "-m", "lachesis", "audit", target, "--json", result, *limits]
        ended = subprocess.run([str(each) for each in command], capture_output=True, text=True, cwd=folder)
        if not result.exists():
            said = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
            return {"environment": target, "seconds": 0.0, "not_audited": said[0], "findings": []}
        record = json.loads(result.read_text())
    if OPPONENT in record["not_audited"] and "?" not in target:
        return audited(f"{target}?opponent=random", given)
    return shortened(record)


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    rewards: dict[str, list[float | None]] = defaultdict(list)
    for play in record["plays"]:
        rewards[play["policy"]].append(play["reward"])
    kept = ("environment", "versions", "seconds", "not_audited", "not_looked_at", "items")
    home = str(Path.home())
    scored = any(reward is not None for got in rewards.values() for reward in got)
    findings = [
        {
            "code": each["code"],
            "severity": each["severity"],
            "said": each["said"].replace(home, "~")[:400],
            "evidence": [json.loads(json.dumps(one).replace(home, "~")) for one in each["evidence"][:1]],
        }
        for each in record["findings"]
        if NO_MOVE not in each["said"] or not scored
    ]
    for each in findings:
        for one in each["evidence"]:
            one.update({name: value[:200] for name, value in one.items() if isinstance(value, str)})
    return {
        **{name: record[name] for name in kept},
        "not_audited": record["not_audited"].replace(home, "~").partition("\n")[0][:400] or unscored(findings, scored),
        "not_looked_at": list(dict.fromkeys(record["not_looked_at"])),
        "mean_reward": {policy: _mean([each for each in got if each is not None]) for policy, got in rewards.items()},
        "findings": findings,
    }


def unscored(findings: list[dict[str, Any]], scored: bool) -> str:
    """Why an environment without any score was not audited."""
    if scored:
        return ""
    errors = [each["said"] for each in findings if each["severity"] == "error"]
    return f"no rollout has a score: {errors[0] if errors else 'the environment gives none'}"[:400]


def _mean(scored: list[float]) -> float | None:
    return round(sum(scored) / len(scored), 3) if scored else None


def read(path: Path) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()


def page(folder: Path) -> str:
    """A row for each scheme, then one for each finding that is an error or a warning."""
    records = {path.stem: list(read(path)) for path in sorted(folder.glob("*.jsonl"))}
    rows = [["scheme", "version", "audited", "could not be", "with an error", "with a warning", "neither"]]
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for scheme, audits in records.items():
        done = [each for each in audits if not each["not_audited"]]
        worst = Counter(_worst(each["findings"]) for each in done)
        versions = {
            f"{name} {version}" for each in done for name, version in each["versions"].items() if name != "lachesis"
        }
        counts = [len(done), len(audits) - len(done), worst["error"], worst["warning"], worst["note"]]
        rows.append([f"`{scheme}`", ", ".join(sorted(versions)), *map(str, counts)])
        for each in done:
            for finding in {(one["severity"], one["code"]) for one in each["findings"] if one["severity"] != "note"}:
                found[finding].append(each["environment"])
    codes = [["finding", "severity", "environments", "which"]]
    for (severity, code), names in sorted(found.items(), key=lambda each: (each[0][0], -len(each[1]))):
        shown = ", ".join(f"`{name}`" for name in sorted(names)[:6]) + (", ..." if len(names) > 6 else "")
        codes.append([f"`{code}`", severity, str(len(names)), shown])
    return f"{_table(rows)}\n\n{_table(codes)}"


def _worst(findings: Iterable[Mapping[str, Any]]) -> str:
    found = {each["severity"] for each in findings}
    return next((each for each in ("error", "warning") if each in found), "note")


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "random")
    main()
