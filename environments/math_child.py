"""The child process of `environments.math_answer`: one JSON question a line in, one JSON verdict a line out."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
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
