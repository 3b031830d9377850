"""`lachesis new NAME`: write the file of a new environment, and its test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

from backends.errors import SettingsError
from lachesis.cli.verb_parser import VerbParser

KINDS = {
    "terminal": "works on files with a terminal",
    "python": "computes with Python, and answers",
    "tool": "calls a tool that you write, and answers",
    "questions": "answers the questions of a JSON Lines file",
    "judge": "answers, and a second model judges",
    "swe": "corrects code, judged by hidden tests",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files; the exit code."""
    parser = VerbParser(prog="lachesis new", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="of the environment, for example sort-words")
    kinds = "; ".join(f"{kind}: the agent {does}" for kind, does in KINDS.items())
    parser.add_argument("--kind", choices=KINDS, default="terminal", help=f"{kinds} (default: terminal)")
    given = parser.parse_args(argv)
    words = re.split(r"[-_ ]+", given.name)
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", word) for word in words):
        raise SettingsError(
            f"{given.name!r} is not a valid environment name: use letters first, then also digits and -"
        )
    module = "_".join(words).lower()
    file, test = Path(f"{module}.py"), Path(f"test_{module}.py")
    if existing := next((path for path in (file, test) if path.exists()), None):
        raise SettingsError(f"{existing} exists already; choose another name, or delete it")
    if iskeyword(module) or find_spec(module) is not None:
        raise SettingsError(f"{file} could not be imported: {module} is a word of Python or a module; add a word to it")
    values = {
        "CLASS": "".join(word[0].upper() + word[1:] for word in words),
        "NAME": "-".join(words).lower(),
        "MODULE": module,
        "FILE": file.name,
    }
    templates = resources.files("lachesis_console") / "templates"
    for path, template in ((file, given.kind), (test, "test_judge" if given.kind == "judge" else "test")):
        text = (templates / f"{template}.txt").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(values), encoding="utf-8")
    print(f"wrote {file} and {test}\n\nnext:")
    judge = " --env.judge_server '{base_url: URL, model_name: JUDGE}'" if given.kind == "judge" else ""
    steps = {
        f"pytest {test}": "checks it without a model",
        f"lachesis check {file}{judge}": "checks its rewards for mistakes",
        f"lachesis eval {file} -n 2 -m reference{judge}": "runs its reference policy",
        f"lachesis eval {file} -n 2 -t 64{judge}": "tries the small demo model, which rarely succeeds",
        f"lachesis eval {file} -n 20 -r 3 -m MODEL -b URL{judge}": "measures a model",
        "lachesis view": "shows every rollout in the browser",
    }
    width = max(map(len, steps))
    for command, does in steps.items():
        print(f"  {command:<{width}}  {does}" if not judge else f"  {command}\n      {does}")
    return 0
