"""The recipe for Slurm in `docs/batch.md`, on a Slurm of one node that is started here. Debian: slurm-wlm, munge."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch_runs import entries, thinks, write_rows
from tests.support.slurm_engine import NEEDS_SLURM, slurm_engine
from tests.support.small_envs import ROOT, served

pytestmark = NEEDS_SLURM


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    with slurm_engine(tmp_path / "slurm") as variables:
        yield variables


def test_an_array_of_jobs_plays_the_shards(tmp_path: Path, slurm: dict[str, str]) -> None:
    page = (ROOT / "docs/batch.md").read_text()
    (recipe,) = (part.partition("```")[0] for part in page.split("```sh\n") if part.startswith("sbatch"))
    rows = [{"prompt": f"prompt {number}"} for number in range(30)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    with served(thinks) as server:
        more = "--model scripted --api_key x --env.enabled_toolsets []"
        for text, instead in (("16", "3"), ("--model NAME", more), ("http://server:8000/v1", server.base_url)):
            assert text in recipe
            recipe = recipe.replace(text, instead)
        path = f"{Path(sys.executable).parent}:{slurm['PATH']}"
        ended = subprocess.run(
            ["sh", "-ec", recipe],
            cwd=tmp_path,
            env={**slurm, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    said = "".join(path.read_text(errors="replace") for path in tmp_path.glob("slurm*/*.out"))
    said += "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + said
    assert "3 shards: 30 kept, 0 discarded, 0 failed" in ended.stdout
    prompts = Counter(entry["conversations"][1]["value"] for entry in entries(tmp_path / "data/big/merged"))
    assert prompts == Counter(row["prompt"] for row in rows)
