"""An environment of verifiers with several agents: a solver, and a critic whose tokens are not for training."""

from __future__ import annotations

import verifiers.v1 as vf


class Row(vf.TaskData):
    answer: str


class Sum(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield Sum(Row(prompt=f"What is {number} + 1?", answer=str(number + 1)), self.config.task)
            number += 1


class DebateConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    fixed_critic: bool = True
    attempts: int = 1


class Debate(vf.Env[DebateConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = not self.config.fixed_critic

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.attempts):
            async with agents.solver.interaction(task) as talk:
                said = await talk.turn()
                doubt = vf.Task(vf.TaskData(prompt=f"Is {said.last_reply!r} the answer to: {task.data.prompt}"))
                found = await agents.critic.run(doubt)
                await talk.turn(f"A critic says: {found.last_reply}. Answer again.")


__all__ = ["Debate", "Sums"]
