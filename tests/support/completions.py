"""What an OpenAI-compatible server answers."""

from __future__ import annotations

from typing import Any


def completion(content: Any = "hi", finish_reason: Any = "stop", **message: Any) -> dict[str, Any]:
    return {
        "model": "served-name",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": {"content": content, **message}}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
