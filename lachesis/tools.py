"""The names of `lachesis_tools`, the tools of agents, under the core's former name for them."""

from lachesis_tools import *  # noqa: F403
