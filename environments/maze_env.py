"""A maze of files in the sandbox: `python environments/maze_env.py evaluate`."""

from lachesis_envs.maze import MazeEnv

__all__ = ["MazeEnv"]

if __name__ == "__main__":
    MazeEnv.cli()
