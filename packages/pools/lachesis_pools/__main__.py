"""`python -m lachesis_pools`: `lachesis pool`, where only this package is installed."""

from __future__ import annotations

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
