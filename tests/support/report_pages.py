"""What a report holds: the text of its elements, and the rollouts that its script shows."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "img"}


class Reader(HTMLParser):
    """The tags, attributes and text that a browser would see, and the contents of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[tuple[str, str, str | None]] = []
        """Tag, attribute and its value."""
        self.text = ""
        self.scripts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.values += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "well-formed"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def index(page: str) -> dict[str, Any]:
    """What the list of trajectories is made of."""
    found: dict[str, Any] = json.loads(_unpacked(read(page).scripts[0]))
    return found


def groups(page: str) -> list[tuple[str, str]]:
    """The markup of the groups whose trajectories are in the page, in order: of the item, of the rollouts."""
    lines = [json.loads(line) for part in read(page).scripts[1:-1] for line in _unpacked(part).split("\n")]
    return [(line[0], line[2]) for line in lines if isinstance(line, list)]


def rollouts(page: str) -> list[str]:
    """What is shown of each rollout, as text; blanks are single."""
    found = [each for _, shown in groups(page) for each in shown.split('<details class="rollout">')[1:]]
    return [" ".join(read(f"<details>{each}").text.split()) for each in found]


def everything(page: str) -> str:
    """All text that the page can show."""
    shown = [read(about + trajectories).text for about, trajectories in groups(page)]
    return "\n".join([read(page).text, *_texts(index(page)), *shown])


def _unpacked(script: str) -> str:
    assert re.fullmatch(r"[A-Za-z0-9+/]*=*", script), "data is base64, which is no markup"
    return gzip.decompress(base64.b64decode(script)).decode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield str(value)
