"""Compression of long conversations: the middle turns become one summary, and the rest stays as it was.

It takes what counts tokens and what writes a summary as arguments.
"""

from lachesis.compression.region import Turn, choose_region
from lachesis.compression.settings import CompressionFileSettings, CompressionSettings, read_settings

__all__ = ["CompressionFileSettings", "CompressionSettings", "Turn", "choose_region", "read_settings"]
