#!/usr/bin/env python
"""Train a model on the batches of a rollout API, and serve it: see docs/training.md."""

import sys

from lachesis_train.verbs.launch_training import main

if __name__ == "__main__":
    sys.exit(main())
