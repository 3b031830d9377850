"""TextArena: games of text for one player. Items are seeds."""

import random

import textarena


class Guest:
    rewards = "last"

    def __init__(self, target, seed=0):
        self.target, self.seed = target, seed
        self.size = None
        try:
            self.made(seed).reset(num_players=1, seed=seed)
        except Exception as error:
            raise ValueError("%s is no game for one player: %s" % (target, error)) from error

    def made(self, seed):
        random.seed(seed)  # games draw from the generator of the process: between seed and reset nothing may run
        return textarena.make(env_id=self.target)

    def item(self, number):
        return {"item": {"game": self.target, "seed": self.seed + number}}

    def open(self, item):
        return Game(self, item["seed"])


class Game:
    def __init__(self, guest, seed):
        self.guest = guest
        self.game = guest.made(seed)
        self.game.reset(num_players=1, seed=seed)
        self.state = random.getstate()
        self.prompt = self.seen()

    def seen(self):
        return str(self.game.get_observation()[1])

    def act(self, text):
        random.setstate(self.state)
        try:
            done, _ = self.game.step(text)
            return {"text": "" if done else self.seen().split("[GAME]")[-1].strip(), "done": bool(done)}
        finally:
            self.state = random.getstate()

    def score(self, messages):
        if not self.game.state.done:
            return {"reward": 0.0}
        return {"reward": float((self.game.state.rewards or {}).get(0, 0.0))}
