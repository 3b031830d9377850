"""Real fixes of Python packages as tasks: `python environments/hermes_swe_env.py evaluate`."""

from lachesis_envs.swe.environment import HermesSweEnv

__all__ = ["HermesSweEnv"]

if __name__ == "__main__":
    HermesSweEnv.cli()
