"""A server of OpenEnv with one environment: say hello. Runs in the interpreter that has openenv."""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    echoed: str = ""


class Hello(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        self.word = "hello" if (seed or 0) % 2 == 0 else "ahoy"
        return Heard(echoed="say " + self.word, reward=0.0, done=False)

    def step(self, action, timeout_s=None, **more):
        right = action.message == self.word
        return Heard(echoed=action.message, reward=1.0 if right else -0.5, done=right)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Hello, Say, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
