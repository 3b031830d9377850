"""The pytest judge where images, users and homes differ. `benchmarks/tamper.py` plays all cheats on these backends."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pluggy
import pytest

from backends import Backend
from lachesis.tool_context.tool_context import ToolContext
from lachesis_testing.cheats import IDS, TEST_PATH, TESTS
from lachesis_tools import BUILTIN_TOOLS, ToolSessions
from tests.support.judges import AGENTS, programs


@pytest.fixture(scope="session")
def pytest_archive() -> bytes:
    """The pytest that runs this, for images that have none."""
    file = io.BytesIO()
    with zipfile.PyZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:  # compiled for the Python of the images
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            archive.writepy(str(Path(spec.origin).parent))
        site = Path(pluggy.__file__).parent.parent
        for path in (site / "py.py", *site.glob("pluggy-*.dist-info/*")):
            archive.write(path, path.relative_to(site))
    return file.getvalue()


@pytest.mark.parametrize(
    "name", ["docker", *(pytest.param(name, marks=pytest.mark.long) for name in ("singularity", "ssh"))]
)
async def test_it_tells_a_solution_from_a_cheat(
    name: str, usable_backend: Callable[[str], Awaitable[Backend]], pytest_archive: bytes
) -> None:
    async with ToolSessions(await usable_backend(name)) as sessions:
        scores = {}
        for agent in ("honest", "the records of the judge are forged"):
            for judge in ("pytest", "programs"):
                session = sessions.open(f"{agent} {judge}")
                ctx = ToolContext(
                    session, BUILTIN_TOOLS, open_verifier=lambda: sessions.open(f"verifier-{len(list(sessions))}")
                )
                for path, text in AGENTS[agent].items():
                    await ctx.write_file(path, text)
                if judge == "programs":
                    scores[agent, judge] = float(await programs(ctx, AGENTS[agent], "python3"))
                    continue
                tests = {TEST_PATH: TESTS, "pytest.zip": pytest_archive}
                found = await ctx.judge_pytest(
                    ["shop.py"], tests, expect=IDS, python="PYTHONPATH=pytest.zip python3", timeout=60
                )
                scores[agent, judge] = found.fraction
    assert scores == {pair: float(pair[0] == "honest") for pair in scores} and len(scores) == 4
