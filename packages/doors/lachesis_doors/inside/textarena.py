"""TextArena: games of text for one player, and for two, of whom the agent is the first.

`opponent=random` (the default) plays the other side by random choices from the legal moves that the game lists.
"""

import random

import textarena


class Guest:
    rewards = "last"

    def __init__(self, target, seed=0, opponent=None):
        self.target, self.seed, self.opponent = target, seed, opponent
        self.size = None
        game = self.made(seed)
        self.players = 1 if is_for(game, 1) else 2
        if not is_for(game, self.players):
            raise ValueError("%s is for more than two players" % target)
        if self.players == 2 and opponent not in ("pass",):
            raise ValueError("%s is for two players: name the other one, textarena:%s?opponent=pass" % (target, target))

    def made(self, seed):
        random.seed(seed)  # games draw from the generator of the process: between seed and reset nothing may run
        return textarena.make(env_id=self.target)

    def item(self, number):
        return {"item": {"game": self.target, "seed": self.seed + number}}

    def open(self, item):
        return Game(self, item["seed"])


def is_for(game, players):
    try:
        game.reset(num_players=players, seed=0)
    except Exception:
        return False
    return True


class Game:
    def __init__(self, guest, seed):
        self.guest = guest
        self.game = guest.made(seed)
        self.game.reset(num_players=guest.players, seed=seed)
        self.state = random.getstate()
        self.prompt = self.seen()

    def seen(self):
        return str(self.game.get_observation()[1])

    def act(self, text):
        random.setstate(self.state)
        try:
            done, _ = self.game.step(text)
            while not done and self.game.state.current_player_id != 0:
                self.game.get_observation()
                done, _ = self.game.step("pass")
            return {"text": "" if done else self.seen().split("[GAME]")[-1].strip(), "done": bool(done)}
        finally:
            self.state = random.getstate()

    def score(self, messages):
        if not self.game.state.done:
            return {"reward": 0.0}
        return {"reward": float((self.game.state.rewards or {}).get(0, 0.0))}
