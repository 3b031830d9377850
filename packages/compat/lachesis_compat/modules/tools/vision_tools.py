"""The tool that looks at images, by task id. Its result is JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from lachesis_compat.in_run import registry_in_use
from lachesis_compat.modules.model_tools import handle_function_call


def check_vision_requirements() -> bool:
    """Whether the open run has somebody who looks at images."""
    return "vision_analyze" in registry_in_use()


async def vision_analyze_tool(image_url: str, user_prompt: str, *_: Any, task_id: str | None = None) -> str:
    """The tool `vision_analyze`. A model as a third argument has no effect: the setting `vision` names it."""
    arguments = {"image_url": image_url, "question": user_prompt}
    return await asyncio.to_thread(handle_function_call, "vision_analyze", arguments, task_id=task_id)
