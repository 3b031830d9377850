"""The conversation of a shell played by mini-swe-agent's classes, as its own batches do: in threads, a file each.

python mini_agent.py URL ROLLOUTS AT_ONCE FOLDER
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main(url: str, rollouts: int, at_once: int, folder: Path) -> None:
    settings = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    texts = {name: settings["agent"][name] for name in ("system_template", "instance_template")}

    def play(number: int) -> None:
        model = LitellmModel(
            model_name="openai/instant",
            model_kwargs={"api_base": url, "api_key": "none"},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(model, LocalEnvironment(), **texts, output_path=folder / f"{number}.json")
        found = agent.run(f"What is the answer to question {number}?")
        if found.get("exit_status") != "Submitted":
            raise RuntimeError(f"rollout {number} of mini-swe-agent ended with {found}")

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(play, range(rollouts)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
