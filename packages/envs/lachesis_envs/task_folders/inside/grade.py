"""Run tests as expected.json beside this file says, and write the reward: 1 if all of them had the expected outcome.

command     a shell command, run in the current folder; its output names the tests
format      how: `pytest` (-rA), `unittest` (-v), or `sympy` (bin/test --verbose)
pass        names of tests that have to pass, or
outcomes    name -> outcome of every test (the output has to have exactly these)
"""

import json
import os
import re
import subprocess
import sys
from typing import Dict

OUTCOMES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
SYMPY = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "s": "SKIPPED", "f": "XFAIL"}
UNITTEST = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "skipped": "SKIPPED", "expected failure": "XFAIL"}


def outcomes_of(output: str, form: str) -> Dict[str, str]:
    """Name -> outcome of each test in the text that a runner printed."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines():
        if form == "pytest" and line.startswith(OUTCOMES):
            outcome, _, name = line.partition(" ")
            name = (name if outcome == "PASSED" else name.split(" - ")[0]).strip()
            if name and not (outcome == "SKIPPED" and re.match(r"\[\d+\] ", name)):
                found[name] = outcome.rstrip(":")
        elif form == "unittest":
            match = re.match(r"(.+?) \.\.\. (?:.* )?(ok|FAIL|ERROR|skipped|expected failure)\b", line)
            if match:
                found[match.group(1)] = UNITTEST[match.group(2)]
        elif form == "sympy":
            match = re.match(r"(test_\w+) (?:.* )?(ok|F|E|s|f)\b", line)
            if match:
                found[match.group(1)] = SYMPY[match.group(2)]
    return found


def by_name(outcomes: Dict[str, str]) -> Dict[str, str]:
    """R2E's names: what follows the file, with dots. R2E knows three outcomes, and does not see tests with others."""
    return {
        ".".join(name.split("::")[1:]).split(" - ")[0]: outcome
        for name, outcome in outcomes.items()
        if outcome in ("PASSED", "FAILED", "ERROR")
    }


def main() -> None:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json"), encoding="utf-8") as file:
        expected = json.load(file)
    ran = subprocess.run(["bash", "-c", expected["command"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = ran.stdout.decode("utf-8", "replace")
    sys.stdout.buffer.write(ran.stdout)
    found = outcomes_of(output, expected["format"])
    if "outcomes" in expected:
        found = by_name(found)
        wrong = [
            name for name in {**found, **expected["outcomes"]} if found.get(name) != expected["outcomes"].get(name)
        ]
    else:
        if expected["format"] == "pytest":  # SWE-bench cuts names at the first space
            found.update({name.split()[0]: outcome for name, outcome in found.items() if name not in expected["pass"]})
        wrong = [name for name in expected["pass"] if found.get(name) not in ("PASSED", "XFAIL")]
    for name in sorted(wrong):
        print("not as expected:", name, found.get(name, "did not run"))
    with open("/logs/verifier/reward.txt", "w", encoding="utf-8") as file:
        file.write("0" if wrong else "1")


if __name__ == "__main__":
    main()
