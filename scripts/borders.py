"""The borders of the packages: what others import of each, and how large it may be.

python scripts/borders.py [--check]

Writes the face of each package into its README: the modules that other packages import. A wider face is then seen in a
review. `--check` changes nothing, and fails where a page is not as it would be written or a package is over its limit.
Without it, the sizes are printed too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's own, wherever this is started

from lachesis.ours import PACKAGES  # noqa: E402

LIMITS = {
    "backends": 19_040,  # checkpoints, forks, warm sandboxes; children that end with their parent, the cache
    "lachesis": 19_900,  # helps, costs; settings of web, vision, mcp, pools; credit, draws; items held out; trees
    "lachesis_client": 2_970,  # streams
    "lachesis_compat": 5_340,  # tools.web_tools and others, the agent under its old name, tool backends
    "lachesis_console": 7_850,  # the plays and findings of the audit, chats that lose nothing, also behind summaries
    "lachesis_data": 6_760,
    "lachesis_doors": 4_900,  # tokens for two trainers, and what they may not train; without the client of MCP
    "lachesis_envs": 9_650,  # web_research, browser_tasks, the maze, word problems of the demo
    "lachesis_messages": 4_840,  # places in trees, branches, lines read by two readers or by one field
    "lachesis_pools": 4_190,  # six engines, profiles, pools of a run, images that are brought
    "lachesis_testing": 9_190,
    "lachesis_tokens": 13_820,  # credit by turn and in trees, the download of the embedded model
    "lachesis_tools": 5_910,  # tools of the web and on request, MCP servers, images, the browser
    "lachesis_train": 17_720,  # trainers that call us, several environments, warm starts, pools, export, rehearsals
    "lachesis_view": 6_690,  # trees, items by samples, notes that stay with their rollouts, diffs, pages to send, SFT
    "tool_call_parsers": 12_000,
}
"""Lines of Python of each package. A change that needs more says why, and raises the limit."""
LONGEST, LONG_IN_CORE = 400, 0
"""Lines of a module of the core, and how many of its modules have more."""
START, END = "## Interface\n\nOther packages import from here:\n\n", "\n<!-- written by `make docs` -->\n"


def faces() -> dict[str, dict[str, list[str]]]:
    """By package, then by folder: its modules that other packages import, without the folder's name."""
    graph = grimp.build_graph(*PACKAGES, "environments")
    found: dict[str, dict[str, set[str]]] = {package: defaultdict(set) for package in PACKAGES}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            package, *rest = imported.split(".")
            if package in found and package != module.partition(".")[0]:
                *folder, name = rest or [""]
                found[package][".".join([package, *folder])].add(name)
    return {package: {folder: sorted(names) for folder, names in sorted(of.items())} for package, of in found.items()}


def folder_of(package: str) -> Path:
    """Of its README."""
    return ROOT / package if (ROOT / package).is_dir() else ROOT / "packages" / package.removeprefix("lachesis_")


def sizes(package: str) -> dict[str, int]:
    """Lines by module."""
    files = [path for path in folder_of(package).rglob("*.py") if "build" not in path.parts]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes().count(b"\n") for path in files}


def over_limits() -> list[str]:
    """What is larger than it may be."""
    found = []
    for package, limit in LIMITS.items():
        if (lines := sum(sizes(package).values())) > limit:
            found.append(f"{package} has {lines:,} lines, {limit:,} is its limit (LIMITS in scripts/borders.py)")
    long = {name: lines for name, lines in sizes("lachesis").items() if lines > LONGEST}
    if len(long) > LONG_IN_CORE:
        found.append(f"{len(long)} modules of the core are over {LONGEST} lines, {LONG_IN_CORE} may: {', '.join(long)}")
    return found


def print_sizes(found: dict[str, dict[str, list[str]]]) -> None:
    print(f"{'package':<20}{'lines':>8}{'modules':>9}{'longest':>9}{'face':>6}")
    for package in LIMITS:
        of = sizes(package)
        face = sum(map(len, found[package].values()))
        print(f"{package:<20}{sum(of.values()):>8,}{len(of):>9}{max(of.values()):>9}{face:>6}")
    print(f"{'all':<20}{sum(sum(sizes(package).values()) for package in LIMITS):>8,}")


def written(page: Path, face: dict[str, list[str]]) -> str:
    """The page with its face."""
    text = page.read_text(encoding="utf-8").partition("\n" + START)[0].rstrip("\n") + "\n"
    lines = []
    for folder, names in face.items():
        modules = ", ".join(f"`{name}`" for name in names if name)
        lines.append(f"* `{folder}`{': ' + modules if modules else ''}")
    return text + ("\n" + START + "\n".join(lines) + "\n" + END if lines else "")


def main() -> int:
    found = faces()
    pages = {folder_of(package) / "README.md": face for package, face in found.items()}
    changed = [page for page, face in pages.items() if page.read_text(encoding="utf-8") != written(page, face)]
    if "--check" not in sys.argv:
        for page in changed:
            page.write_text(written(page, pages[page]), encoding="utf-8")
        print_sizes(found)
        changed = []
    problems = over_limits() + [
        f"{page.relative_to(ROOT)}: the face is another one; run `make docs`, and look whether it has to be wider"
        for page in changed
    ]
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
