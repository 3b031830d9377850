"""Run by Harbor's Python: reads job folders with Harbor's own models, and prints what they say as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harbor.models.job.config import JobConfig
from harbor.models.job.lock import TrialLock
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trajectories import Trajectory
from harbor.models.trial.artifact_manifest import ArtifactManifestEntry
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import TrialResult

job = Path(sys.argv[1])
JobConfig.model_validate_json((job / "config.json").read_text())
result = JobResult.model_validate_json((job / "result.json").read_text())
trials = {}
results = []
for folder in sorted(path for path in job.iterdir() if path.is_dir()):
    TrialConfig.model_validate_json((folder / "config.json").read_text())
    TrialLock.model_validate_json((folder / "lock.json").read_text())
    trial = TrialResult.model_validate_json((folder / "result.json").read_text())
    results.append(trial)
    for manifest in folder.glob("**/artifacts/manifest.json"):
        entries = [ArtifactManifestEntry.model_validate(entry) for entry in json.loads(manifest.read_text())]
    path = folder / "agent" / "trajectory.json"
    steps = len(Trajectory.model_validate_json(path.read_text()).steps) if path.exists() else None
    trials[folder.name] = {
        "rewards": trial.verifier_result and trial.verifier_result.rewards,
        "valid": trial.reward_valid,
        "cause": trial.failure_cause,
        "steps": steps,
        "manifest": [entry.source for entry in entries],
    }
counted = JobStats.from_trial_results(results, n_total_trials=len(results))
same = {
    name: getattr(counted, name) == getattr(result.stats, name)
    for name in ("n_completed_trials", "n_errored_trials", "n_input_tokens", "n_cache_tokens", "n_output_tokens")
}
for key, ours in result.stats.evals.items():
    theirs = counted.evals[key]
    names = ("n_trials", "n_errors")
    same |= {f"{key}.{name}": dict(ours)[name] == dict(theirs)[name] for name in names}
print(json.dumps({"trials": trials, "same": same}))
