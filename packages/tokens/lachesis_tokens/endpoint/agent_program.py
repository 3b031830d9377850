"""Environments whose agent is a program: a coding agent, an SDK's tool runner, a script of your own.

    class Fix(AgentProgramEnv):
        command = "my-agent --task-file $LACHESIS_PROMPT_FILE"

The program runs in the rollout's sandbox. It queries a recording model endpoint, the only address that it can reach
while the network is off, and every token that it samples is recorded. `compute_reward` inspects the same sandbox
afterwards.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from backends import BackendError, BackendUnavailable, Sandbox, SandboxExhausted, SupportsForward
from backends.errors import LachesisError, SettingsError
from backends.text import without_lone_surrogates
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, ProgramRun
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_tokens.endpoint.recorded import RecordedEnv, open_recording

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.loop.rollout_player import Agent
    from lachesis_tokens.endpoint import Recording, RecordingEndpoint
    from lachesis_tools import ToolSession

MAX_OUTPUT = 64 << 10
"""Bytes of stdout, and of stderr, of the program that are kept: the first half and the last."""
LONGEST_VARIABLE = 100_000
"""Bytes of a prompt that is passed as a variable as well; the kernel's limit is 128 KiB."""
_FOREVER = 1e7  # seconds


class AgentProgramConfig(HermesAgentEnvConfig):
    """Settings of `AgentProgramEnv`."""

    command: str = Field(default="", description="Shell command that runs the agent program in the sandbox.")
    trajectory_system_prompt: Literal["generated", "actual"] = Field(
        default="actual",
        description="System turn of ShareGPT trajectories: the program's own, or Hermes' tool prompt, without tools.",
    )


class ProgramFailed(LachesisError):
    """The program ended before the model had answered anything: there is nothing to score."""


class AgentProgramEnv(RecordedEnv):
    """A subclass sets `command` and writes the dataset, the prompt and the reward, as for any environment.

    The command runs once per rollout, in `workdir`, with empty standard input and these variables in addition to
    `terminal_env`:

        OPENAI_BASE_URL, OPENAI_API_BASE   the endpoint with `/v1`
        ANTHROPIC_BASE_URL                 the endpoint
        OPENAI_API_KEY, ANTHROPIC_API_KEY  the key of the rollout
        LACHESIS_MODEL                     the model's name; the endpoint accepts any
        LACHESIS_PROMPT_FILE               a file with the text of `format_prompt`, in UTF-8
        LACHESIS_PROMPT                    the same text, up to 100,000 bytes
        LACHESIS_MESSAGES_FILE             a file with `initial_messages` as JSON
        LACHESIS_SYSTEM_PROMPT             the setting `system_prompt`, if there is one

    Lone surrogates, which UTF-8 cannot represent, become U+FFFD in these texts, as in the prompts of models; the JSON
    has them as escapes. NUL becomes U+FFFD in the variables, and is unchanged in the files.

    The rollout is `completed` when the program ends, whatever its exit code, which the reward gets in `result.program`.
    It is `max_turns` or `context_exhausted` if the endpoint refused to continue, `refused` if the program failed after
    the model server had refused one of its conversations, and `timeout` after `rollout_timeout`. It is `infra_error`,
    which is retried and never scored, if the model server or the sandbox failed or took more than half of that time, or
    if the program ended before the model had answered anything. If the server rejects the content of a request, that
    is not a failure of the server, since the program sent it.
    """

    env_config_cls = AgentProgramConfig
    config: AgentProgramConfig
    needs_sandboxes = True

    def command_for(self, item: Any) -> str:
        """The command for one item. Default: the setting `command`."""
        return str(self.config.command)

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        """See `HermesAgentBaseEnv.running`."""
        if not self.config.command and type(self).command_for is AgentProgramEnv.command_for:
            raise SettingsError(
                f"{self.run_name} has no agent program; set --env.command, or give the class {type(self).__name__} an "
                "attribute `command`"
            )
        async with super().running(training=training):
            yield

    def agent_for(self, item: Any, settings: HermesAgentLoop, session: ToolSession) -> Agent:
        return ProgramLoop(
            settings=settings,
            endpoint=self.endpoint,
            session=session,
            command=self.command_for(item),
            model=self.server_configs[0].model_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLoop:
    """Plays one rollout by running a program, in the place of `HermesAgentLoop`."""

    settings: HermesAgentLoop
    """The loop that would have played: it has the limits of the run."""
    endpoint: RecordingEndpoint
    session: ToolSession
    command: str
    model: str

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        """Run the program to its end. Raises only cancellation and errors of this program."""
        settings = self.settings
        recording = open_recording(
            self.endpoint,
            settings,
            max_requests=settings.max_turns,
            rollout_token_budget=settings.limits.rollout_token_budget,
        )
        program: ProgramRun | None = None
        broken: BackendError | None = None
        waited = 0.0
        try:
            program = await self._play(recording, messages)
            waited = await recording.waited(program.seconds, settings.limits.max_waiting)
        except BackendError as error:
            broken = error
        finally:
            await recording.close()
        if program is None:
            outcome = Outcome.AGENT_FAULT if isinstance(broken, SandboxExhausted) else Outcome.INFRA_ERROR
            reason = str(broken)
        else:
            outcome, reason = self._outcome(recording, program, waited)
        result = recording.result(outcome, reason)
        result.program = program
        if program is not None:
            result.seconds_own, result.seconds_waiting = max(0.0, program.seconds - waited), waited
        if result.outcome is Outcome.INFRA_ERROR:
            result.error = broken or result.error or ProgramFailed(reason)
        return result

    async def _play(self, recording: Recording, messages: Sequence[Mapping[str, Any]]) -> ProgramRun:
        """Raises `BackendError`."""
        sandbox = await self.session.sandbox()
        if not isinstance(sandbox, SupportsForward):
            raise BackendUnavailable(
                f"sandbox {sandbox.id} cannot reach the model endpoint: its backend has no `forward` "
                "(backends.SupportsForward). Next step: use another backend"
            )
        variables = await _write_prompt(sandbox, messages)
        async with sandbox.forward(self.endpoint.host, self.endpoint.port) as inside:
            url = f"http://{inside.host}:{inside.port}/{recording.key}"
            variables |= {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_BASE": f"{url}/v1",
                "OPENAI_API_KEY": recording.key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": recording.key,
                "LACHESIS_MODEL": self.model,
            }
            limit = self.settings.limits.max_seconds or _FOREVER
            done = await sandbox.exec(self.command, timeout=limit, env=variables, max_output=MAX_OUTPUT, fresh=True)
            if inside.failure is not None:
                raise BackendError(inside.failure)
        return ProgramRun(
            command=self.command,
            exit_code=None if done.timed_out else done.exit_code,
            stdout=_shown(done.stdout, done.stdout_elided),
            stderr=_shown(done.stderr, done.stderr_elided),
            seconds=done.duration,
            refused=dict(recording.refused),
            overruled=tuple(sorted(recording.overruled)),
        )

    def _outcome(self, recording: Recording, program: ProgramRun, waited: float) -> tuple[Outcome, str]:
        if program.exit_code is None:
            stopped = f"the program was stopped after {program.seconds:.1f} s"
            if waited > program.seconds / 2:  # its clock cannot be stopped while it waits
                return Outcome.INFRA_ERROR, f"{stopped}, {waited:.1f} s of which the model server took"
            return Outcome.TIMEOUT, stopped
        ended = f"the program ended with exit code {program.exit_code}"
        answered = len(recording.completions())
        if recording.refusal is not None and (not answered or program.exit_code != 0):
            return Outcome.REFUSED, f"{recording.refusal}; {ended}"
        if not answered:
            refused = "".join(f"; the endpoint refused: {reason}" for reason in program.refused)
            words = (program.stderr.strip() or program.stdout.strip())[-500:]
            return Outcome.INFRA_ERROR, f"{ended} before the model had answered anything{refused}: {words}"
        if recording.limit is not None and recording.requests >= self.settings.max_turns:
            return Outcome.MAX_TURNS, f"{recording.limit}; {ended}"
        if recording.limit is not None and program.exit_code != 0:
            return Outcome.CONTEXT_EXHAUSTED, f"{recording.limit}; {ended}"
        return Outcome.COMPLETED, ended


async def _write_prompt(sandbox: Sandbox, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Write the task into files; returns the variables that name them. Raises `BackendError`."""
    made = await sandbox.exec("mktemp -d", timeout=30, fresh=True)
    if made.exit_code != 0:
        raise BackendError(f"there is no room for the prompt in sandbox {sandbox.id}: {made.stderr.decode()}")
    folder = made.stdout.decode().strip()
    text = {role: _text(messages, role) for role in ("user", "system")}
    files = {
        "LACHESIS_PROMPT_FILE": ("prompt.txt", text["user"]),
        "LACHESIS_MESSAGES_FILE": ("messages.json", json.dumps(list(messages))),
    }
    variables = {"LACHESIS_PROMPT": text["user"], "LACHESIS_SYSTEM_PROMPT": text["system"]}
    variables = {
        name: value.replace("\0", "\ufffd")  # no variable of a process can have it
        for name, value in variables.items()
        if 0 < len(value.encode()) <= LONGEST_VARIABLE
    }
    for name, (file, content) in files.items():
        path = f"{folder}/{file}"
        try:
            await sandbox.write_bytes(path, content.encode())
        except OSError as error:
            raise BackendError(f"the prompt cannot be written to {path} in sandbox {sandbox.id}: {error}") from error
        variables[name] = path
    return variables


def _text(messages: Sequence[Mapping[str, Any]], role: str) -> str:
    """The text of the last message of a role, without lone surrogates."""
    content = next((message["content"] for message in reversed(messages) if message["role"] == role), None)
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    return without_lone_surrogates(content or "")


def _shown(output: bytes, elided: int) -> str:
    """Output as text, with a mark where bytes were left out."""
    if not elided:
        return output.decode(errors="replace")
    half = MAX_OUTPUT // 2
    head, tail = (part.decode(errors="replace") for part in (output[:half], output[half:]))
    return f"{head}\n[... {elided} bytes left out ...]\n{tail}"
