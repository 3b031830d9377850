"""The HTML report of a run: figures first, then every trajectory. `lachesis_view.reports.comparison` makes that of two.

One file, which needs no network and asks for none. Its rollouts are made by the templates of the viewer and packed
(`lachesis_view.html.parts`); its script unpacks and shows them.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from markupsafe import Markup

from backends.text import counted
from lachesis.figures.exclusion import Exclusion, item_of, of_record
from lachesis.figures.figures import Figures
from lachesis.figures.intervals import Mean, mean_over_items
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.passes import bounds, ks, pass_at_k, pass_hat_k
from lachesis.figures.summary import Summary
from lachesis.loop.outcome import advice_if_cut_off, in_words
from lachesis.loop.rollout import DECLINED
from lachesis_messages.records.groups import stored_messages
from lachesis_view.html import Templates, ended, pretty, reward_axis, tone, visible, write_page
from lachesis_view.html.parts import Parts, pack, to_json
from lachesis_view.html.rollout import COMPONENT, HEADLINE, last_words, rollout_view, title_of, tool_views
from lachesis_view.names import group_name, places_of

if TYPE_CHECKING:
    from lachesis_view.pairs import Difference

_TEMPLATES = Path(__file__).parent / "templates"
HISTOGRAM_BINS = 10
MAX_CHARACTERS = 64_000_000
"""Of packed trajectories in a page; those of further groups are only in the JSONL file. The figures are about all."""
MAX_ROLLOUTS = 2_000
"""The first ones of a run are in its page. With more, it takes long to write and to open."""
MAX_ITEMS = 100
"""Items with rollouts that were left out, of which the rates are shown."""
MAX_CATEGORIES = 24
"""Different values of a field of the items up to which it is a category, with a bar for each value."""
FEW = 3
"""Rollouts of each kind (without a score, lowest, highest reward) that can be read without JavaScript."""
LONGEST = 200_000
"""Characters of such a rollout; a longer one is only in the list."""
REASONS = 3
"""Why rollouts have no score: the most frequent ones of a kind, which are shown."""
QUANTILES = 6
"""Ranges of turns and of tokens, with about as many rollouts each."""


_READ_FIRST = {"failed": "Left out", "low": "Lowest rewards", "high": "Highest rewards", "first": "Without a reward"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart: its label, its count, its share of the tallest (0..1), and the class of its colour."""

    label: str
    count: int
    share: float
    kind: str = ""


@dataclass(frozen=True, slots=True)
class MeanBar:
    """A mean with its interval, drawn from the axis' `zero`; places are in percent of the axis."""

    label: str
    mean: Mean | Difference
    count: int
    """Of the rollouts."""
    start: float
    width: float
    low: float
    spread: float


@dataclass(slots=True)
class ReportItem:
    """The data of an item without its trajectories."""

    key: str
    title: str
    name: str
    """As pages of the viewer call it: an item of an evaluation, or else the group that is its first one."""
    fields: Mapping[str, Any]
    samples: dict[int, tuple[tuple[int, int] | None, list[tuple[Any, ...]]]] = field(default_factory=dict)
    """By number: the place of a group of it in the page, and of each rollout reward, outcome, cause, turns, completion
    tokens and seconds."""
    said: str = ""
    """Why a rollout of it has no score: what the error of the first one ends with."""

    @property
    def rollouts(self) -> list[tuple[Any, ...]]:
        return [rollout for _, (_, rollouts) in sorted(self.samples.items()) for rollout in rollouts]

    @property
    def rewards(self) -> list[float | None]:
        return [rollout[0] for rollout in self.rollouts]

    @property
    def places(self) -> list[tuple[int, int] | None]:
        return [place for _, (place, _) in sorted(self.samples.items())]


@dataclass(slots=True)
class ReportedRun:
    """The figures of one run, read from its groups."""

    name: str
    figures: Figures = field(default_factory=Figures)
    items: list[ReportItem] = field(default_factory=list)
    left_out: dict[str, Counter[str]] = field(default_factory=dict)
    """By why rollouts have no score: what their errors end with."""
    few: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)
    """Rollouts that are read first: the rank among those of the kind, a number, and the markup."""
    tokens: bool = False
    """Whether a group has samples, which the page does not show."""
    times: tuple[str, str] = ("", "")
    """When its first and its last group ended."""
    environment: str = ""
    places: Mapping[str, int] = field(default_factory=dict)
    """Of the items of an evaluation, by key."""
    _toolsets: dict[bytes, tuple[int, int] | None] = field(default_factory=dict)
    _shown: int = 0
    """Rollouts that are in the page."""

    def read(self, groups: Iterable[Mapping[str, Any]], parts: Parts) -> Summary:
        known: dict[str, ReportItem] = {}
        failed = 0
        for group in groups:
            failed -= "number" not in group  # as the index of the viewer counts them
            self.figures.add(group)
            self.environment = str(group.get("environment"))
            ended = str(group.get("timestamp") or "")
            self.times = (min(filter(None, (self.times[0], ended)), default=""), max(self.times[1], ended))
            heads = [_head(rollout) for rollout in group["rollouts"]]
            key, number = whole_and_part(group["item_key"])
            if key not in known:
                fields = _fields(group["item"])
                if group.get("category") is not None:
                    fields["category"] = group["category"]
                said = (each for rollout in group["rollouts"] for each in stored_messages(group, rollout))
                name = (
                    group_name(group.get("number", failed), trained=False)
                    if key not in self.places
                    else f"item {self.places[key]}"
                )
                known[key] = ReportItem(key, title_of(group["item"], said), name, fields)
                self.items.append(known[key])
            for rollout in group["rollouts"]:
                if rollout["reward"] is None and (kind := of_record(rollout).kind) != DECLINED:
                    why = last_words(group, rollout)
                    self.left_out.setdefault(kind, Counter())[why] += 1
                    known[key].said = known[key].said or why
            self._keep_few(group, known[key], number)
            self.tokens = self.tokens or bool(group.get("samples"))
            full = parts.full or self._shown + len(heads) > MAX_ROLLOUTS
            known[key].samples[number] = None if full else self._packed(group, known[key], number, parts), heads
        self.items.sort(key=lambda item: self.places.get(item.key, len(self.places)))
        return self.figures.summary()

    def _names(self, group: Mapping[str, Any], item: ReportItem, number: int) -> list[str]:
        """What the rollouts of a group are called beside the name of their item, as on the viewer's pages."""
        if item.key in self.places:  # a group of an evaluation is one rollout
            return [f"rollout {number + n}" for n in range(len(group["rollouts"]))]
        name = group_name(group["number"], trained=False) if item.samples and "number" in group else item.name
        return [f"{name}, rollout {n}" if name != item.name else f"rollout {n}" for n in range(len(group["rollouts"]))]

    def _keep_few(self, group: Mapping[str, Any], item: ReportItem, number: int) -> None:
        """Keep the rollouts of a group that are among the worst, the best, or the first ones that have no score."""
        names = self._names(group, item, number)
        for n, rollout in enumerate(group["rollouts"]):
            reward = rollout["reward"]
            at = self.figures.counts["rollouts"] + n
            failed = reward is None and of_record(rollout).kind != DECLINED
            ranks = {"low": reward, "high": -reward} if reward is not None else {"failed" if failed else "first": 0.0}
            for kind, rank in ranks.items():
                kept = self.few.setdefault(kind, [])
                if len(kept) == FEW and (rank, at) > kept[-1][:2]:
                    continue
                name = f"{item.name}, {names[n]}: {item.title.partition(chr(10))[0]}"
                view = {**rollout_view(group, rollout, f"{kind}-{at}/"), "name": name}
                markup = _templates().part("trajectories.html.jinja", "trajectories", [view], "")
                if len(markup) <= LONGEST:
                    kept.append((rank, at, markup))
                    kept.sort()
                    del kept[FEW:]

    def read_first(self) -> list[tuple[str, list[Markup]]]:
        """What can be read without JavaScript, each rollout once: a heading, and the markup of its rollouts."""
        seen = set[int]()
        found = []
        for kind, heading in _READ_FIRST.items():
            new = [each for each in self.few.get(kind, ()) if each[1] not in seen]
            seen |= {each[1] for each in new}
            if new:  # all text in it is escaped by its templates
                found.append((heading, [Markup(markup) for _, _, markup in new]))
        return found

    def _packed(self, group: Mapping[str, Any], of: ReportItem, number: int, parts: Parts) -> tuple[int, int] | None:
        """The place of the markup of a group: its item, the place of its tools, its rollouts."""
        self._shown += len(group["rollouts"])
        tools = tool_views(group)
        name = to_json(tools)
        if name not in self._toolsets:
            self._toolsets[name] = parts.add(_templates().part("rollout_macros.html.jinja", "tool_list", tools))
        # As `encodeURIComponent` writes it: the page finds the item of an address by its beginning.
        item = quote(of.key, safe="!'()*", errors="replace")
        place = f"item-{item}/{self.name}{number}"
        views = [
            {**rollout_view(group, rollout, f"{place}.{n}/"), "name": name}
            for n, (rollout, name) in enumerate(zip(group["rollouts"], self._names(group, of, number), strict=True))
        ]
        part = partial(_templates().part, "trajectories.html.jinja")
        return parts.add(
            [
                part("item", of.key, pretty(group["item"])),
                self._toolsets[name],
                part("trajectories", views, HEADLINE.sub("", str(group.get("traceback") or ""))),
            ]
        )

    def scores(self, kept: Callable[[ReportItem], bool] = lambda item: True) -> list[list[float | None]]:
        """The samples of each item."""
        return [item.rewards for item in filter(kept, self.items)]


def write_report(
    path: Path, *, title: str, groups: Iterable[Mapping[str, Any]], groups_file: Path | None = None
) -> Summary:
    """Write the report of group records to `path`, whole or not at all; returns its figures. The settings are those
    beside `groups_file`, by default the file beside the page."""
    file = (groups_file or path).with_suffix(".jsonl")
    html, summary = render_report(title, groups, settings_of(file), places_of(file))
    write_page(path, html)
    return summary


def settings_of(path: Path) -> dict[str, Any]:
    """The settings of the run that a file of groups belongs to; none where it has no manifest."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(orjson.loads(path.with_suffix(".run.json").read_bytes())["settings"])
    return {}


def render_report(
    title: str,
    groups: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    places: Mapping[str, int] | None = None,
) -> tuple[str, Summary]:
    """The report as HTML text, and its figures."""
    run, parts = ReportedRun("", places=places or {}), Parts(MAX_CHARACTERS)
    summary = run.read(groups, parts)
    rewards = [reward for item in run.items for reward in item.rewards if reward is not None]
    scores = run.scores()
    passes, ticks = _passes(scores)
    html = render_page(
        parts,
        title=title,
        runs=[run],
        summary=summary,
        exclusion=summary.exclusion if summary.scored else _without_declined(summary.exclusion),
        environment=run.environment,
        advice=advice_if_cut_off(summary.outcomes, summary.rollouts),
        bounds=bounds(scores, lowest=min(0.0, *rewards), highest=max(1.0, *rewards)) if len(rewards) > 1 else None,
        left_out={kind: said.most_common(REASONS) for kind, said in run.left_out.items()},
        components=_components(summary),
        played=_played(*run.times),
        settings=settings,
        histogram=reward_histogram(rewards),
        outcomes=[
            replace(bar, label=in_words(bar.label), kind=ended(bar.label)) for bar in _bars([*summary.outcomes.items()])
        ],
        tools=[(name, count, failed) for name, count, failed, _ in sorted(summary.tool_failures.to_rows())],
        about={item_of(item.key): item for item in run.items},
        read_first=run.read_first(),
        max_items=MAX_ITEMS,
        passes=passes,
        ticks=ticks,
        against=[
            (name, bars)
            for name, place in (("turns", 3), ("tokens sampled", 4))
            if (bars := _against(run.items, place))
        ],
    )
    return html, summary


def _played(first: str, last: str) -> str:
    """When a run began and ended, to the minute; the date once where it is the same."""
    begin, end = first[:16].replace("T", " "), last[:16].replace("T", " ")
    return begin if begin == end else f"{begin} to {end.removeprefix(begin[:11])}"


def _components(summary: Summary) -> list[tuple[str, float | None, Mean, bool]]:
    """Components of the reward and metrics: the name, the weight in the reward, the mean, whether it is a component."""
    found = []
    for recorded, scores in sorted(summary.metric_scores.items()):
        name = recorded.removeprefix(COMPONENT)
        of_reward = name != recorded
        weight = summary.weights.get(name) if of_reward else None
        found.append((name, weight, mean_over_items([*scores]), of_reward))
    return sorted(found, key=lambda each: -abs(each[1] or 0.0))


def _without_declined(found: Exclusion) -> Exclusion:
    """Where there are no rewards, a rollout without one is not left out."""
    kept = [replace(rates, unscored=Counter(_failures(rates.unscored))) for rates in found.items]
    kept = sorted((rates for rates in kept if rates.unscored or rates.by_rule), key=lambda rates: -rates.share)
    return replace(found, unscored=_failures(found.unscored), items=kept)


def _failures(unscored: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in unscored.items() if kind != DECLINED}


def render_page(parts: Parts, *, runs: Sequence[ReportedRun], **figures: Any) -> str:
    """The page of one run or of two: `figures` are for its template."""
    parts.close()
    items: dict[str, list[ReportItem | None]] = {}
    for number, run in enumerate(runs):
        for item in run.items:
            items.setdefault(item.key, [None] * len(runs))[number] = item
    categories = _categories(runs)
    rollouts = [rollout for run in runs for item in run.items for rollout in item.rollouts]
    axis = reward_axis(rollout[0] for rollout in rollouts)
    rows: list[list[Any]] = []
    for key, sides in items.items():
        shown = next(item for item in sides if item is not None)
        fields = {name: shown.fields[name] for name, _ in categories if name in shown.fields}
        found = [item and [item.places, [(*of, tone(of[0], axis)) for of in item.rollouts]] for item in sides]
        name = " / ".join(dict.fromkeys(item.name for item in sides if item is not None))
        rows.append([key, visible(shown.title), fields, found, name])
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _templates().page(
        "report.html.jinja",
        **figures,
        comparison=len(runs) > 1,
        tokens=any(run.tokens for run in runs),
        categories=categories,
        choices={name: sorted({str(row[2][name]) for row in rows if name in row[2]}) for name, _ in categories},
        endings=sorted({str(ending) for rollout in rollouts for ending in rollout[1:3] if ending}),
        shown=sum(place is not None for run in runs for item in run.items for place in item.places),
        groups=sum(len(item.samples) for run in runs for item in run.items),
        index=pack(to_json({"names": [run.name for run in runs], "items": rows})),
        parts=parts.packed,
        script=Markup(script),  # ours; the policy of the page allows no other
        script_digest=digest,
    )


@cache
def _templates() -> Templates:
    return Templates(_TEMPLATES)


def reward_histogram(rewards: Sequence[float]) -> list[Bar]:
    """One bar a value while there are few distinct ones, equal bins between the extremes otherwise."""
    counts = sorted(Counter(rewards).items())
    if len(counts) <= HISTOGRAM_BINS:
        return _bars([(f"{value:g}", count) for value, count in counts])
    low, high = counts[0][0], counts[-1][0]
    # Every edge is a mean of the two extremes: their difference may be too large, or too small, for a float.
    edges = [low * (1 - at / HISTOGRAM_BINS) + high * (at / HISTOGRAM_BINS) for at in range(HISTOGRAM_BINS + 1)]
    bins = [0] * HISTOGRAM_BINS
    for value, count in counts:
        bins[min(HISTOGRAM_BINS - 1, bisect.bisect_right(edges, value, 1) - 1)] += count
    return _bars([(f"{edges[at]:.2g} to {edges[at + 1]:.2g}", count) for at, count in enumerate(bins)])


def _bars(counts: Sequence[tuple[str, int]]) -> list[Bar]:
    tallest = max((count for _, count in counts), default=1) or 1
    return [Bar(label, count, count / tallest) for label, count in counts]


def mean_bars(means: Sequence[tuple[str, Mean | Difference, int]]) -> list[MeanBar]:
    """Bars on one axis, which has 0 and 1 on it and reaches to the outermost end of an interval; 0 is in the middle for
    differences."""
    known = [(label, mean, count) for label, mean, count in means if mean.items]
    ends = [end for _, mean, _ in known for end in (mean.low, mean.high, mean.mean) if math.isfinite(end)]
    low, high = reward_axis(ends)
    if not all(isinstance(mean, Mean) for _, mean, _ in known):
        low, high = -max(high, -low), max(high, -low)
    # Halved: the ends may be those of all floats.
    place = {value: 100 * (value / 2 - low / 2) / (high / 2 - low / 2) for value in [0.0, *ends]}
    bars = []
    for label, mean, count in known:
        middle = place[mean.mean]
        start, end = sorted((place[0.0], middle))
        span = (place.get(mean.low, middle), place.get(mean.high, middle))
        bars.append(MeanBar(label, mean, count, start, end - start, span[0], span[1] - span[0]))
    return bars


def _categories(runs: Sequence[ReportedRun]) -> list[tuple[str, list[MeanBar]]]:
    """The fields of the items that sort them into few categories, and the bars of each."""
    values: dict[str, Counter[Any]] = {}
    for run in runs:
        for item in run.items:
            for name, value in item.fields.items():
                values.setdefault(name, Counter())[value] += 1
    found = []
    for name, counts in values.items():
        # Fields whose values are mostly different tell the items apart, and are no categories.
        if not 1 < len(counts) <= min(MAX_CATEGORIES, sum(counts.values()) / 2 / len(runs)):
            continue
        means = []
        for value in sorted(counts, key=str):
            for run in runs:
                scores = run.scores(lambda item, name=name, value=value: item.fields.get(name) == value)  # type: ignore[misc]
                label = f"{value} · {run.name}" if run.name else str(value)
                means.append((label, mean_over_items(scores), sum(map(len, scores))))
        found.append((name, mean_bars(means)))
    return found


def _passes(scores: Sequence[Sequence[float | None]]) -> tuple[list[tuple[str, Any]], list[tuple[float, int]]]:
    """The points of the curves of pass@k and pass^k, and the ticks of k; none where no item has two scored samples.

    A point is x, y, a text, and y of the ends of its interval, in a box of 520 x 210.
    """
    most = max((sum(score is not None for score in samples) for samples in scores), default=0)
    if most < 2:
        return [], []
    places = {k: round(40 + 470 * math.log(k) / math.log(most), 1) for k in ks(most)}
    curves = []
    for name, figure in (("pass@k", pass_at_k), ("pass^k", pass_hat_k)):
        means = [(k, mean) for k in places if (mean := figure(scores, k)).items]
        points = []
        for k, mean in means:
            y, low, high = (round(186 - 174 * value, 1) for value in (mean.mean, mean.low, mean.high))
            points.append(
                (places[k], y, f"{name.replace('k', str(k))}: {mean}, {counted(mean.items, 'item')}", low, high)
            )
        curves.append((name, points))
    return curves, [(place, k) for k, place in places.items()]


def _against(items: Sequence[ReportItem], place: int) -> list[MeanBar]:
    """The mean reward of rollouts with few and with many turns, or tokens."""
    counts = sorted(rollout[place] for item in items for rollout in item.rollouts if rollout[0] is not None)
    if len(set(counts)) < 2:
        return []
    edges = sorted({counts[len(counts) * at // QUANTILES] for at in range(1, QUANTILES)} - {counts[0]})
    means = []
    for low, high in zip([counts[0], *edges], [*edges, counts[-1] + 1], strict=True):
        scores = [[one[0] for one in item.rollouts if low <= one[place] < high] for item in items]
        label = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
        means.append((label, mean_over_items(scores), sum(map(len, scores))))
    return mean_bars(means)


def _fields(item: Any) -> dict[str, Any]:
    """The short values of an item, by which it may be sorted into categories."""
    if not isinstance(item, Mapping):
        return {}
    return {name: value for name, value in item.items() if isinstance(value, str | int) and len(str(value)) <= 40}


def _head(rollout: Mapping[str, Any]) -> tuple[Any, ...]:
    cause = rollout.get("unscored_kind") or (rollout.get("verifier") or {}).get("cause") or ""
    tokens = rollout.get("completion_tokens", 0)
    return rollout["reward"], rollout["outcome"], cause, rollout["turns"], tokens, rollout["seconds"]
