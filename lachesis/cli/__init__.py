"""The command `lachesis`: one verb a module, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from lachesis.errors import LachesisError

VERBS = {
    "demo": "play a few problems with the embedded model and with the reference policy",
    "doctor": "show what works on this machine, and how to get what does not",
    "fake-server": "serve completions without a model, for tests and to measure what an environment can carry",
    "report": "write the HTML report of a groups file again",
    "sandboxes": "list the sandboxes that a backend holds, and remove those that were left behind",
    "verify": "prove that files of samples hold what was sampled, each token once",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    parser = argparse.ArgumentParser(prog="lachesis", description="Environments for tool-calling language models.")
    parser.add_argument("--version", action="version", version=f"lachesis {importlib.metadata.version('lachesis-rl')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, help_text in VERBS.items():
        # The verb parses its own arguments, so that no other verb's room is imported for it.
        verbs.add_parser(verb, help=help_text, add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed, rest = parser.parse_known_args(arguments)
    try:
        module = importlib.import_module(f"lachesis.cli.{parsed.verb.replace('-', '_')}")
        code: int = module.main(rest)
    except LachesisError as error:
        from lachesis.runs.command_line import report_error

        return report_error(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
