"""A run with rollouts that ended in every way; one has artifacts, an image and a verdict file of two numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_testing.export_suite import example_groups

# One white pixel.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8/5+hHgAHggJ/PchI7wAAAABJRU5ErkJggg=="
)
SECRET = "sk-never-written"


def job_run(folder: Path) -> Path:
    """Its groups file. `a-1-0` was graded as a task folder, and so was `a-1-3`, whose tests wrote no reward."""
    groups: list[dict[str, Any]] = example_groups()
    groups[0]["messages"][0][0] = {
        "role": "user",
        "content": [{"type": "text", "text": "Sort the words."}, {"type": "image_url", "image_url": {"url": PICTURE}}],
    }
    graded, broken = groups[0]["rollouts"][0], groups[0]["rollouts"][3]
    kept = folder / "artifacts" / "a-1-0"
    texts = {
        "artifacts/manifest.json": json.dumps(
            [{"source": "/logs/artifacts", "destination": "logs/artifacts", "type": "directory", "status": "ok"}]
        ),
        "artifacts/logs/artifacts/out.txt": "a\nb\n",
        "verifier/test-stdout.txt": "1 passed\n",
        "verifier/reward.json": '{"reward": 1.0, "style": 0.5}',
    }
    for name, text in texts.items():
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        (kept / name).write_text(text)
    (kept / "artifacts/logs/artifacts/passwords").symlink_to("/etc/passwd")
    record = {"stdout": "1 passed\n", "rewards": {"reward": 1.0, "style": 0.5}, "cause": None, "grading": "seal"}
    graded["verifier"] = {**record, "diff": "--- a\n+++ b\n", "artifacts": "artifacts/a-1-0", "notes": ["a note"]}
    record = {"stdout": "boom", "rewards": {}, "cause": "no_reward_file", "grading": "in_place"}
    broken["verifier"] = {**record, "diff": None, "artifacts": None, "notes": []}
    settings = {"terminal_backend": "docker", "model": "tiny", "openai.api_key": [SECRET], "agent": "model"}
    (folder / "groups.run.json").write_text(json.dumps({"settings": settings}))
    with JsonlWriter(folder / "groups.jsonl") as writer:
        writer.write_all(groups)
    return folder / "groups.jsonl"
