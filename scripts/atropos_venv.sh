#!/bin/sh
# Make the virtual environment $2 beside the project's own, $1: the same packages, and those that environments of
# Atropos import on top. None of them is a dependency of ours.
set -eu
own=$1 venv=$2
[ -x "$venv/bin/python" ] || "$own/bin/python" -m venv "$venv"
install="$own/bin/uv pip install --quiet --python $venv/bin/python"
$install --no-deps --requirement requirements/lock.txt
$install --no-deps --editable .
$install scikit-learn langdetect pennylane pytz reasoning-gym "gymnasium<1.2"
