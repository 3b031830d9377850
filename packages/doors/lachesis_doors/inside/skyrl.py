"""skyrl-gym: environments of one user who answers, over rows of a data set.

`rows=FILE.jsonl` names the rows: `prompt` (messages) and what the environment takes as `extras`, such as
`{"reward_spec": {"ground_truth": "42"}}`.
"""

import json

import skyrl_gym


class Guest:
    def __init__(self, target, rows, **arguments):
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
