"""Gymnasium: environments with discrete actions and text, or with a render mode that is text."""

import gymnasium


class Guest:
    def __init__(self, target, seed=0, **arguments):
        self.target, self.seed, self.arguments = target, seed, arguments
        self.size = None
        made = gymnasium.make(target, **arguments)
        # Not tried out: an environment without text is made with it all the same, and fails when it is reset.
        self.shown = {"render_mode": "ansi"} if "ansi" in made.metadata.get("render_modes", ()) else {}
        self.discrete = isinstance(made.action_space, gymnasium.spaces.Discrete)
        if not self.discrete and not isinstance(made.action_space, gymnasium.spaces.Text):
            raise ValueError("%s has actions of %s; this door sends numbers and text" % (target, made.action_space))
        self.first = int(made.action_space.start) if self.discrete else 0
        self.last = self.first + int(made.action_space.n) - 1 if self.discrete else 0

    def made(self):
        return gymnasium.make(self.target, **{**self.shown, **self.arguments})

    def item(self, number):
        action = (
            {"action": {"type": "integer", "minimum": self.first, "maximum": self.last}}
            if self.discrete
            else {"action": {"type": "string"}}
        )
        schema = {"type": "object", "properties": action, "required": ["action"], "additionalProperties": False}
        step = {"name": "step", "description": "Take an action in the environment.", "parameters": schema}
        return {"item": {"environment": self.target, "seed": self.seed + number}, "tools": [step]}

    def open(self, item):
        return Episode(self, item["seed"])


class Episode:
    def __init__(self, guest, seed):
        self.guest = guest
        self.env = guest.made()
        observation, _ = self.env.reset(seed=seed)
        about = "an integer from %d to %d" % (guest.first, guest.last) if guest.discrete else "text"
        self.prompt = "You act in the environment %s. Call `step` with an action, %s, until it ends.\n\n%s" % (
            guest.target,
            about,
            self.seen(observation),
        )
        self.over = False

    def seen(self, observation):
        shown = self.env.render() if self.env.render_mode == "ansi" else None
        return "Observation: %s%s" % (observation, "\n" + shown if isinstance(shown, str) else "")

    def act(self, text):
        return None  # an answer without a call ends the episode

    def call(self, name, arguments):
        action = arguments["action"]
        if not self.env.action_space.contains(action):
            return {"error": "no action", "text": "%r is no action of this environment" % (action,)}
        observation, reward, ended, cut, _ = self.env.step(action)
        return {"text": self.seen(observation), "reward": float(reward), "done": bool(ended or cut)}

    def score(self, messages):
        return {}

    def close(self):
        self.env.close()
