"""One rollout or one group as a page of one file, and as a file of records: what a person sends to another.

The page is that of the viewer, with its style and script inside, and without what needs the viewer: links to other
pages, tokens, settings and paths of the run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from backends.errors import LachesisError, SettingsError
from lachesis.figures.item_keys import whole_and_part
from lachesis_messages.images import with_data_once, with_image_data
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.records.step_files import ROLLOUTS, SCHEMA
from lachesis_view import html
from lachesis_view.files import kind_of, manifest_of
from lachesis_view.group_page import group_context, partings
from lachesis_view.html import Templates
from lachesis_view.html.rollout import rollout_view
from lachesis_view.names import group_name, places_of
from lachesis_view.rollout_page import rollout_context
from lachesis_view.trained import as_group

HERE, SHARED = Path(__file__).parent, Path(html.__file__).parent
_OF_SCORED = ("scores", "messages", "advantages", "overrides")
"""Lists of a group with an entry for each scored rollout."""


@cache
def templates() -> Templates:
    """Those of the viewer's pages."""
    return Templates(HERE / "templates", {"path": path_of, "pair": lambda value: (value, value)})


def path_of(parts: Sequence[Any]) -> str:
    """Parts of an address, with all that has a meaning there escaped; a number below 0 is that of an unscored group."""
    words = (f"unscored{part}" if isinstance(part, int) and part < 0 else str(part) for part in parts)
    return "/".join(quote(word.encode("utf-8", "replace")) for word in words)


def rollout_page(group: Mapping[str, Any], n: int, name: str = "") -> str:
    """Rollout `n` of a group as HTML text. Raises IndexError if the group has none of this number.

    `name` is the group's on the viewer's pages; without one, its number.
    """
    context = {**rollout_context(group, n), "samples": [], "partings": partings(group, n)}
    return _alone("rollout.html.jinja", name or _name(group), context)


def group_page(group: Mapping[str, Any], name: str = "") -> str:
    """A group as HTML text: its rollouts side by side, then each of them as a whole; `name` as for a rollout."""
    wholes = [rollout_view(group, rollout, f"rollout-{n}/") for n, rollout in enumerate(group["rollouts"])]
    return _alone("group.html.jinja", name or _name(group), {**group_context(group), "wholes": wholes})


def _name(group: Mapping[str, Any], places: Mapping[str, int] | None = None) -> str:
    item, rollout = whole_and_part(str(group.get("item_key") or ""))
    if item in (places or {}):
        return f"item {(places or {})[item]}, rollout {rollout}"
    return group_name(group["number"], trained=False) if isinstance(group.get("number"), int) else "group"


def _alone(template: str, name: str, context: Mapping[str, Any]) -> str:
    styles = [SHARED / "style.css", HERE / "static" / "view.css", HERE / "static" / "rollout.css"]
    script = (HERE / "static" / "rollout.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = Markup("\n".join(each.read_text(encoding="utf-8") for each in styles))
    alone = {
        "layout": "alone.html.jinja",
        "frame": {"alone": True, "name": name},
        "settings": {},
        "style": style,
        "digest": digest,
    }
    # The script is ours; the policy of the page allows no other.
    return templates().page(template, **alone, script=Markup(script), **context)


def group_of_one(group: Mapping[str, Any], n: int) -> dict[str, Any]:
    """A group's record with its rollout `n` only: a line that is read as any of a groups file."""
    rollout = group["rollouts"][n]
    place = rollout["place"]
    own = slice(0) if place is None else slice(place, place + 1)
    kept = {name: of[own] for name in _OF_SCORED if isinstance(of := group.get(name), list)}
    whole = with_image_data(group.get("samples") or ())
    samples = with_data_once(each for each in whole if each["rollout_id"] == rollout["rollout_id"])
    one = {**group, **kept, "samples": samples, "rollouts": [{**rollout, "place": None if place is None else 0}]}
    return copies_of(group)(one)


def file_name(kind: str, name: str, suffix: str) -> str:
    """A name for a file that is sent: `rollout-4f2a9c.html`."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.')[:40] or 'one'}{suffix}"


def write_single(path: Path, rollout_id: str, key: str, output: Path | None) -> Path:
    """Write the page of the rollout whose id begins with `rollout_id`, or of the group with a `key`; its path.

    Args:
        path: a file of groups, or the folder of a run.
        output: where to write it; None writes it next to the file.

    Raises:
        SettingsError: there is none, or there are several.
        LachesisError: the group is not of the shape that its page takes, or the page cannot be written.
    """
    found = list(_find(path, rollout_id, key))
    if key:  # the last failure counts, and none of what a later start finished
        found = [each for each in found if not each[0].name.endswith(".failed.jsonl")] or found[-1:]
    what = f"rollout {rollout_id}" if rollout_id else f"group {key}"
    if len(found) != 1:
        problem = f"{len(found)} are named {what}; give more of it" if found else f"there is no {what}"
        raise SettingsError(f"{path}: {problem}; `lachesis view` shows ids and keys")
    file, group, n = found[0]
    group = {**group, "tree_credit": json.loads(manifest_of(file)[0]).get("tree_credit")}
    name = (
        file_name("group", key, ".html")
        if n is None
        else file_name("rollout", str(group["rollouts"][n]["rollout_id"])[:12], ".html")
    )
    output = output or file.with_name(name)
    try:
        called = _name(group, places_of(file))
        html.write_page(output, group_page(group, called) if n is None else rollout_page(group, n, called))
    except (KeyError, TypeError, ValueError) as error:
        raise LachesisError(f"{file}: {what} is not as its page takes it ({type(error).__name__}: {error})") from error
    except OSError as error:
        raise LachesisError(f"{output}: cannot be written ({error.strerror}); choose another --output") from error
    return output


def _find(path: Path, rollout_id: str, key: str) -> Iterator[tuple[Path, dict[str, Any], int | None]]:
    """The groups with this key (and no number), or that have such a rollout, each with its file."""
    below = sorted([*path.glob("*.jsonl"), *path.glob(f"{ROLLOUTS}/*.jsonl")])
    for file in [each for each in below if kind_of(each)] if path.is_dir() else [path]:
        for line in read_lines(file, torn_tail=True):
            if not isinstance(line, dict) or not str(line.get("schema")).startswith(("lachesis.group/", SCHEMA)):
                continue
            group = as_group(line) if line["schema"] == SCHEMA else line
            if key and group["item_key"] == key:
                yield file, group, None
            for n, rollout in enumerate(group["rollouts"]):
                if not key and str(rollout["rollout_id"]).startswith(rollout_id):
                    yield file, group, n
