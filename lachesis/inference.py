"""The names of `lachesis_client`, the clients of model servers, under the core's former name for them."""

from lachesis_client import *  # noqa: F403
