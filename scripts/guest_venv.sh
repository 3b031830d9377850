#!/bin/sh
# Make the virtual environment $2 beside the project's own, $1: the same packages, and those of the list $3 on top. The
# list is complete, so nothing is resolved here (--no-deps); where both have a package, the list's version is used.
set -eu
own=$1 venv=$2 list=$3
[ -x "$venv/bin/python" ] || "$own/bin/python" -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$own/bin/python" -c 'import sysconfig, pathlib; print(sysconfig.get_path("purelib")); print(pathlib.Path.cwd())' \
  >"$site/project.pth"
cmp -s "$list" "$venv/installed.txt" && exit
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$list"
cp "$list" "$venv/installed.txt"
