"""The environments that the pages show whole, each a `py` block that begins with the name of its file."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from tests.support.small_envs import ROOT, rollouts
from tests.support.training_runs import environment

BLOCK = re.compile(r"^```py\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown(pattern: str) -> dict[str, str]:
    """The code by the name of its file, of the pages of docs/ that fit the pattern."""
    pages = sorted((ROOT / "docs").glob(pattern))
    return {name: code for page in pages for name, code in BLOCK.findall(page.read_text(encoding="utf-8"))}


RECIPES = {
    name: code
    for pattern in ("cookbook.md", "from-*.md")
    for name, code in shown(pattern).items()
    if "HermesAgentBaseEnv" in code
}


async def played(
    name: str, folder: Path, replaced: Mapping[str, str] | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """The rollouts of `process` with the recipe's reference policy.

    Args:
        replaced: what other text stands for in the code, such as the name of an image.
    """
    code = RECIPES[name]
    for text, other in (replaced or {}).items():
        assert text in code
        code = code.replace(text, other)
    (folder / name).write_text(code)
    module = runpy.run_path(str(folder / name))
    (kind,) = (
        value
        for value in module.values()
        if isinstance(value, type) and issubclass(value, HermesAgentBaseEnv) and value is not HermesAgentBaseEnv
    )
    env = environment(kind, folder, ServerConfig(model_name="reference"), **{"group_size": 1, **settings})
    await env.process_manager()
    return rollouts(folder / "groups.jsonl")
