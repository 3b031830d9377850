"""Plays every game of TextArena twice from the same seeds, and prints which play, and which are alike.

python textarena_survey.py GUEST, in the interpreter of the door; GUEST is `lachesis_doors/inside/textarena.py`. A line
for each game: its name, players, what came out, who played the other seats. Moves are random where the door finds legal
ones, and text that no game knows elsewhere.
"""

import contextlib
import importlib.util
import io
import random
import sys

sys.path.pop(0)  # the folder of this script
TURNS = 6


def main(path):
    spec = importlib.util.spec_from_file_location("guest", path)
    guest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guest)
    from textarena.envs.registration import ENV_REGISTRY

    for name in ENV_REGISTRY:
        if name.endswith(("-raw", "-train")):  # the same game, shown otherwise
            continue
        print("\t".join(map(str, (name, *surveyed(guest, name)))), flush=True)


def surveyed(guest, name):
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            game = loaded(guest, name, "random")
            try:
                first, others = played(guest, game), "random" if game.opponent else "-"
            except ValueError as error:
                if "no legal move" not in str(error):
                    raise
                game = loaded(guest, name, "model")
                first, others = played(guest, game), "a model"
            alike = first == played(guest, game)
        return game.players, "alike" if alike else "differs", others
    except BaseException as error:
        said = str(error).split("does not begin with any number of players: ")[-1]
        return "-", f"{type(error).__name__}: {' '.join(said.replace('*', '').split())[:90]}", "-"


def loaded(guest, name, opponent):
    try:
        return guest.Guest(name)
    except ValueError as error:
        if "say who plays" not in str(error):
            raise
        return guest.Guest(name, opponent=opponent)


def played(guest, game):
    """All that was said in two games."""
    said = []
    for number in (0, 1):
        session, chance = game.open(game.item(number)["item"]), random.Random(number)
        said.append(session.prompt)
        for _ in range(TURNS):
            try:
                move = guest.random_move(session.game, session.seen[session.turn], chance)
            except ValueError:
                move = "[nonsense]"
            said.append((move, session.act(move)))
            if said[-1][1].get("done"):
                break
        said.append(session.score([]))
    return said


if __name__ == "__main__":
    main(sys.argv[1])
