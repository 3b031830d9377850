"""The site of the docs: every page has one place in its navigation, and every link and anchor leads somewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
OUTSIDE: dict[str, str] = SITE["extra"]["outside"]
TRACKS = ("Write environments", "Evaluate", "Make data", "Train")
FENCE = re.compile(r"^( *```).*?^\1", re.MULTILINE | re.DOTALL)


def places(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Name and page of each entry, also of nested ones."""
    for entry in entries:
        ((name, below),) = entry.items()
        if isinstance(below, str):
            yield name, below
        else:
            yield from places(below)


PAGES = {page: ROOT / OUTSIDE.get(page, f"docs/{page}") for _, page in places(SITE["nav"])}


def text_of(path: Path) -> str:
    """Without blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()).replace(" ", "-") for title in titles]
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_every_page_has_one_place_in_the_navigation() -> None:
    listed = Counter(page for _, page in places(SITE["nav"]))
    assert [page for page, times in listed.items() if times > 1] == []
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs - set(listed) == set()
    assert set(OUTSIDE) - set(listed) == set()
    assert set(listed) - docs - set(OUTSIDE) == set()


def test_every_place_has_a_page_and_a_name_that_its_neighbours_do_not_have() -> None:
    assert [page for page, path in PAGES.items() if not path.is_file()] == []
    for section in SITE["nav"]:
        ((title, entries),) = section.items()
        names = [next(iter(entry)) for entry in entries]
        assert len(names) == len(set(names)), title
    assert [track for track in TRACKS if track not in [next(iter(each)) for each in SITE["nav"]]] == []


def test_the_page_of_signatures_has_every_public_name() -> None:
    import lachesis

    source = (ROOT / OUTSIDE["api-reference.md"]).read_text(encoding="utf-8")
    typed = source.partition("if TYPE_CHECKING:")[2].partition("else:")[0]
    assert set(re.findall(r"(\w+)(?=,|$)", typed, re.MULTILINE)) == set(lachesis.__all__)
    folders = [ROOT / path for path in SITE["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"]]
    packages = set(re.findall(r"from (\w+)", typed))
    assert [name for name in packages if not any((folder / name).is_dir() for folder in folders)] == []


def test_every_readme_of_a_package_is_a_page() -> None:
    readmes = [path for pattern in ("*/README.md", "packages/*/README.md") for path in ROOT.glob(pattern)]
    folders = {path.relative_to(ROOT).as_posix() for path in readmes if (path.parent / "pyproject.toml").exists()}
    assert folders and folders - set(OUTSIDE.values()) == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_page_of_the_site_and_to_a_heading_there(page: str) -> None:
    path, known = PAGES[page], {each.resolve(): each for each in PAGES.values()}
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", text_of(path)):
        to = (path.parent / target).resolve() if target else path
        if target and to.suffix != ".md":
            assert to.is_file() and to.is_relative_to(ROOT / "docs"), target
        else:
            assert to in known, f"{target} is no page of mkdocs.yml"
            assert not anchor or anchor in anchors(to), f"{target}#{anchor}"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False and "offline" in SITE["plugins"]
    loaded = [*SITE["extra"]["polyfills"], *SITE["extra_css"], *SITE.get("extra_javascript", ())]
    assert [name for name in loaded if not (ROOT / "docs" / name).is_file()] == []
