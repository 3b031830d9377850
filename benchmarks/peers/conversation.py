"""What the client without an agent and the environment of atroposlib send: the schema of the tool."""

from __future__ import annotations

NOOP = {
    "type": "function",
    "function": {
        "name": "noop",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
