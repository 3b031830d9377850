#!/bin/sh
# Tests against programs of others, installed on first use: scripts/test-with.sh NAME, that is `make test-NAME`.
#
#   atropos     all environments of atroposlib's source distribution that play without the network
#   axe         the pages of the viewer against axe-core's rules of accessibility, in a Chromium (npm; 3 MB)
#   browser     hostile pages, all tasks of browser_tasks, and 50 rollouts that are killed, in a Chromium (npm; 120 MB)
#   doors       environments of TextArena, Gymnasium, BFCL, OpenEnv, ORS and MCP servers (600 MB); NeMo Gym and
#               verifiers where they are installed
#   guests      verifiers and Inspect (350 MB)
#   harbor      task folders and jobs against Harbor's own models and viewer
#   pools       pools of sandboxes: workers by ssh, Slurm and Ray (200 MB; as root, with Debian's slurm-wlm and munge)
#   programs    agent programs in sandboxes (1.5 GB from PyPI and npm)
#   pythons     all tests under every python3.12, python3.13 and python3.14 that is here, each in an environment of its own
#   ray         batches on a real Ray of this machine (200 MB)
#   skyrl       a training run with SkyRL as the engine (Python 3.12; 6 GB)
#   slurm       batches under a Slurm of one node; as root, with Debian's slurm-wlm and munge
#   templates   the calls of all chat templates of five packages, read back (160 MB of downloads)
#   tinker-sdks the embedded engine against an older Tinker SDK too
#   trainers    rollouts in the own types of SkyRL and verl, and steps of SkyRL's own loop (350 MB)
#   vllm        a real vLLM on the CPU (3.5 GB)
#
# They are installed into ~/.cache/lachesis, or where a variable says (AGENT_BROWSER, AXE, GUESTS, PROGRAMS, RAY, SKYRL,
# TEMPLATES, TRAINERS). PYTHON312 names a Python that doors (TextArena), harbor and skyrl take, if there is more than one.
set -eu
name=$1
VENV=${VENV:-.venv}
bin=$VENV/bin
cache=$HOME/.cache/lachesis

# 0.25 is the version that SkyRL's server takes. It goes into a folder of its own, which hides the environment's.
older_tinker() {
  older=$PWD/$VENV-tinker-0.25
  [ -d "$older/tinker" ] || "$VENV-train/bin/pip" install --quiet --no-deps --target "$older" tinker==0.25.0
  export PYTHONPATH="$older" LACHESIS_NEED_TORCH=1
}

case $name in
  atropos)
    scripts/atropos-environments.sh "$bin/python"
    scripts/atropos_venv.sh "$VENV" "$VENV-atropos"
    "$VENV-atropos/bin/python" -m benchmarks.atropos_environments
    ;;
  axe)
    axe=${AXE:-$cache/axe}
    [ -d "$axe/node_modules" ] || npm install --silent --no-fund --no-audit --prefix "$axe" axe-core@4.14.1
    LACHESIS_AXE=$axe/node_modules/axe-core/axe.min.js "$bin/pytest" tests/view/test_axe.py
    ;;
  browser)
    # As root: scripts/debian-packages.sh browser
    browser=${AGENT_BROWSER:-$cache/agent-browser}
    [ -d "$browser/node_modules" ] || npm install --silent --prefix "$browser" agent-browser@0.41.2
    export AGENT_BROWSER_PATH="$browser/node_modules/agent-browser/bin/agent-browser.js" LACHESIS_NEED_BROWSER=1
    "$bin/pytest" -s tests/tools/test_browser.py tests/envs/environments/test_browser_tasks.py \
      tests/umbrella/test_every_tool.py tests/envs/environments/test_browser_kills.py
    ;;
  doors)
    doors=${LACHESIS_DOORS:-$cache/doors}
    while read -r door packages; do
      [ -x "$doors/$door/bin/python" ] && continue
      python=$bin/python
      # Seven of its games are written for Python 3.12 and later.
      [ "$door" != textarena ] || python=${PYTHON312:-3.12}
      "$bin/uv" venv --quiet --python "$python" "$doors/$door"
      # shellcheck disable=SC2086 # a list
      "$bin/uv" pip install --quiet --python "$doors/$door/bin/python" $packages
    done <requirements/doors.txt
    # With RECORD=1, the frames of tests/doors/golden are written again.
    LACHESIS_DOORS=$doors LACHESIS_NEED_DOORS=1 "$bin/pytest" tests/doors/test_real.py
    ;;
  guests)
    guests=${GUESTS:-$cache/guests}
    mkdir -p "$guests"
    for guest in verifiers inspect; do
      echo "== $guest"
      scripts/venv_beside.sh "$VENV" "$guests/$guest" "requirements/guests/$guest.txt"
      LACHESIS_NEED_GUEST=$guest "$guests/$guest/bin/python" -m pytest "tests/compat/guests/test_$guest.py"
    done
    # The same interpreter reads what trainers get: verifiers' own types and its client.
    "$guests/verifiers/bin/python" -m pytest tests/doors/test_training_contract.py \
      tests/train/policy_server/test_verifiers_client.py
    ;;
  harbor)
    # Harbor needs Python 3.12, so it has an environment of its own. It asks for a certifi that mirrors of PyPI may not
    # have yet; any version will do.
    harbor=$cache/harbor/venv
    "$bin/uv" pip show --quiet --python "$harbor/bin/python" harbor >/dev/null 2>&1 || {
      "$bin/uv" venv --quiet --clear --python "${PYTHON312:-3.12}" "$harbor"
      echo certifi >"$harbor/overrides.txt"
      "$bin/uv" pip install --quiet --python "$harbor/bin/python" --override "$harbor/overrides.txt" harbor==0.25.0
    }
    LACHESIS_NEED_HARBOR=1 "$bin/pytest" tests/envs/harbor
    ;;
  programs)
    programs=${PROGRAMS:-$cache/programs}
    scripts/programs.sh "$programs"
    LACHESIS_PROGRAMS=$programs "$bin/pytest" -s tests/testing/programs
    ;;
  pythons)
    for version in ${PYTHONS:-3.12 3.13 3.14}; do
      python=python$version
      "$python" --version 2>/dev/null || { echo "$python is not here"; continue; }
      PYTHON=$python scripts/venv.sh "$VENV-$version"
      "$VENV-$version/bin/python" -m tests.run
    done
    ;;
  ray)
    ray=${RAY:-$cache/ray}
    mkdir -p "$(dirname "$ray")"
    scripts/venv_beside.sh "$VENV" "$ray" requirements/guests/ray.txt
    LACHESIS_NEED_RAY=1 "$ray/bin/python" -m pytest tests/data/batch/test_ray.py
    ;;
  pools)
    ray=${RAY:-$cache/ray}
    mkdir -p "$(dirname "$ray")"
    scripts/venv_beside.sh "$VENV" "$ray" requirements/guests/ray.txt
    LACHESIS_NEED_RAY=1 LACHESIS_NEED_SLURM=1 "$ray/bin/python" -m pytest tests/pools
    ;;
  skyrl)
    older_tinker
    skyrl=${SKYRL:-$cache/skyrl}
    scripts/skyrl_venv.sh "${PYTHON312:-python3.12}" "$skyrl"
    LACHESIS_SKYRL=$skyrl/bin/python "$VENV-train/bin/python" -P -m pytest -s tests/train/torch/test_skyrl.py
    ;;
  slurm)
    for program in munged slurmctld slurmd sbatch; do
      command -v $program >/dev/null || {
        echo "$program is not installed; as root: apt-get install slurm-wlm munge" >&2
        exit 1
      }
    done
    [ "$(id -u)" = 0 ] || { echo "slurmd starts jobs as root only" >&2; exit 1; }
    LACHESIS_NEED_SLURM=1 "$bin/pytest" tests/data/batch/test_slurm.py
    ;;
  templates)
    # The packages are only downloaded, for the chat templates in them.
    templates=${TEMPLATES:-$cache/templates}
    mkdir -p "$templates"
    download="$PWD/$bin/python -m pip download --quiet --no-deps --exists-action i --dest $templates"
    $download --only-binary :all: trl==1.16.0 axolotl==0.19.0 unsloth==2026.10.9 xinference==4.1.0
    $download --no-binary :all: llama-cpp-python==0.3.36
    "$bin/python" -m benchmarks.chat_templates "$templates"
    ;;
  tinker-sdks)
    older_tinker
    "$VENV-train/bin/python" -P -m pytest tests/train/torch/engine/test_wire.py
    ;;
  trainers)
    # SkyRL asks for Python 3.12. What is tested here needs one thing of it: a TypedDict that pydantic reads.
    trainers=${TRAINERS:-$cache/trainers}
    mkdir -p "$(dirname "$trainers")"
    PIP_IGNORE_REQUIRES_PYTHON=1 scripts/venv_beside.sh "$VENV-train" "$trainers" requirements/guests/trainers.txt
    "$trainers/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" | while read -r site; do
      echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' >"$site/skyrl.pth"
    done
    LACHESIS_NEED_TRAINERS=1 "$trainers/bin/python" -m pytest -s tests/train/trainers
    ;;
  vllm)
    "$bin/pytest" -s tests/tokens/vllm
    ;;
  *)
    echo "no tests named '$name'; there are:" >&2
    sed -n 's/^#   //p' "$0" >&2
    exit 2
    ;;
esac
