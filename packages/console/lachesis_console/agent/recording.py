"""The files of an agent: trajectories for training, and a log of each session."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lachesis_messages.records.dataset_entries import save_trajectory
from lachesis_messages.records.jsonl import replacing
from lachesis_messages.records.sharegpt import to_conversations


def record_trajectory(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, model: str, completed: bool
) -> Path:
    """Append one line `{conversations, timestamp, model, completed}` to a file of the working folder."""
    conversion = to_conversations(messages, tools, completed=completed)
    return save_trajectory(conversion, model, completed, fsync=True)


def write_session_log(
    session_id: str, messages: Sequence[Mapping[str, Any]], *, started: datetime, **about: Any
) -> Path:
    """Write `logs/session_<id>.json` in the working folder: the last conversation of the session, as it is now."""
    path = Path("logs", f"session_{session_id.replace(os.sep, '_')}.json")
    path.parent.mkdir(exist_ok=True)
    log = {
        "session_id": session_id,
        **about,
        "session_start": started.isoformat(),
        "last_updated": datetime.now().isoformat(),
        "message_count": len(messages),
        "messages": list(messages),
    }
    with replacing(path) as new:
        new.write_text(json.dumps(log, ensure_ascii=False, indent=2), encoding="utf-8", errors="backslashreplace")
    return path
