"""A stand-in for the package textarena: a game for two, with its interface.

Players add 1 or 2 in turn; who reaches 5 wins. A move that is none of these loses; `[crash]` breaks the game's code.
"""

import types


class SinglePlayerState:
    """Of games for one player."""


def make(env_id):
    return {"Five-v0": Five, "Broken-v0": Broken}[env_id]()


class Five:
    def reset(self, num_players, seed):
        assert num_players == 2
        self.state = types.SimpleNamespace(
            done=False,
            rewards=None,
            current_player_id=0,
            role_mapping={0: "Player 0", 1: "Player 1"},
            game_info={0: {}, 1: {}},
            error_count=0,
        )
        self.total = 0
        self.seen = {each: f"[GAME] You are player {each}. Say [1] or [2]." for each in (0, 1)}

    def get_observation(self):
        return self.state.current_player_id, self.seen[self.state.current_player_id]

    def step(self, action):
        player = self.state.current_player_id
        for each in (0, 1):
            self.seen[each] += f"\n[Player {player}] {action}"
        if action == "[crash]":
            raise KeyError(action)
        if action not in ("[1]", "[2]"):
            self.state.game_info[player]["invalid_move"] = True
            self.end(1 - player)
            return True, {}
        self.total += int(action[1])
        for each in (0, 1):
            self.seen[each] += f"\n[GAME] It is {self.total}."
        if self.total >= 5:
            self.end(player)
        self.state.current_player_id = 1 - player
        return self.state.done, {}

    def end(self, winner):
        self.state.done, self.state.rewards = True, {winner: 1, 1 - winner: -1}


class Broken(Five):
    def step(self, action):
        raise RuntimeError("the board is lost")
