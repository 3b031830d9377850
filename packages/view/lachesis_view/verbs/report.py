"""`lachesis report FILE`, or a run's folder: write its HTML report again, or the page of one rollout or one group."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from backends.errors import LachesisError, SettingsError, refuse_empty
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.run_folder import require_run


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report next to the file, into the folder, or to `--output`."""
    parser = VerbParser(prog="lachesis report", description=__doc__)
    parser.add_argument(
        "groups",
        type=Path,
        metavar="RUN",
        help="the folder of a run, a groups.jsonl of `process` or `batch`, or a samples.jsonl of `eval`",
    )
    parser.add_argument("-o", "--output", type=Path, help="where to write it (default: next to the file, as .html)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--rollout", metavar="ID", help="only this rollout, by the beginning of its id")
    one.add_argument("--group", metavar="KEY", help="only the group of this item, by its key")
    arguments = parser.parse_args(argv)
    require_run(arguments.groups)
    if arguments.rollout or arguments.group:
        from lachesis_view.single_page import write_single

        print(write_single(arguments.groups, arguments.rollout or "", arguments.group or "", arguments.output))
        return 0
    from lachesis.runs.file_sink import unscored_groups
    from lachesis.runs.results import RunFiles
    from lachesis_messages.records.jsonl import has_torn_tail, read_lines
    from lachesis_view.reports.run import write_report

    for name in ("samples.jsonl", "groups.jsonl"):
        if (arguments.groups / name).is_file():
            arguments.groups /= name
    if arguments.groups.is_dir():
        from lachesis_view.reports import training as training_report

        print(training_report.write_report(arguments.groups, output=arguments.output))
        return 0
    if has_torn_tail(arguments.groups):
        print(f"note: {arguments.groups}: its last line is incomplete and was skipped", file=sys.stderr)

    def all_groups() -> Iterator[dict[str, Any]]:
        """One at a time: a file may have more of them than memory holds."""
        done = set()
        for group in read_lines(arguments.groups, torn_tail=True):
            done.add(group["item_key"])
            yield group
        yield from unscored_groups(RunFiles(arguments.groups).failures, done).values()

    output = arguments.output or arguments.groups.with_suffix(".html")
    try:
        first = next(groups := all_groups(), None)
        if first is None:  # not even one that failed
            refuse_empty(arguments.groups)
        title = f"{first['environment']}: {first['model']}" if first else str(arguments.groups)
        every = chain([first], groups) if first else ()
        summary = write_report(output, title=title, groups=every, groups_file=arguments.groups)
    except (KeyError, TypeError):
        raise SettingsError(
            f"{arguments.groups}: its lines are not groups; "
            "name a groups.jsonl of `process` or a samples.jsonl of `eval`"
        ) from None
    except OSError as error:
        raise LachesisError(f"{output}: cannot be written ({error.strerror}); choose another --output") from error
    for alarm in filter(None, (summary.exclusion.alarm, summary.unlearns_calls)):
        print(f"alarm: {alarm}", file=sys.stderr)
    print(output)
    return 0
