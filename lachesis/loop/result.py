"""The result of an agent loop: the conversation, how it ended, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lachesis.loop.outcome import Outcome
from lachesis.rewards.reward import Reward
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import ToolCall
from lachesis_messages.responses import ChatResponse, Usage

if TYPE_CHECKING:
    from lachesis.loop.context_edits import ContextEdit
    from lachesis_tools import ToolResult


@dataclass(frozen=True, slots=True)
class ToolError:
    """A tool call that failed, with the error that the model read."""

    turn: int
    """Counted from 1."""
    tool_name: str
    arguments: str
    """JSON text as the model wrote it."""
    error: str
    tool_result: str


@dataclass(frozen=True, slots=True)
class StepReward:
    """The reward that came with the answer of a tool, or with the user's."""

    turn: int
    """Counted from 1."""
    tool_name: str
    """`follow_up` for the user."""
    value: float


def step_rewards(turn: int, name: str, answer: ToolResult) -> list[StepReward]:
    """The reward of an answer, if it has one."""
    return [] if answer.reward is None else [StepReward(turn, name, answer.reward)]


@dataclass(slots=True)
class ToolCount:
    """Calls of one tool; `count == success + failure`."""

    success: int = 0
    failure: int = 0

    @property
    def count(self) -> int:
        return self.success + self.failure

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "success": self.success, "failure": self.failure}


@dataclass(slots=True)
class TokenCount:
    """Tokens over all requests of a rollout, retried turns included; as the servers counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted_requests: int = 0
    """Requests whose answer came without a count."""
    cached_tokens: int = 0
    """Prompt tokens that servers had in their prefix caches, as far as they report it."""

    def add(self, usage: Usage) -> None:
        """Count a request."""
        self.prompt_tokens += usage.prompt_tokens or 0
        self.completion_tokens += usage.completion_tokens or 0
        self.cached_tokens += usage.cached_tokens or 0
        self.uncounted_requests += usage.sampled and usage.completion_tokens is None

    def include(self, other: TokenCount) -> None:
        """Add the counts of another one."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def without(self, other: TokenCount) -> TokenCount:
        """What it has beyond `other`."""
        return TokenCount(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Cost:
    """The tokens, requests and seconds of a rollout, or of a part of it; see `AgentResult` for what each one is."""

    tokens: TokenCount
    api_calls: int
    seconds_in_model: float
    seconds_in_tools: float
    seconds_own: float
    seconds_waiting: float

    def without(self, other: Cost) -> Cost:
        """What it has beyond `other`, its beginning."""
        more = (getattr(self, name) - getattr(other, name) for name in self.__slots__[1:])
        return Cost(self.tokens.without(other.tokens), *more)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The result of an agent program, apart from its conversation with the model."""

    command: str
    exit_code: int | None
    """None when it ran out of time."""
    stdout: str
    """At most 64 KiB, the first half and the last; `stderr` too."""
    stderr: str
    seconds: float
    refused: Mapping[str, int] = field(default_factory=dict)
    """Requests that the endpoint did not answer, by the reason that the program read."""
    overruled: Sequence[str] = ()
    """Parameters of its requests that the settings of the run replaced."""

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


@dataclass(slots=True)
class AgentResult:
    """One finished run of `HermesAgentLoop`."""

    turns_used: int
    finished_naturally: bool
    """The model ended with an answer: `outcome` is completed."""
    reasoning_per_turn: list[str | None]
    tool_errors: list[ToolError]
    outcome: Outcome
    reason: str
    """One line: what exactly ended the run."""
    history: MessageHistory
    """The conversation, with everything that was rolled back still reachable (`history.discarded`)."""
    tool_counts: dict[str, ToolCount] = field(default_factory=dict)
    tokens: TokenCount = field(default_factory=TokenCount)
    api_calls: int = 0
    """Completions that were sampled, rolled-back ones included."""
    seconds_in_model: float = 0.0
    seconds_in_tools: float = 0.0
    seconds_own: float = 0.0
    """The agent's own time: commands as they ran, and completions that were answered."""
    seconds_waiting: float = 0.0
    """Time spent by servers and sandboxes: starts, queues, failed requests and their pauses, restored connections."""
    turn_responses: Sequence[ChatResponse] = ()
    """The completion of each turn; none where turns are not single completions."""
    step_rewards: Sequence[StepReward] = ()
    """Rewards that came with the answers of tools and of the user, in their order."""
    context_edits: Sequence[ContextEdit] = ()
    """Compressions of the context, and attempts that failed."""
    error: Exception | None = None
    """The cause if the outcome is infra_error: a failure of the infrastructure, or of a tool (`ToolCrashed`)."""
    reward: Reward | None = None
    """The result of `compute_reward`, once that has run."""
    server_state: dict[str, Any] | None = None
    """`get_state()` of a server that keeps its own record of tokens."""
    program: ProgramRun | None = None
    """Exit code and output, if the agent was a program."""
    verdict: Any = None
    """The verdict of a guest's own code, for its reward."""
    verifier: dict[str, Any] | None = None
    """The record of grading a task folder: see docs/harbor.md."""
    inherited: Cost | None = None
    """The part of its tokens, requests and seconds that the rollout counts that it branched off."""
    _messages: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _record: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _repaired_calls: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI dicts; always valid. A copy: change it freely.

        Reasoning is under `reasoning`, and under `reasoning_content` as in other libraries. The content of a
        turn without text is "".
        """
        if self._messages is None:
            self._messages = self.history.to_openai("reasoning")
            for message in self._messages:
                if message.get("content") is None:
                    message["content"] = ""
                if reasoning := message.get("reasoning"):
                    message["reasoning_content"] = reasoning
        return self._messages

    @property
    def recorded_messages(self) -> list[dict[str, Any]]:
        """The conversation for all records of the rollout: created once; do not change it."""
        if self._record is None:
            self._record = self.history.to_openai("reasoning")
        return self._record

    @property
    def final_response(self) -> str:
        """Text of the model's last message; empty if it never answered, whatever examples the prompt contains."""
        responses = list(self.history.responses())
        return responses[-1].message.text if responses else ""

    @property
    def refusal(self) -> bool:
        """Whether the server marks the model's last message as a refusal; its text is `final_response`."""
        responses = list(self.history.responses())
        return bool(responses) and responses[-1].refusal

    @property
    def ok_calls(self) -> list[ToolCall]:
        """The well-formed calls of the conversation, in order, for a reward that looks at calls themselves.

        The loop also runs calls whose form the parser had to repair; a reward that counts those teaches the model a
        form that other readers reject. Calls of a server's own parser (Phase 1) are all here: see `ToolCall.ok`.
        """
        return [call for response in self.history.responses() for call in response.message.tool_calls if call.ok]

    @property
    def repaired_calls(self) -> tuple[int, int]:
        """How many calls the parser repaired, and how many it read, in all completions, including discarded ones and
        those of sub-agents. Calls that a server's own parser read are not counted."""
        if self._repaired_calls is None:
            calls = [call for response in self.history.completions() for call in response.message.tool_calls]
            statuses = [call.status for call in calls if call.status is not None]
            self._repaired_calls = statuses.count("repaired"), len(statuses)
        return self._repaired_calls

    def samples(self, rollout_id: str = "") -> list[Any]:
        """The exact tokens of everything that was sampled, ready for a trainer (`TokenSample` of
        lachesis_tokens); empty in Phase 1."""
        if not self.tracked:
            return []
        from lachesis.other_packages import TOKENS

        samples: list[Any] = TOKENS.load("samples")(self.history, rollout_id=rollout_id, outcome=self.outcome.value)
        return samples

    @property
    def tracked(self) -> bool:
        """Whether completions came with their tokens (Phase 2)."""
        completions = self.history.completions()
        return bool(completions) and all(response.tokens is not None for response in completions)

    @property
    def managed_state(self) -> dict[str, Any] | None:
        """`{"nodes": samples()}`, for environments that read it; in Phase 1 the server's `get_state()`."""
        return {"nodes": self.samples()} if self.tracked else self.server_state

    @property
    def cost(self) -> Cost:
        """Of this rollout alone: without what another one counts."""
        seconds = self.seconds_in_model, self.seconds_in_tools, self.seconds_own, self.seconds_waiting
        whole = Cost(self.tokens, self.api_calls, *seconds)
        return whole if self.inherited is None else whole.without(self.inherited)

    @property
    def tool_calls(self) -> int:
        return sum(tool.count for tool in self.tool_counts.values())
