#!/bin/bash
# Grades the difference that the agent made to /testbed, in a fresh copy of it, with the hidden tests.
cd /testbed && [ -f /logs/artifacts/model.patch ] || exit 1
[ ! -f /opt/miniconda3/bin/activate ] || . /opt/miniconda3/bin/activate testbed
[ ! -d .venv/bin ] || PATH=$PWD/.venv/bin:$PATH
git config --global --add safe.directory /testbed
apply() { git apply --whitespace=nowarn "$1"; }
if [ -f /tests/base ]; then  # images may have commits of their own on top of it, which the difference holds, too
  base=$(cat /tests/base)
  git read-tree -u --reset "$base" || exit 1
fi
if [ -s /logs/artifacts/model.patch ] && ! apply /logs/artifacts/model.patch; then
  echo 0 > /logs/verifier/reward.txt
  exit
fi
if [ -f /tests/test.patch ]; then
  git apply --numstat -z /tests/test.patch | cut -z -f 3 | while IFS= read -r -d '' path; do
    git checkout -q "$base" -- "$path" 2>/dev/null || rm -rf -- "$path"
  done
  apply /tests/test.patch || exit 1
fi
python /tests/grade.py
