"""Groups of trees over 20 chat templates: is every sampled token trained once, with the advantage of its part?

    python -m benchmarks.tree_exactness [--groups 1]

Two trees a group, with forks in three ways before turns 2, 3 and 4: 54 rollouts, played by the code that plays every
run. The scripted policy makes one call or several, calls that fail or cannot be read, sub-agents, early answers and
summaries of its own context; the fake server spoils tokens and requests, aborts completions at updates of its weights,
and breaks connections, so branches begin again at their forks. The samples of the scored rollouts, and the groups as
they are sent to a trainer, are then compared with what the server recorded. Advantages are computed once more, from
rewards and paths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.token_exactness import FAULTS, Rude, sequenced, templates
from benchmarks.token_ledger import Ledger, Sequenced
from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, Tool, ToolResult
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.decisions import Kept
from lachesis.runs.group_records import group_record
from lachesis.settings.server_settings import ServerConfig
from lachesis_messages.graph_walks import completions
from lachesis_messages.records.digests import certified
from lachesis_messages.responses import ToolResponse
from lachesis_testing.fake_server import Ask, FakeServer, Reply, fake_tokenizer
from lachesis_testing.fake_server.faults import TOKENS
from lachesis_testing.fake_server.policies import WORDS
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from lachesis_tokens.samples.verification import verify_records
from lachesis_tokens.templates.parser_match import parser_for
from tool_call_parsers import ToolCallParser

TEMPLATES = (
    *("diffusion_gemma", "gemma4", "glm4moe", "gptoss", "lfm2", "lfm2_2_5", "llama3_1", "llama3_2", "muse_glimmer"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6"),
    *("qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
)
"""Of trl, beside ours. The model writes the calls of each; some templates strip the thinking of earlier turns."""
SPOILED = {name: chance / 4 for name, chance in FAULTS.items() if name != "double_end_of_turn"}
"""What is sampled beyond its end of turn is rejected, with its group."""
KINDS: list[dict[str, Any]] = [
    {"faults": SPOILED | {"server_error": 0.01, "disconnect": 0.01}},
    {
        "faults": {name: SPOILED[name] for name in SPOILED if name in TOKENS},
        "update_every": 0.3,
        "tokens_per_second": 4e3,
    },
]
"""Servers that fail, and servers whose weights are updated. A half completion that nobody could go on with would have
arrived and be none."""
SETTINGS: Mapping[str, Any] = {
    "group_size": 54,
    "tree_at": "turns:2,3,4",
    "tree_width": 3,
    "max_agent_turns": 7,
    "max_token_length": 400,
    "enabled_toolsets": ["delegation", "todo"],
    "compress_context_at": 700,
    "compress_context_keep": 2,
    "max_infra_retries": 3,
    "split_rollouts": "all",
    "discarded_attempts": "rollout",
}
LOOK = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


class Branching(Rude):
    """Calls of `look`, good and bad, sub-agents, summaries and answers; sometimes what the rude model says."""

    def __init__(self, parser: ToolCallParser) -> None:
        super().__init__()
        self.parser = parser

    def reply(self, ask: Ask) -> Reply:
        rng = ask.rng("kind")
        kind = rng.random()
        if "Answer with the summary alone" in ask.prompt[-400:]:
            return Reply(ask.ended(ask.codec.prose(rng.choices(WORDS, k=20)))) if kind < 0.8 else super().reply(ask)
        below = "Just look" in ask.prompt
        if kind < (0.5 if below else 0.12) or kind > 0.95:
            return Reply(ask.ended(ask.codec.prose(rng.choices(WORDS, k=8)))) if kind < 0.8 else super().reply(ask)
        calls = [{"name": "look", "arguments": {"query": rng.choice(WORDS)}} for _ in range(rng.choice((1, 1, 2, 3)))]
        if not below and kind > 0.85:
            calls[-1] = {"name": "delegate_task", "arguments": {"goal": "Just look.", "max_turns": 2}}
        text = self.parser.render(rng.choice(WORDS), tool_calls=[{"id": "a", "function": call} for call in calls])
        if kind > 0.8:
            text = text.replace('"', "", 3) if kind < 0.83 else text.replace("query", "what", kind < 0.85)
        return Reply(ask.ended(ask.codec.encode(text)))


class LooksEnv(HermesAgentBaseEnv):
    """Tools that fail now and then, and rewards by chance; a few rollouts have none, and are replaced."""

    name = "looks"

    async def get_next_item(self) -> Any:
        return 0

    def format_prompt(self, item: Any) -> str:
        return f"Look around ({item})."

    def tools_for(self, item: Any) -> list[Tool]:
        async def look(arguments: Mapping[str, Any], session: Any) -> ToolResult:
            rng = Random(str(arguments))
            said = " ".join(rng.choices((*WORDS, "<tool_call>", "<|im_end|>"), k=rng.randint(1, 40)))
            return ToolResult(said, "failed" if rng.random() < 0.2 else None)

        return [Tool.from_schema("look", "Looks something up.", LOOK, look)]

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        chance = Random(str(result.messages)).random()
        return None if chance < 0.02 else round(chance, 3)


def advantages(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], float]:
    """By rollout and part: the advantage, from rewards and paths alone."""
    nested: dict[str, Any] = {}
    waves = {}
    for rollout in rollouts:
        assert rollout.tree is not None
        *above, last = rollout.tree.path.split(".")
        here = nested
        for step in above:
            here = here.setdefault(step, {})
        here[last] = float(rollout.reward or 0.0)
        waves[rollout.tree.path.split(".")[0]] = rollout.tree.wave

    def value(part: Any) -> float:
        return part if isinstance(part, float) else sum(map(value, part.values())) / len(part)

    found = {}
    for rollout in rollouts:
        assert rollout.tree is not None
        here, weight, baseline = nested, rollout.tree.weights[0], 0.0
        for at, step in enumerate(rollout.tree.path.split(".")):
            weight = rollout.tree.weights[at]
            others = [value(each) for way, each in here.items() if way != step]
            if at == 0:
                others = [value(here[way]) for way in here if way != step and waves[way] <= waves[step]]
                baseline = value(here[step])
            baseline = sum(others) / len(others) if others else baseline
            found[rollout.rollout_id, at] = weight * (value(here[step]) - baseline)
            here = here[step]
    return found


def parts(rollout: Rollout) -> Iterator[tuple[str, int]]:
    """The id of each completion of a rollout, and the part in which it was sampled.

    One that is no turn prepares the next one, unless a sub-agent said it. Forks are right after the tools of a turn.
    """
    assert rollout.tree is not None and rollout.result is not None
    history, begins = rollout.result.history, rollout.tree.turns
    number = {each.tokens.completion_id: at for at, each in enumerate(rollout.result.turn_responses) if each.tokens}
    chats = [node.origin.chat for node in history.all_nodes() if isinstance(node.origin, ToolResponse)]
    below = {each.tokens.completion_id for chat in chats if chat for each in completions(chat) if each.tokens}
    own = [each.tokens.completion_id for each in history.completions() if each.tokens]
    done = len(set(number) - set(own))
    """Turns so far: first those of the rollout that it branched off."""
    for name in own:
        turn = number.get(name, done - 1 if name in below else done)
        done = turn + 1 if name in number else done
        yield name, max(at for at, begin in enumerate(begins) if begin <= turn)


def sent(group: PlayedGroup, config: HermesAgentEnvConfig) -> tuple[list[Sequenced], int]:
    """The sequences of the group as a trainer gets it, and how many completions have another advantage than theirs."""
    decision = decide_for_training(group, config, ANY_TRAINER)
    if not isinstance(decision, Kept):
        raise RuntimeError(f"{decision.reason}: {decision.detail}")
    content, wanted, wrong = decision.content, advantages(group.scored), 0
    part_of = {name: (rollout.rollout_id, part) for rollout in group.scored for name, part in parts(rollout)}
    given = list(zip(content["overrides"], content["advantages"], strict=True))
    trained: Counter[str] = Counter()
    for overrides, _ in given:
        made = overrides["lachesis"]
        trained[made["rollout_id"]] += sum(span["end"] - span["start"] for span in made["spans"])
    for overrides, values in given:
        made = overrides["lachesis"]
        share = sum(span["end"] - span["start"] for span in made["spans"]) / trained[made["rollout_id"]]
        for span in made["spans"]:
            exact = wanted[part_of[span["completion_id"]]] * share
            wrong += any(abs(value - exact) > 1e-9 for value in values[span["start"] : span["end"]])
    rows = zip(content["tokens"], content["masks"], content["inference_logprobs"], strict=True)
    return [Sequenced(*row) for row in rows], wrong


async def play(name: str, source: str | None, count: int, folder: Path) -> int:
    """Play groups over one template. The number of mistakes."""
    tokenizer, record = fake_tokenizer(chat_template=source), folder / f"{name}.jsonl"
    tokenizer.save_pretrained(folder / name)
    prompts = PromptBuilder(tokenizer)
    parser = parser_for(prompts, "hermes" if prompts.detection.tool_parser is None else "auto")
    record.touch()
    groups: list[PlayedGroup] = []
    for number, kind in enumerate(KINDS * count):
        async with FakeServer(
            Branching(parser), tokenizer=tokenizer, vary=True, record=record, seed=number, **kind
        ) as model:
            config = HermesAgentEnvConfig(**SETTINGS, tool_call_parser=parser.name)
            served: dict[str, Any] = {
                "base_url": model.base_url,
                "model_name": "fake",
                "server_type": "vllm",
                "max_retries": 0,
            }
            env = LooksEnv(config, [ServerConfig(**served, tokenizer_name=str(folder / name))])
            env.console.quiet = True
            async with env.running():
                groups += await env.play_item(number, f"item{number}", size=config.group_size, rounds=9)
    lost, wrong, records, kinds = 0, 0, [], Counter[str]()
    once = record.read_bytes()
    sequences: list[Sequenced] = []
    for group in groups:
        made, more = sent(group, config)
        sequences, wrong = sequences + made, wrong + more
        records.append(certified(group_record(group, environment=name, model="fake")))
        for rollout in group.rollouts:
            assert rollout.tree is not None
            lost += rollout.lost.completion_tokens
            if rollout.result is not None and rollout.reward is None:
                lost += rollout.result.cost.tokens.completion_tokens
            kinds[rollout.outcome.value] += 1
            kinds["branches played again"] += rollout.attempts > 1
            kinds["compressions"] += (
                sum(edit.error is None for edit in rollout.result.context_edits) if rollout.result else 0
            )
            kinds["early ends"] += rollout.tree.path.count(".") < 3
    ledger = Ledger(record)
    found = ledger.tally(
        (sequenced(each) for group in groups for r in group.scored for each in r.samples), prompts.end_of_turn
    )
    record.write_bytes(once)
    of_groups = ledger.tally(sequences, prompts.end_of_turn)
    proven = verify_records(records)
    for tally in (found, of_groups):
        tally.sampled -= lost
    mistakes = found.mismatches + of_groups.mismatches + wrong + proven.problem_count
    print(f"{name:20} {str(found).strip()}; {lost} lost with failed attempts, {found.withheld} completions on the wire")
    sent_to = f"sent: {of_groups.mismatches} mismatches, {wrong} advantages off"
    print(f"{'':20} {sent_to}; verify: {proven.problem_count} problems")
    print(f"{'':20} {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}", flush=True)
    for each in proven.problems[:3]:
        print("   ", each)
    return mistakes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1, help="of each template (default: %(default)s)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        mistakes = 0
        for name, source in templates(TEMPLATES).items():
            mistakes += asyncio.run(play(name, source, given.groups, Path(folder)))
    print(json.dumps({"templates": len(templates(TEMPLATES)), "mistakes": mistakes}))
    return mistakes > 0


if __name__ == "__main__":
    sys.exit(main())
