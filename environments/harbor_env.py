"""Tasks in Harbor's folder format: `python environments/harbor_env.py evaluate --env.dataset_name PATH`."""

from lachesis_envs.harbor import HarborEnv

__all__ = ["HarborEnv"]

if __name__ == "__main__":
    HarborEnv.cli()
