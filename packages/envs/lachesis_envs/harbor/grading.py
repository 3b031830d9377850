"""Grading of a task folder, with the verdict files, the order and the errors of Harbor 0.25.

Four ways, of which the record names the one that was used:

    in_place   the tests run in the agent's sandbox, Harbor's `shared`. The agent's files may decide the reward.
    seal       the declared artifacts go into a fresh sandbox of the same base, and the tests run there.
    separate   the same, in the environment that the task declares for its verifier.
    judge      a pytest suite that cannot be forged, where `[metadata.lachesis.judge]` asks for it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from backends import SandboxSpec
from lachesis.rewards.agent_fault import AgentFault
from lachesis.tool_context.pace import MARGIN, USABLE, Pace
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.artifacts import artifacts_of, keep_artifacts, put, remove_excluded
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.not_run import not_run
from lachesis_envs.harbor.variables import resolved_variables
from lachesis_envs.harbor.verdicts import Verdict, lost, parsed_rewards, shortened, verdict_of
from lachesis_envs.task_folders import Step, Task

Grading = Literal["auto", "seal", "in_place"]

TESTS, VERIFIER, AGENT = "/tests", "/logs/verifier", "/logs/agent"
_KEPT_LOGS = 64 << 20
"""Bytes of /logs/verifier that are kept next to it."""


def way_of(task: Task, step: Step, grading: Grading = "auto") -> Literal["judge", "separate", "seal", "in_place"]:
    """How a step is graded.

    `auto` seals a step with declared artifacts, unless the task itself says `environment_mode = "shared"`.
    """
    if task.own_settings.get("judge"):
        return "judge"
    if step.verifier.environment_mode == "separate":
        return "separate"
    if grading != "auto":
        return grading
    verifiers = [task.config.verifier, *(own.verifier for own in task.config.steps or () if own.name == step.name)]
    shared = any(verifier.environment_mode == "shared" for verifier in verifiers)
    return "seal" if step.artifacts and not shared else "in_place"


async def grade(
    task: Task,
    step: Step,
    ctx: ToolContext,
    *,
    grading: Grading = "auto",
    spec: SandboxSpec | None = None,
    keep: Path | None = None,
    ends: bool = True,
) -> Verdict:
    """Grade the agent's work in the sandbox of `ctx`.

    Args:
        spec: the sandbox of a verifier that is not the agent's; None: as the agent's was made.
        keep: folder of this machine that gets `artifacts/` with `manifest.json`, and `verifier/`; None keeps nothing.
        ends: whether this is the last step, so that the agent's sandbox is not needed any more.

    Raises:
        Invalid: there is no reward, and why.
        BackendError: a sandbox failed.
    """
    record = _new_record(way_of(task, step, grading))
    return await _concluded(_graded(task, step, ctx, record, spec=spec, keep=keep, ends=ends), record)


async def grade_again(task: Task, step: Step, ctx: ToolContext, kept: Path) -> Verdict:
    """Run the verifier on artifacts that an earlier grading kept, in the sandbox of `ctx`, which is fresh.

    `ctx` must have an `open_verifier` for tests that reach no verdict.

    Args:
        kept: the folder that `grade` had as `keep`.

    Raises: as `grade`.
    """
    record = _new_record("seal")
    return await _concluded(_graded_again(task, step, ctx, kept, record), record)


async def _graded(
    task: Task,
    step: Step,
    ctx: ToolContext,
    record: dict[str, Any],
    *,
    spec: SandboxSpec | None,
    keep: Path | None,
    ends: bool,
) -> Verdict:
    way = record["grading"]
    if way == "judge":
        if not ends:
            raise Invalid("no_tests", f"step {step.name!r}: the judge ends the sandbox that later steps need")
        from lachesis_envs.swe.judging import judge

        return await judge(task, step, ctx, record=record, keep=keep)
    variables = resolved_variables(step.verifier.env, "[verifier].env", task.variables)
    await _run_hooks(step, ctx, record)
    if way == "in_place":
        if not task.own_settings.get("keep_processes"):
            await ctx.stop_processes()
        if keep is not None:
            await keep_artifacts(step, ctx, keep, record)
        place = ctx
    else:
        if way == "seal" and not step.artifacts:
            step = replace(step, artifacts=[str(await ctx.real_path("."))])  # the working directory
        wanted = [artifact["source"] for artifact in artifacts_of(step)]
        place = await ctx.seal(wanted, allow=wanted, spec=spec, exactly=True, ends=ends)
        record["notes"] += [f"{path} was not taken: {reason}" for path, reason in place.refused.items()]
        await remove_excluded(step, place)
        if keep is not None:
            await keep_artifacts(step, place, keep, record)
    verdict = await _verdict(task, step, ctx, place, variables, record, keep, spec)
    if place is not ctx:
        await place.cleanup()
    await _require_run(verdict, task, step, ctx, variables, record, spec)
    return verdict


async def _graded_again(task: Task, step: Step, ctx: ToolContext, kept: Path, record: dict[str, Any]) -> Verdict:
    variables = resolved_variables(step.verifier.env, "[verifier].env", task.variables)
    for artifact in artifacts_of(step):
        await put(ctx, kept / "artifacts" / artifact["destination"], artifact["source"])
    verdict = await _verdict(task, step, ctx, ctx, variables, record, None, None)
    await _require_run(verdict, task, step, ctx, variables, record, None)
    return verdict


async def _concluded(grading: Awaitable[Verdict], record: dict[str, Any]) -> Verdict:
    """The verdict, also if the agent made it impossible; if there is none, its record."""
    try:
        return await grading
    except AgentFault as fault:
        return lost(str(fault), record)
    except Invalid as error:
        missing = not_run(record["stdout"]) if error.cause.grade else set()
        invalid = _not_downloaded(missing) if missing else error
        record["cause"] = invalid.cause.name
        invalid.record = record
        raise invalid from None


async def as_user(ctx: ToolContext, command: str, user: str | int | None) -> str:
    """`command`, to be run as `user`.

    Raises:
        Invalid: the sandbox cannot do that.
    """
    if user is None:
        return command
    # Variables of the reward's own shell: no program inside is asked. Who owns / can do what root does to files.
    facts = await ctx.terminal('echo "$UID" "$USER"; [ -O / ] && [ -w / ] && echo owner', timeout=30)
    number, _, rest = str(facts["output"]).partition(" ")
    name, _, owner = rest.partition("\n")
    if str(user) in (number, name.strip()) or (str(user) in ("root", "0") and "owner" in owner):
        return command
    switched = (
        f"setpriv --reuid {user} --regid {user} --clear-groups bash -c {shlex.quote(command)}"
        if str(user).isdigit()
        else f"su -m -s /bin/bash {shlex.quote(str(user))} -c {shlex.quote(command)}"
    )
    probe = switched.replace(shlex.quote(command), "true")
    if number == "0" and (await ctx.terminal(probe, timeout=30))["exit_code"] == 0:
        return switched
    raise Invalid(
        "user",
        f"user = {user!r}, and the sandbox runs everything as {name.strip()} ({number}). Next step: a backend whose "
        "images run as root with --env.terminal_options '{capabilities: [SETUID, SETGID]}', or change the task",
    )


def _new_record(way: str) -> dict[str, Any]:
    return {"stdout": "", "rewards": {}, "cause": None, "grading": way, "diff": None, "artifacts": None, "notes": []}


async def _run_hooks(step: Step, ctx: ToolContext, record: dict[str, Any]) -> None:
    """Collect hooks, before anything is stopped. A failure is noted, and ends nothing."""
    for hook in step.verifier.collect:
        try:
            done = await ctx.terminal(await as_user(ctx, hook.command, hook.user), timeout=hook.timeout_sec)
        except Invalid as error:  # `Trial.begin` could become that user: the agent has seen to it
            record["notes"].append(f"collect hook {hook.command!r} did not run: {error}")
            continue
        if done["exit_code"] != 0:
            said = str(done["output"])[-500:]
            record["notes"].append(f"collect hook {hook.command!r} ended with {done['exit_code']}: {said}")


async def _verdict(
    task: Task,
    step: Step,
    ctx: ToolContext,
    place: ToolContext,
    variables: Mapping[str, str],
    record: dict[str, Any],
    keep: Path | None,
    spec: SandboxSpec | None,
) -> Verdict:
    """Run the tests in `place`. Where they give no verdict, find out whether that is the agent's doing.

    What the agent left may stop the tests, or write nonsense for them: that must not keep it from its score. So may the
    machine, and the task itself: the tests run once more, and then in a sandbox without the agent's work. There they
    run as well after a verdict that somebody put out of reach.
    """

    stretch = 1.0

    async def tested(where: ToolContext, record: dict[str, Any], keep: Path | None = None) -> Verdict:
        limit = step.verifier.timeout_sec * stretch
        return verdict_of(task, await _run_tests(task, step, where, variables, limit, record, keep), record)

    async def require_agents(fault: AgentFault) -> None:
        """Raises `Invalid` where the tests do the same without the agent's work."""
        if place is not ctx:
            await place.cleanup()
        untouched = await ctx.untouched(spec=spec)
        try:
            with contextlib.suppress(Invalid):
                await tested(untouched, _new_record(record["grading"]))
        except AgentFault:
            raise Invalid("not_a_reward", f"also without the agent's work: {fault}") from fault
        finally:
            await untouched.cleanup()

    try:
        return await tested(place, record, keep)
    except AgentFault as fault:
        await require_agents(fault)
        raise
    except Invalid as invalid:
        if not invalid.cause.grade and invalid.cause.name != "user":
            raise
        first = invalid
    before: Pace | None = None
    if first.late is not None:  # a busy machine gives the tests more time
        fresh = await ctx.untouched(spec=spec) if place is ctx else place
        before = await fresh.pace()
        if fresh is not place:
            await fresh.cleanup()
        if first.late.waited is None:
            before.require_usable(str(first))
        if not first.late.uses_up(step.verifier.timeout_sec):
            stretch = min(before.stretch, USABLE)
    try:
        return await tested(place, record, keep)
    except AgentFault as fault:
        await require_agents(fault)
        raise
    except Invalid as again:
        # What the tests themselves took says it, on any machine.
        decided = again.late is not None and again.late.is_enough(step.verifier.timeout_sec)
        if place is not ctx:
            await place.cleanup()
    untouched = await ctx.untouched(spec=spec)
    try:
        found = await untouched.pace()
        if before is not None and not decided:
            before.require_usable(str(first))
            found.require_usable(str(first), before.stretch * MARGIN)
        stretch = max(stretch, found.stretch)
        await tested(untouched, _new_record(record["grading"]))
    except (Invalid, AgentFault):
        raise first from None
    finally:
        await untouched.cleanup()
    return lost(str(first), record, "no_verdict")


async def _require_run(
    verdict: Verdict,
    task: Task,
    step: Step,
    ctx: ToolContext,
    variables: Mapping[str, str],
    record: dict[str, Any],
    spec: SandboxSpec | None,
) -> None:
    """Find out whether what tests could not download is missing without the agent's work as well.

    Raises:
        Invalid: it is. The 0 that they wrote is not a verdict.
    """
    missing = not_run(record["stdout"])
    if not missing or verdict.reward.value > 0:
        return
    untouched, again = await ctx.untouched(spec=spec), _new_record(record["grading"])
    try:
        with contextlib.suppress(Invalid):
            await _run_tests(task, step, untouched, variables, step.verifier.timeout_sec, again, None)
    finally:
        await untouched.cleanup()
    if missing := missing & not_run(again["stdout"]):
        raise _not_downloaded(missing)


def _not_downloaded(missing: set[str]) -> Invalid:
    return Invalid(
        "network",
        f"the tests did not run: they have no {', '.join(sorted(missing))}. Next step: "
        "--env.terminal_network true, if this machine reaches what tests/test.sh downloads; or put it into the image",
    )


async def _run_tests(
    task: Task,
    step: Step,
    ctx: ToolContext,
    variables: Mapping[str, str],
    limit: float,
    record: dict[str, Any],
    keep: Path | None,
) -> dict[str, float]:
    """Run the tests and read their verdict. Returns the numbers. Raises `Invalid`, and `AgentFault` for tampering."""
    script = f"{TESTS}/test.sh"
    if step.test_folders and not (step.tests / "test.sh").is_file():
        raise Invalid("no_tests", f"{step.tests / 'test.sh'} does not exist. Next step: write it")
    try:
        await empty_folders(ctx, [VERIFIER, *([TESTS] if step.test_folders else [])])
    except AgentFault as error:
        if record["grading"] != "in_place":  # it is a fresh sandbox
            raise Invalid("sandbox_failed", str(error)) from error
        raise
    verdicts = [f"{VERIFIER}/reward.json", f"{VERIFIER}/reward.txt"]
    for path in verdicts:
        if await _read(ctx, path) is not None:
            raise AgentFault(1, "it cannot be removed", path)
    for folder in step.test_folders:
        await ctx.upload_dir(folder, TESTS)
    # The shell in PATH is one that no agent can have replaced: /bin/bash may be another.
    run = f"bash {script}" if _is_for_bash(step) else script
    if _mention(step.test_folders, b"ld.so.preload"):
        run += "  # ld.so.preload"  # so the tests see what the agent wrote there
    command = await as_user(ctx, f"({run}\n) 2>&1", step.verifier.user)
    await ctx.terminal(f"chmod +x {script}", timeout=60)
    done = await ctx.terminal(command, timeout=limit, env=variables)
    await ctx.stop_processes()
    output = str(done["output"])
    record["stdout"] = shortened(output)
    if keep is not None:
        await _keep_logs(ctx, keep, output, record)
    if done.late is not None:
        late = Invalid("verifier_timeout", f"{script} took longer than {limit:g} s")
        late.late = done.late
        raise late
    written = {path: data for path in verdicts if (data := await _read(ctx, path)) is not None}
    if len(written) == 2 and step.test_folders and not _mention(step.test_folders, b"reward.json"):
        raise AgentFault(1, "the tests wrote reward.txt, and not this", verdicts[0])
    for path, data in written.items():
        record["rewards"] = rewards = parsed_rewards(data, path)
        return rewards
    said = output.strip()[-500:] or "nothing"
    raise Invalid("no_reward_file", f"neither {' nor '.join(verdicts)}; exit code {done['exit_code']}, output: {said}")


def _mention(folders: Sequence[Path], name: bytes) -> bool:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return any(name in path.read_bytes() for path in files)


def _is_for_bash(step: Step) -> bool:
    """Whether the first line of test.sh asks for bash, without options."""
    try:
        first = (step.tests / "test.sh").read_bytes()[:200].partition(b"\n")[0]
    except OSError:  # it is in the image
        return False
    return first.rstrip() in (b"#!/bin/bash", b"#!/usr/bin/bash", b"#!/usr/bin/env bash")


_EMPTY = """shopt -s dotglob nullglob
for folder in /logs "$@"; do
  if [ ! -d "$folder" ] || [ -L "$folder" ]; then rm -rf -- "$folder"; fi
done
[ ! -O /logs ] || chmod u+rwx /logs
mkdir -p -- /logs/verifier /logs/agent /logs/artifacts "$@" || exit
for folder in "$@"; do chmod u+rwx -- "$folder"; rm -rf -- "$folder"/*; done
chmod 777 -- /logs/verifier /logs/agent /logs/artifacts"""
"""The folders themselves stay: see `sealing._CLEAR`."""


async def empty_folders(ctx: ToolContext, folders: Sequence[str]) -> None:
    """Empty `folders`, which become folders if they are something else, and make those of /logs.

    Raises:
        AgentFault: that cannot be done: an agent can see to it, for example by a link that it made.
    """
    done = await ctx.terminal(f"set -- {shlex.join(folders)}\n{_EMPTY}", timeout=60)
    if done["exit_code"] != 0:
        raise AgentFault(5, f"it cannot be made: {str(done['output'])[-300:]}", VERIFIER)


async def _read(ctx: ToolContext, path: str) -> bytes | None:
    """A verdict file; None if there is none. A link is not a verdict."""
    folder, _, name = path.rpartition("/")
    if (real := str(await ctx.real_path(path))) != f"{folder}/{name}":
        raise AgentFault(40, f"it is a link, or below one, and leads to {real}", path)
    try:
        return bytes(await ctx.read_bytes(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Invalid("not_a_reward", f"{path}: {error}") from error


async def _keep_logs(ctx: ToolContext, keep: Path, output: str, record: dict[str, Any]) -> None:
    folder = keep / "verifier"
    try:
        await ctx.download_dir(VERIFIER, folder, max_bytes=_KEPT_LOGS)
    except OSError as error:
        record["notes"].append(f"{VERIFIER} was not kept: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test-stdout.txt").unlink(missing_ok=True)  # a copy may be read-only
    (folder / "test-stdout.txt").write_text(output)
