"""TextArena: games of text. Items are seeds; with several players, the agent's seat is another one with each item.

`opponent` says who has the other seats: `random`, or whoever answers what `ask` says (see `lachesis_doors.textarena`).
"""

import copy
import itertools
import random
import re
import sys

import textarena

MOST_PLAYERS = 15
TRIED = 300
"""Moves of which `random` looks for a legal one."""
COMMON = (
    ["[%d]" % number for number in range(10)]
    + ["[%d %d]" % pair for pair in itertools.product(range(8), repeat=2)]
    + ["[pass]", "[fold]", "[check]", "[call]", "[hold]", "[draw]", "[accept]", "[deny]", "I have nothing to say."]
)


class Guest:
    rewards = "last"

    def __init__(self, target, seed=0, opponent=None, players=None, **_):
        self.target, self.seed, self.opponent = target, seed, opponent
        self.size = None
        self.players = self.found_players(players)
        if self.players > 1 and not opponent:
            raise ValueError(
                "%s is a game for %d players. Next step: say who plays against the agent, as "
                "?opponent=random, ?opponent=policy (the agent's own model) or "
                "?opponent=http://HOST:PORT/v1&opponent_model=NAME" % (target, self.players)
            )
        if self.players == 1 and opponent:
            raise ValueError("%s is a game for one player: leave out opponent=" % target)

    def found_players(self, wanted):
        first, alone = None, False
        for players in [wanted] if wanted else range(1, MOST_PLAYERS + 1):
            try:
                game = self.begun(self.seed, players)
            except Exception as error:
                first = first or error
                continue
            if players > 1 or wanted or isinstance(game.state, textarena.SinglePlayerState):
                return players
            alone = True  # some games for several begin with one player too
        if alone:
            return 1
        said = "with %d players" % wanted if wanted else "with any number of players"
        raise ValueError("%s does not begin %s: %s: %s" % (self.target, said, type(first).__name__, first)) from first

    def begun(self, seed, players):
        random.seed(seed)  # games draw from the generators of the process: between seed and reset nothing may run
        game = textarena.make(env_id=self.target)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        game.reset(num_players=players, seed=seed)
        return game

    def item(self, number):
        item = {"game": self.target, "seed": self.seed + number}
        return {"item": dict(item, seat=number % self.players) if self.players > 1 else item}

    def open(self, item):
        return Game(self, item["seed"], item.get("seat", 0))


class Game:
    def __init__(self, guest, seed, seat):
        self.guest, self.seat = guest, seat
        self.game = guest.begun(seed, guest.players)
        self.state = chance_state()
        self.chance = random.Random(seed)
        self.seen = {}
        self.moved = self.crashed = False
        answer = self.until_asked()
        self.prompt = answer if "ask" in answer else answer["text"]

    def act(self, text):
        """The move of whoever was asked."""
        if self.over:
            return None
        set_chance(self.state)
        try:
            if self.turn == self.seat:
                self.moved = True
            before = copy.deepcopy(self.game)
            try:
                self.game.step(text)
            except Exception:
                # Where any other move is taken, this one is not in the game: its player loses.
                before.step("")
                self.crashed = True
                return {"text": "", "done": True}
            role = self.game.state.role_mapping.get(self.turn)
            self.seen[self.turn] += "\n[%s] %s" % (role, text)
        finally:
            self.state = chance_state()
        return self.until_asked()

    @property
    def over(self):
        return self.crashed or self.game.state.done

    def until_asked(self):
        """What the agent reads when it is its turn, or whom else to ask for a move; random moves are made."""
        set_chance(self.state)
        try:
            while not self.game.state.done:
                self.turn, text = self.game.get_observation()
                text = str(text)
                new = self.news(text)
                self.seen[self.turn] = text
                if self.turn == self.seat:
                    return {"text": new, "done": False}
                if self.guest.opponent != "random":
                    return {"ask": {"seat": self.turn, "text": new}}
                self.game.step(random_move(self.game, text, self.chance))
            return {"text": "", "done": True}
        finally:
            self.state = chance_state()

    def news(self, text):
        """What a player has not read. Some games say all again, others only how they began and how they are now."""
        known = self.seen.get(self.turn, "")
        if text.startswith(known):
            return text[len(known) :].strip("\n")
        parts, old = text.split("\n\n"), known.split("\n\n")
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, old)))
        return "\n\n".join(parts[same:] or parts).strip("\n")

    def score(self, messages):
        if not self.over:
            return {"reward": 0.0}
        if not self.moved:
            return {"invalid": "the game ended before the agent's first move"}
        if self.crashed:
            return {"reward": -1.0 if self.turn == self.seat else 1.0}
        reward = (self.game.state.rewards or {}).get(self.seat, 0.0)
        if not isinstance(reward, (int, float)) and self.game.state.game_info[self.seat].get("invalid_move"):
            return {"reward": -1.0}  # some games have the reason there
        return {"reward": float(reward)}


def random_move(game, seen, chance):
    """A move that the game takes: like those in brackets that the player has read, or one that many games have."""
    named = [each for each in dict.fromkeys(re.findall(r"\[[^\[\]\n]{1,60}\]", seen)) if not each.startswith("[Player")]
    shapes = [each for each in named if re.search(r"\d|\b[A-Za-z]\b|\b[a-z]\d", each)]
    chance.shuffle(named)
    varied = [varied_move(chance.choice(shapes), chance) for _ in range(TRIED)] if shapes else []
    player, state = game.state.current_player_id, chance_state()
    for move in dict.fromkeys(itertools.chain(named, varied, chance.sample(COMMON, len(COMMON)))):
        trial = copy.deepcopy(game)
        try:
            trial.step(move)
        except Exception:
            continue
        finally:
            set_chance(state)
        wrong = trial.state.game_info.get(player, {}).get("invalid_move")
        if not wrong and not getattr(trial.state, "error_count", 0):
            return move
    raise ValueError("found no legal move of player %d; name another opponent than random" % player)


def varied_move(move, chance):
    """A move of the same form: other digits, and other letters where these are no words."""
    move = re.sub(r"\d", lambda _: str(chance.randrange(10)), move)
    for letters in ("abcdefgh", "ABCDEFGHIJ"):
        move = re.sub(r"(?<![A-Za-z])[%s](?![A-Za-z])" % letters, lambda _, of=letters: chance.choice(of), move)
    return move


def chance_state():
    """What the generators of the process, from which games draw, draw next."""
    return random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def set_chance(state):
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
