"""Run by Harbor's Python: reads a JSON list of trajectories, and prints them as Harbor's model has them."""

from __future__ import annotations

import json
import sys

from harbor.models.trajectories import Trajectory

print(json.dumps([Trajectory.model_validate(each).to_json_dict() for each in json.load(sys.stdin)]))
