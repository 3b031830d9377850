"""skyrl-gym: environments of one user who answers, over rows of a data set.

`rows=FILE.jsonl` names the rows: `prompt` (messages) and what the environment takes as `extras`, such as
`{"reward_spec": {"ground_truth": "42"}}`.
"""

import json

import skyrl_gym

RUN_CODE = ("lcb", "rlm")
"""Environments that run the agent's Python code here, where it can read files, and change scores."""


class Guest:
    def __init__(self, target, rows, run_code=False, **arguments):
        if target in RUN_CODE and run_code is not True:
            raise ValueError(
                "%s runs the agent's code on this machine, outside of any sandbox. Next step: add &run_code=true "
                "where nothing is worth protecting, such as in a container" % target
            )
        self.target, self.arguments = target, arguments
        with open(rows, encoding="utf-8") as file:
            self.rows = [json.loads(line) for line in file if line.strip()]
        self.size = len(self.rows)

    def item(self, number):
        return {"item": self.rows[number]}

    def open(self, item):
        return Episode(self, item)


class Episode:
    def __init__(self, guest, item):
        extras = {key: value for key, value in item.items() if key != "prompt"}
        self.env = skyrl_gym.make(guest.target, env_config=guest.arguments, extras=extras)
        self.prompt, _ = self.env.init(item["prompt"])

    def act(self, text):
        step = self.env.step(text)
        said = "\n".join(message["content"] for message in step["observations"])
        return {"text": said, "reward": float(step["reward"]), "done": bool(step["done"])}

    def score(self, messages):
        return {}

    def close(self):
        self.env.close()
