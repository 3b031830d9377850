"""A guest that says again what another one said: the frames of one item, a line for each call.

It runs as the guests of the doors do, and a call that was not recorded is an error of it.
"""

import json
from pathlib import Path


class Guest:
    def __init__(self, target, frames):
        self.frames = [json.loads(line) for line in Path(frames).read_text(encoding="utf-8").splitlines()]
        for name, value in self.frames[0]["value"].items():
            setattr(self, name, value)
        self.size = 1

    def item(self, number):
        return said(self.frames[1], "item", number=number)

    def open(self, item):
        return Session(said(self.frames[2], "open", item=item), iter(self.frames[3:]))


class Session:
    def __init__(self, opened, frames):
        self.prompt, self.solution, self.frames = opened["prompt"], opened["solution"], frames

    def act(self, text):
        return said(next(self.frames), "act", text=text)

    def call(self, name, arguments):
        return said(next(self.frames), "call", name=name, arguments=arguments)

    def score(self, messages):
        return said(next(self.frames), "score")


def said(frame, call, **given):
    if (frame["call"], frame["with"]) != (call, given):
        raise ValueError(f"{call} {given} was not recorded; {frame['call']} {frame['with']} was")
    return frame["value"]
