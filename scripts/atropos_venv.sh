#!/bin/sh
# Make the virtual environment $2 beside the project's own, $1: the same packages, and those that environments of
# Atropos import on top. None of them is a dependency of ours.
set -eu
own=$1 venv=$2
"$(dirname "$0")/venv_beside.sh" "$own" "$venv" requirements/lock.txt
install="$own/bin/uv pip install --quiet --python $venv/bin/python"
$install scikit-learn langdetect pennylane pytz "gymnasium<1.2"
# pyproject.toml trims what reasoning-gym needs; all of it includes pycosat, which is built.
$install --no-config reasoning-gym || echo "reasoning-gym's environment is left out: it needs a C compiler" >&2
