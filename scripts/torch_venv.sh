#!/bin/sh
# Make the virtual environment $2 beside the project's own, $1: the same packages, and torch for the CPU on top.
# Torch is not in the lock file, for what PyPI has is a CUDA build of some GB; "+cpu" admits no other.
set -eu
own=$1 venv=$2 version=2.13.0
[ -x "$venv/bin/python" ] || "$own/bin/python" -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$own/bin/python" -c 'import sysconfig, pathlib; print(sysconfig.get_path("purelib")); print(pathlib.Path.cwd())' \
  >"$site/project.pth"
"$venv/bin/pip" install --quiet --disable-pip-version-check --constraint requirements/lock.txt "torch==$version+cpu" || {
  echo "error: pip finds no CPU build of torch $version; PyTorch's installation page names the index that has it:" >&2
  echo "  PIP_EXTRA_INDEX_URL=... make test-torch" >&2
  exit 1
}
