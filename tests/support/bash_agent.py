"""An agent program: OpenAI's chat completions in a loop, with one tool, `bash`. Standard library only.

It runs in the sandbox as `python3 bash_agent.py [--crash-after N | --hang | --crash]`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


def complete(messages: list[dict[str, object]]) -> dict[str, object]:
    body = {"model": os.environ["LACHESIS_MODEL"], "messages": messages, "tools": TOOLS, "max_tokens": 200}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        message: dict[str, object] = json.load(answer)["choices"][0]["message"]
    return message


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--hang"]:
        time.sleep(1000)
    if arguments == ["--crash"]:
        raise RuntimeError("crashed before it asked anything")
    turns = int(arguments[1]) if arguments else 20
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Use the tool bash."},
        {"role": "user", "content": pathlib.Path(os.environ["LACHESIS_PROMPT_FILE"]).read_text()},
    ]
    for _ in range(turns):
        message = complete(messages)
        messages.append(message)
        calls = message.get("tool_calls")
        if not calls:
            print("the model said:", message["content"])
            return
        assert isinstance(calls, list)
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    raise RuntimeError("too many turns")


main()
