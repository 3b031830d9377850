"""Whatever a model writes, and whatever it made of its place, a built-in tool answers: it never crashes."""

from __future__ import annotations

import pytest

from lachesis_tools import BUILTIN_TOOLS, ToolSession, call_tool
from lachesis_tools.on_request import ON_REQUEST

TOOLS = BUILTIN_TOOLS.extended(*ON_REQUEST.values())
ORDINARY = {
    "path": "f.txt",
    "content": "c",
    "command": "true",
    "pattern": "x",
    "code": "1",
    "action": "list",
    "mode": "patch",
    "patch": "x",
    "old_string": "a",
    "new_string": "b",
    "timeout": 5,
    "question": "?",
    "goal": "g",
}
HOSTILE = [
    *("", "a\0b", "~", "/dev/full", "/proc/self/mem", "x" * 5000, "-rf", "\n", "(", "fifo", "loop", "p" * 200_000),
    "*** Begin Patch\n*** Update File: a\0b\n@@\n-x\n+y\n*** End Patch",
    f"*** Begin Patch\n*** Add File: {'n' * 300}\n+x\n*** End Patch",
    "*** Begin Patch\n*** Delete File: /\n*** End Patch",
]


@pytest.mark.parametrize("name", TOOLS)
async def test_any_text_is_answered(session: ToolSession, name: str) -> None:
    sandbox = await session.sandbox()
    await sandbox.exec("ln -s loop loop; mkfifo fifo", timeout=20)
    properties = TOOLS[name].parameters["properties"]
    usual = {key: value for key, value in ORDINARY.items() if key in properties}
    for key in [key for key, schema in properties.items() if schema.get("type") == "string"]:
        for text in HOSTILE:
            for more in [{"action": "log"}, {"action": "write"}] if name == "process" else [{}]:
                result = await call_tool(name, {**usual, **more, key: text}, session, registry=TOOLS)
                assert result.content, (key, text[:50])


@pytest.mark.parametrize(
    "deed",
    [
        "rm -rf f.txt; mkdir f.txt",
        "rm -rf $PWD/* && chmod 000 $PWD",
        "d=$PWD; cd /; mv $d ${d}2 && echo > $d || { cd $d && rm -rf * .[!.]*; }",
        "for s in /bin/bash /usr/bin/env /bin/sh; do echo no > $s; done; kill -STOP $PPID",
    ],
)
async def test_a_broken_place_is_answered(session: ToolSession, deed: str) -> None:
    sandbox = await session.sandbox()
    await sandbox.exec(deed, timeout=20)
    for name, tool in TOOLS.items():
        usual = {key: value for key, value in ORDINARY.items() if key in tool.parameters["properties"]}
        assert (await call_tool(name, usual, session, registry=TOOLS)).content, name
