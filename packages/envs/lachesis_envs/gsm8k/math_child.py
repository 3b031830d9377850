"""The child process of `math_answer`: one JSON question a line in, one JSON boolean a line out.

It runs by itself, as a file, and imports nothing of the project.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

MAX_MEMORY = 4 << 30
"""Bytes of address space; `9^{9^{9^9}}` would take more than there is."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    from math_verify import parse, verify

    def read(text: str) -> list[Any]:
        parsed: list[Any] = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=3)
        return parsed

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            right = bool(verify(read(question["truth"]), read(question["answer"]), timeout_seconds=3))
        except Exception:
            right = False  # neither a number nor an expression: not the right answer
        print(json.dumps(right), flush=True)


if __name__ == "__main__":
    main()
