"""All kinds of pages against the rules of axe-core, which `make test-axe` fetches: light, dark, on a phone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lachesis_testing.export_suite import example_groups
from lachesis_view.app import serve
from lachesis_view.index import Index
from tests.support.chromium import PROGRAM, open_page
from tests.support.viewed_runs import mixed_run, played_trees

AXE = os.environ.get("LACHESIS_AXE", "")
pytestmark = pytest.mark.skipif(not AXE or PROGRAM is None, reason="needs axe-core and Chromium: make test-axe")
PATHS = (
    "",
    "?runs=mixed,other",
    "run/mixed",
    "run/mixed?against=other",
    "rollouts",
    "rollouts?q=nothing+has+these+words&min_reward=1",
    "group/mixed/0",
    "rollout/mixed/0/0",
    "diff?a=mixed/0/0&b=other/0/0",
    "group/trees/0",
    "rollout/trees/0/1",
    "group/examples/0",
    "rollout/examples/0/0#tokens",
    "audits",
    "pools",
    "no/such/page",
)
FOUND = (
    "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations"
    ".filter(each => ['serious', 'critical'].includes(each.impact))"
    ".map(each => [each.id, ...each.nodes.slice(0, 3).map(node => node.html.slice(0, 200))]))"
)


async def test_no_page_has_a_serious_finding(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    await asyncio.to_thread(mixed_run, root)
    shutil.copytree(root / "mixed", root / "other")
    (root / "trees").mkdir()
    await played_trees(root / "trees")
    (root / "examples").mkdir()
    (root / "examples" / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in example_groups()))
    script = await asyncio.to_thread(Path(AXE).read_text, encoding="utf-8")
    index = Index(root, tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    runner, url = await serve(index, "127.0.0.1", 0)
    findings: dict[tuple[str, str, int], Any] = {}
    try:
        async with open_page() as page:
            for scheme in ("light", "dark"):
                await page.prefer(scheme)
                for width in (1280, 390):
                    await page.resize(width)
                    for path in PATHS:
                        await page.open(f"{url}{path}")
                        if path.startswith(("run/", "?runs")):
                            await page.until("document.querySelector('#curves')?.dataset.drawn > 3")
                        await page.eval(f"{script};0")
                        if found := await page.eval(FOUND):
                            findings[path, scheme, width] = found
    finally:
        await runner.cleanup()
        index.close()
    assert not findings
