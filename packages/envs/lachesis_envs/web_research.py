"""Questions whose answer is found by going from page to page: research in a small web of invented people and places.

    lachesis process web_research --openai.model_name reference --env.total_steps 4

The pages are generated from a seed, so no model knows them from its training, and they are searched without a network.
A question starts at a page and takes two or three pages to answer. The answer and its sources count.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, Reward
from lachesis_envs.tool_call import is_held_out, weighted
from lachesis_messages.messages import Message, ToolCall
from lachesis_tools import ToolRegistry
from lachesis_tools.web import Corpus, WebPage, web_tools

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

_SITE = "https://almanac.example/"
_STARTS = ("Bar", "Cor", "Del", "Fen", "Gal", "Hes", "Kal", "Lor", "Mar", "Nor", "Ost", "Pel", "Quin", "Ras", "Sel")
_ENDS = (
    "adin",
    "brook",
    "dale",
    "edra",
    "fell",
    "imar",
    "jona",
    "lund",
    "mere",
    "otha",
    "stad",
    "tova",
    "vane",
    "wick",
)
_GIVEN = ("Ada", "Boris", "Clara", "Dario", "Elin", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Lev")
_TRADES = ("Books", "Glass", "Looms", "Press", "Shipping", "Tea")
_NOUNS = ("Clock", "Garden", "Harbour", "Lantern", "Mirror", "Orchard", "Sparrow", "Winter")

_SENTENCES = {
    "author": "The novel was written by {}.",
    "publisher": "It was published by {}.",
    "published": "It came out in the year {}.",
    "founder": "The company was founded by {}.",
    "seat": "Its offices are in {}.",
    "founded": "It was founded in the year {}.",
    "birthplace": "The writer was born in {}.",
    "born": "The year of birth is {}.",
    "river": "The town lies on the river {}.",
    "chartered": "It got its charter in the year {}.",
}
"""How a page states each fact."""
_NOTICE = (
    "Volunteers keep this almanac, and they are glad of corrections. Old maps, letters and registers were compared "
    "before anything was written down here, and whatever could not be confirmed by two of them was left out again."
)
"""So much that a description in search results has no facts: the page has to be read."""
_CHAINS = (
    ("In which year was the author of the novel {} born?", ("author", "born")),
    ("In which year was the publisher of the novel {} founded?", ("publisher", "founded")),
    ("On which river does the town lie in which {} has its offices?", ("seat", "river")),
    ("In which year was the founder of {} born?", ("founder", "born")),
    ("On which river was the author of the novel {} born?", ("author", "birthplace", "river")),
    ("In which year did the birthplace of the founder of {} get its charter?", ("founder", "birthplace", "chartered")),
    ("In which year did the town get its charter where the publisher of {} is?", ("publisher", "seat", "chartered")),
)
"""Questions about the page of a name, and the facts that lead from it to the answer."""

INSTRUCTIONS = (
    "Search the web and read the pages that you need. End with two lines:\n"
    "Answer: the answer alone, a year or a name\n"
    "Sources: the addresses of all pages that lead to it, separated by commas"
)


def world(seed: int) -> dict[str, dict[str, str]]:
    """The facts by the name of a page: 30 towns, 45 people, 30 companies and 45 novels, with names much alike."""
    rng = random.Random(f"web_research {seed}")
    words = [start + end for start, end in itertools.product(_STARTS, _ENDS)]
    rng.shuffle(words)
    towns, rivers, surnames, brands = words[:30], words[30:60], words[60:75], words[75:90]
    people = rng.sample([f"{given} {surname}" for given in _GIVEN for surname in surnames], 45)
    companies = rng.sample([f"{brand} {trade}" for brand in brands for trade in _TRADES], 30)
    novels = rng.sample([f"The {first} of {town}" for first in _NOUNS for town in towns], 45)

    def year(first: int) -> str:
        return str(rng.randrange(first, first + 120))

    facts: dict[str, dict[str, str]] = {}
    for town, river in zip(towns, rivers, strict=True):
        facts[town] = {"river": river, "chartered": year(1300)}
    for person in people:
        facts[person] = {"birthplace": rng.choice(towns), "born": year(1750)}
    for company in companies:
        facts[company] = {"founder": rng.choice(people), "seat": rng.choice(towns), "founded": year(1780)}
    for novel in novels:
        facts[novel] = {"author": rng.choice(people), "publisher": rng.choice(companies), "published": year(1800)}
    return facts


def address(name: str) -> str:
    """Of the page about a name."""
    return _SITE + name.lower().replace(" ", "-")


def pages(facts: Mapping[str, Mapping[str, str]]) -> Iterator[WebPage]:
    for name, stated in facts.items():
        text = " ".join(_SENTENCES[fact].format(value) for fact, value in stated.items())
        yield WebPage(address(name), name, f"{name} has a page in the almanac. {_NOTICE} {text}")


def questions(facts: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """All of them, with the answer and the names of the pages that lead to it."""
    for (name, stated), (question, chain) in itertools.product(facts.items(), _CHAINS):
        if chain[0] not in stated:
            continue
        path, value = [name], stated[chain[0]]
        for fact in chain[1:]:
            path.append(value)
            value = facts[value][fact]
        yield {"question": question.format(name), "answer": value, "path": path, "category": f"{len(path)} pages"}


def last_line(text: str, label: str) -> str:
    """What the last line `label: ...` says; empty where there is none."""
    found = re.findall(rf"^{label}:[ \t]*(.*)$", text, re.MULTILINE)
    return found[-1].strip() if found else ""


class WebResearchConfig(HermesAgentEnvConfig):
    """Settings of the questions and their pages."""

    dataset_seed: int = Field(default=0, description="Seed of the pages and of the order of the questions.")


class WebResearchEnv(HermesAgentBaseEnv):
    """Questions over two or three pages: 0.75 for exactly the answer, 0.25 more if exactly its pages are cited.

    One question in eight is held out for evaluation.
    """

    name = "web-research"
    env_config_cls = WebResearchConfig
    toolsets = ("web",)
    max_turns = 12
    max_token_length = 512
    needs_sandboxes = False

    def __init__(self, config: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        settings: Any = self.config
        self.facts = world(settings.dataset_seed)
        if settings.web is None:
            self.__dict__["tools"] = ToolRegistry(web_tools(Corpus(lambda: pages(self.facts))))
        drawn = list(questions(self.facts))
        random.Random(settings.dataset_seed).shuffle(drawn)
        self.held_out = [item for item in drawn if is_held_out(item)]
        self.training = itertools.cycle([item for item in drawn if not is_held_out(item)])

    async def get_next_item(self) -> Mapping[str, Any]:
        return next(self.training)

    async def get_eval_items(self) -> Sequence[Mapping[str, Any]]:
        return self.held_out[: self.config.eval_items]

    def format_prompt(self, item: Mapping[str, Any]) -> str:
        return f"{item['question']}\n\n{INSTRUCTIONS}"

    async def compute_reward(self, item: Mapping[str, Any], result: AgentResult, ctx: Any) -> Reward:
        said = result.final_response
        right = last_line(said, "Answer").casefold() == item["answer"].casefold()
        cited = {source.strip() for source in last_line(said, "Sources").split(",")}
        parts = {"answer": float(right), "sources": float(right and cited == set(map(address, item["path"])))}
        return weighted({"answer": 0.75, "sources": 0.25}, parts)

    def reference_policy(self) -> Policy:
        """Searches for each name, reads its page, and goes on with the name that it finds there."""
        chains = {
            question.format(name): (name, chain)
            for name, (question, chain) in itertools.product(self.facts, _CHAINS)
            if chain[0] in self.facts[name]
        }

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            asked = next(message["content"] for message in messages if message["role"] == "user")
            name, chain = chains[asked.partition("\n")[0]]
            results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
            read = [found["results"][0] for found in results if "results" in found]
            for fact, page in zip(chain, read, strict=False):
                before, after = _SENTENCES[fact].split("{}")
                name = page["content"].partition(before)[2].partition(after)[0]
            if len(read) == len(chain):
                sources = ", ".join(page["url"] for page in read)
                return Message("assistant", f"Answer: {name}\nSources: {sources}")
            if not results or "results" in results[-1]:
                return _call("web_search", {"query": name})
            found = {row["title"]: row["url"] for row in results[-1]["data"]["web"]}
            return _call("web_extract", {"urls": [found[name]]})

        return policy


def _call(tool: str, arguments: Mapping[str, Any]) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call_1", tool, json.dumps(arguments)),))
