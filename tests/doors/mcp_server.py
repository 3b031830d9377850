"""A server of MCP for the tests, of the standard library alone. It prints, asks its client, and answers out of order.

python3 mcp_server.py [HABIT]
"""

import json
import sys
import time
from pathlib import Path

HABIT = sys.argv[1] if len(sys.argv) > 1 else ""
NUMBER = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
TOOLS = ["add", "files.read/now", "files.read_now", "fail", "refuse", "big", "slow", "die", "asked", "half", "later"]
TOOLS += ["raise", "overload", "text"]
replies, later = [], []
total = 0


def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(number, said, **more):
    say({"id": number, "result": {"content": [{"type": "text", "text": said}], **more}})


def call(number, name, arguments):
    global total
    if name == "add":
        total += arguments["by"]
        text(number, str(total))
        while later:
            text(later.pop(), "after an answer to a later call")
    elif name == "later":
        later.append(number)
    elif name == "fail":
        text(number, "the disk is full", isError=True)
    elif name in ("refuse", "raise"):
        say({"id": number, "error": {"code": -32602 if name == "refuse" else -32603, "message": "no such argument"}})
    elif name == "overload":
        say({"id": number, "error": {"code": -32000, "message": "busy"}})
    elif name == "big":
        text(number, "x" * arguments["by"])
    elif name == "slow":
        time.sleep(3600)
    elif name == "text":
        text(str(number), "an answer to nothing")
    elif name == "half":
        say({"id": number})
    elif name == "asked":
        text(number, json.dumps(replies))
    elif name == "die" and not Path("dead").exists():
        Path("dead").touch()
        sys.stderr.write("y" * 100_000 + "the wheel came off")
        sys.exit(3)
    else:
        text(number, "the tool " + name)


print("a server that prints\n[1, 2]\n17\n\n" + "[" * 100_000)
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method is None:
        replies.append(message)
    elif method == "initialize":
        if HABIT == "dies":
            sys.exit("no licence")
        if HABIT == "sleeps":
            time.sleep(3600)
        say({"method": "notifications/message", "params": {"data": "hello"}})
        say({"id": "a", "method": "ping"})
        say({"id": number, "method": "sampling/createMessage", "params": {}})
        print('{"id": 4711, "result": "of its log"}')
        say({"id": number, "result": {"protocolVersion": "2025-06-18", "capabilities": {}}})
    elif method == "tools/list":
        at = int(message["params"].get("cursor", 0))
        listed = [
            {"name": name, "inputSchema": NUMBER if name in ("add", "big") else None} for name in TOOLS[at : at + 4]
        ]
        more = {"nextCursor": str(0 if HABIT == "pages" else at + 4)} if HABIT == "pages" or at + 4 < len(TOOLS) else {}
        say({"id": number, "result": {"tools": listed, **more}})
    elif method == "tools/call":
        call(number, message["params"]["name"], message["params"]["arguments"])
