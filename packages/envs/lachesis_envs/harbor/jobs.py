"""A finished run as a job of Harbor: the folder that `harbor view` opens, with a trial for each rollout.

Files and fields are those that harbor 0.25.0 reads (`harbor.models.job`, `.trial`, `harbor.viewer`). Of the settings of
the run only the names of the backend and the agent are written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from backends.text import counted, without_lone_surrogates
from lachesis_envs.harbor.causes import CAUSES
from lachesis_messages.records.export_lines import ExportLine, ExportTotals, LeftOutRollout
from lachesis_messages.records.groups import ExportError, GroupRecord, RolloutRecord

_BACKENDS = ("docker", "singularity", "modal")
"""Those that Harbor has under the same name."""
_ENDED_EARLY = {"timeout": "AgentTimeoutError", "context_exhausted": "ContextLengthExceededError"}
"""By outcome: exceptions with which Harbor still counts the reward."""


def write_job(
    groups: Iterable[GroupRecord],
    job: Path,
    *,
    data: Path,
    settings: Mapping[str, Any],
    trajectories: Callable[[GroupRecord], Iterable[ExportLine | LeftOutRollout]],
) -> ExportTotals:
    """Write the folder `job`, whole or not at all.

    Args:
        job: `jobs/NAME`; it must not exist.
        data: the folder of the groups file, which has the artifacts of the rollouts.
        settings: of the run, as its manifest has them.
        trajectories: the export that writes ATIF.

    Raises:
        ExportError: `job` exists, artifacts of a rollout are missing, or a file cannot be written.
    """
    job = job.resolve()
    if job.exists():
        raise ExportError(f"{job}: exists; choose another name, or remove it")
    temporary = job.with_name(f".{job.name}.{os.getpid()}.tmp")
    totals, results = ExportTotals(), list[dict[str, Any]]()
    try:
        temporary.mkdir(parents=True)
        for group in groups:
            totals.groups += 1
            lines = [line for line in trajectories(group) if isinstance(line, ExportLine)]
            totals.warnings.update(warning for line in lines for warning in line.warnings)
            written = {line.rollout_ids[0]: line.content for line in lines}
            for rollout in group["rollouts"]:
                result = _result(group, rollout, job.name, settings)
                folder = temporary / result["trial_name"]
                _copy_kept(folder, data, rollout)
                _write_trial(folder, rollout, result, written.get(rollout["rollout_id"]))
                results.append({**result, "exception_info": result["exception_info"] and {}})
        totals.rollouts = totals.lines = len(results)
        _write_summary(temporary, job.name, results)
        temporary.rename(job)
    except OSError as error:
        raise ExportError(f"{job}: cannot be written ({error.strerror or error}: {error.filename})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return totals


def _result(group: GroupRecord, rollout: RolloutRecord, job: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`TrialResult`, with the `TrialConfig` inside."""
    item = group["item"] if isinstance(group["item"], Mapping) else {}
    path = str(item.get("task") or group["item_key"])
    task = str(item.get("name") or Path(path).name)
    trial = f"{re.sub('[^a-zA-Z0-9._-]', '-', task)[:32].strip('_-.')}__{rollout['rollout_id'][:12]}"
    text = json.dumps(group["item"], sort_keys=True)
    backend, player = settings.get("terminal_backend", "local"), settings.get("agent", "model")
    agent = "lachesis" if player == "model" else player
    config = {
        "task": {"path": path, "source": group["environment"]},
        "trial_name": trial,
        "trials_dir": f"jobs/{job}",
        "agent": {"name": agent, "model_name": group["model"]},
        "environment": {"type": backend} if backend in _BACKENDS else {"import_path": f"lachesis:{backend}"},
        "job_id": _id(job),
    }
    verifier = rollout.get("verifier") or {}
    scored = rollout["reward"] is not None
    finished = datetime.fromisoformat(group["timestamp"]).astimezone(UTC)
    times = {
        "started_at": (finished - timedelta(seconds=rollout["seconds"])).isoformat(),
        "finished_at": finished.isoformat(),
    }
    counted = rollout.get("prompt_tokens") is not None and not rollout.get("uncounted_requests")
    names = {
        "n_input_tokens": "prompt_tokens",
        "n_cache_tokens": "cached_tokens",
        "n_output_tokens": "completion_tokens",
    }
    provider, _, model = group["model"].rpartition("/")
    return {
        "id": _id(rollout["rollout_id"]),
        "task_name": task,
        "trial_name": trial,
        "trial_uri": f"jobs/{job}/{trial}",
        "task_id": {"path": path},
        "source": group["environment"],
        "task_checksum": f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}",
        "config": config,
        "agent_info": {"name": agent, "version": "", "model_info": {"name": model, "provider": provider or None}},
        "agent_result": {
            **({ours: rollout[theirs] for ours, theirs in names.items()} if counted else {}),
            "metadata": {
                "outcome": rollout["outcome"],
                "metrics": rollout["metrics"],
                "grading": verifier.get("grading"),
            },
        },
        "verifier_result": {"rewards": {**verifier.get("rewards", {}), "reward": rollout["reward"]}}
        if scored
        else None,
        "verifier_environment_mode": _mode(verifier),
        "step_results": [
            {"step_name": step["name"], "verifier_result": {"rewards": step["rewards"]} if "rewards" in step else None}
            for step in verifier.get("steps", ())
        ]
        or None,
        "exception_info": _exception(rollout, verifier, finished),
        "agent_execution": times,
        # Harbor averages a finished trial without a reward as 0; one that did not finish has no average.
        **(times if scored else {}),
    }


def _mode(verifier: Mapping[str, Any]) -> str | None:
    grading = verifier.get("grading")
    return None if grading is None else "shared" if grading == "in_place" else "separate"


def _exception(rollout: RolloutRecord, verifier: Mapping[str, Any], at: datetime) -> dict[str, Any] | None:
    """Why there is no reward, or what ended the agent early although there is one."""
    kind = _ENDED_EARLY.get(rollout["outcome"])
    if rollout["reward"] is None:
        cause = CAUSES.get(verifier.get("cause") or "")
        kind = cause.harbor or cause.name if cause is not None else rollout["unscored_kind"] or rollout["outcome"]
    if kind is None:
        return None
    return {
        "exception_type": kind,
        "exception_message": rollout["reason"],
        "exception_traceback": rollout["traceback"] or "",
        "occurred_at": at.isoformat(),
    }


def _copy_kept(folder: Path, data: Path, rollout: RolloutRecord) -> None:
    """What the grading kept: `artifacts/` with its manifest and `verifier/`, of each step where there are several."""
    for kind in ("agent", "verifier", "artifacts"):
        (folder / kind).mkdir(parents=True)
    verifier = rollout.get("verifier") or {}
    if not verifier.get("artifacts"):
        return
    source = data / verifier["artifacts"]
    if not source.is_dir():
        raise ExportError(
            f"rollout {rollout['rollout_id']}: its artifacts are missing ({source}). Next step: bring the folder back, "
            "or export with --format atif, which needs none"
        )
    if "steps" not in verifier and {path.name for path in source.iterdir()} <= {"artifacts", "verifier"}:
        shutil.copytree(source, folder, symlinks=True, ignore=_strays, dirs_exist_ok=True)
    else:
        shutil.copytree(source, folder / "steps", symlinks=True, ignore=_strays)
        for step in (folder / "steps").iterdir():  # the viewer shows the folders of one step at a time
            (step / "agent").symlink_to("../../agent")


def _strays(folder: str, names: Sequence[str]) -> list[str]:
    """Links of the agent that lead out of their folder, or nowhere: the viewer would follow them."""
    links = [Path(folder, name) for name in names if Path(folder, name).is_symlink()]
    return [link.name for link in links if not (link.exists() and link.resolve().is_relative_to(link.parent.resolve()))]


def _write_trial(
    folder: Path, rollout: RolloutRecord, result: Mapping[str, Any], trajectory: Mapping[str, Any] | None
) -> None:
    verifier, config = rollout.get("verifier") or {}, result["config"]
    lock = {
        "task": {"name": result["task_name"], "type": "local", "digest": result["task_checksum"], **config["task"]},
        **{part: config[part] for part in ("agent", "environment")},
        "verifier": {"environment_mode": _mode(verifier)},
    }
    files: dict[str, Any] = {
        "config.json": config,
        "lock.json": lock,
        "result.json": result,
        "trial.log": "".join(f"{line}\n" for line in _log(rollout, verifier)),
        "artifacts/manifest.json": [],
        "verifier/test-stdout.txt": verifier.get("stdout"),
        "verifier/reward.json": result["verifier_result"] and result["verifier_result"]["rewards"],
        "agent/changes.diff": verifier.get("diff"),
        "agent/trajectory.json": trajectory and _with_image_files(trajectory, folder / "agent"),
        "exception.txt": result["exception_info"] and result["exception_info"]["exception_message"],
    }
    for name, content in files.items():
        if content is not None and content != "" and not os.path.lexists(folder / name):
            _write(folder / name, content)


def _log(rollout: RolloutRecord, verifier: Mapping[str, Any]) -> Iterator[str]:
    yield f"rollout {rollout['rollout_id']}: {rollout['outcome']} ({rollout['reason']}), reward {rollout['reward']}"
    yield from (f"run again after: {reason}" for reason in rollout["retried_after"])
    yield f"{counted(rollout['turns'], 'turn')}, {counted(rollout['tool_calls'], 'tool call')}, {rollout['seconds']} s"
    yield from (f"turn {error['turn']}: {error['tool']} failed: {error['error']}" for error in rollout["tool_errors"])
    if verifier:
        yield f"graded: {verifier.get('grading')}, cause {verifier.get('cause')}, rewards {verifier.get('rewards')}"
    yield from (f"note: {note}" for note in verifier.get("notes", ()))


def _write_summary(folder: Path, job: str, results: Sequence[Mapping[str, Any]]) -> None:
    """`JobConfig`, and `JobResult` with the means of the trials that have a reward."""
    first = results[0]["config"] if results else {"agent": {"name": "lachesis"}, "environment": {}}
    agents = {result["config"]["agent"]["model_name"]: result["config"]["agent"] for result in results}
    config = {
        "job_name": job,
        "agents": list(agents.values()) or [first["agent"]],
        "datasets": [{"path": source} for source in dict.fromkeys(result["source"] for result in results)],
        "environment": first["environment"],
    }
    _write(folder / "config.json", config)
    if not results:
        return
    evals, tokens = defaultdict[str, list[Mapping[str, Any]]](list), Counter[str]()
    for result in results:
        info = result["agent_info"]
        evals[f"{info['name']}__{info['model_info']['name']}__{result['source']}"].append(result)
        tokens.update({name: n for name, n in result["agent_result"].items() if name != "metadata"})
    times = [result["agent_execution"] for result in results]
    stats = {
        "n_completed_trials": len(results),
        "n_errored_trials": sum(result["exception_info"] is not None for result in results),
        **tokens,
        "evals": {key: _figures(each) for key, each in evals.items()},
    }
    summary = {
        "id": _id(job),
        "started_at": min(time["started_at"] for time in times),
        "finished_at": max(time["finished_at"] for time in times),
        "n_total_trials": len(results),
        "stats": stats,
    }
    _write(folder / "result.json", summary)


def _figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [result["verifier_result"]["rewards"] for result in results if result["verifier_result"]]
    values = {name: [each[name] for each in rewards if name in each] for each in rewards for name in each}
    means = {name: sum(found) / len(found) for name, found in values.items()}
    return {
        "n_trials": len(rewards),
        "n_errors": sum(result["exception_info"] is not None for result in results),
        "metrics": [{"mean": means["reward"]} if len(means) == 1 else means] if means else [],
    }


def _with_image_files(value: Any, folder: Path) -> Any:
    """A copy in which images are files of `folder`, from where the viewer shows them."""
    if isinstance(value, list):
        return [_with_image_files(each, folder) for each in value] if value and isinstance(value[0], dict) else value
    if not isinstance(value, dict):
        return value
    if "media_type" in value and (found := re.match(r"data:image/(\w+);base64,", value["path"])):
        try:
            data = base64.b64decode(value["path"][found.end() :])
        except ValueError:  # what a program sent is no base64, and stays as it is
            return value
        path = f"images/{hashlib.sha256(data).hexdigest()[:16]}.{found[1]}"
        (folder / "images").mkdir(exist_ok=True)
        (folder / path).write_bytes(data)
        return {**value, "path": path}
    return {key: _with_image_files(each, folder) for key, each in value.items()}


def _id(name: str) -> str:
    """An id as Harbor's models want it, the same in each export."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"lachesis/{name}"))


def _write(path: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
    with path.open("x", encoding="utf-8") as file:  # never through a link
        file.write(without_lone_surrogates(text))
