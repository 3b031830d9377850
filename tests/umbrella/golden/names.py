"""What users write down and an upgrade must not take away: names, fields with their defaults, verbs with their flags.

`python -m tests.umbrella.golden.names` prints it as JSON. `names.json` is what the first version printed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
from typing import Any

import lachesis
from lachesis.cli import main

VERBS = (
    *("api", "batch", "check", "compress", "demo", "doctor", "engine", "envs", "eval", "eval compare", "eval regrade"),
    *("export", "fake-server", "images", "new", "play", "play terminal process", "policy", "process terminal"),
    *("report", "sandboxes", "serve terminal", "tasks", "train", "trajectories", "verify", "view"),
)


HIDDEN = {"serve terminal": "-n"}
"""Flags that are accepted and that no help shows."""


def printed(verb: str, flag: str = "--help") -> str:
    """The help of a verb."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*verb.split(), flag])
    return out.getvalue()


def flags(verb: str) -> list[str]:
    shown = printed(verb)
    if "\n  --help-all " in shown:
        shown = printed(verb, "--help-all")
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][\w.-]*", f"{shown} {HIDDEN.get(verb, '')}")))


def public_names() -> dict[str, Any]:
    fields = lachesis.HermesAgentEnvConfig.model_fields
    classes = (lachesis.HermesAgentBaseEnv, lachesis.ToolContext, lachesis.AgentResult, lachesis.MessageHistory)
    return {
        "lachesis": sorted(lachesis.__all__),
        "settings": {name: json.dumps(field.get_default(), default=str) for name, field in fields.items()},
        "members": {
            cls.__name__: sorted(name for name, _ in inspect.getmembers(cls) if not name.startswith("_"))
            for cls in classes
        },
        "flags": {verb: flags(verb) for verb in VERBS},
    }


if __name__ == "__main__":
    print(json.dumps(public_names(), indent=1, sort_keys=True))
