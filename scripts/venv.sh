#!/bin/sh
# Make the virtual environment $1 and install the locked dependencies of the file $2 (requirements/lock.txt) and the
# project into it. $3 is the size of their downloads, in words.
# The lock is complete, so nothing is resolved here (--no-deps): what is installed is what was tested.
set -eu
venv=$1 lock=${2:-requirements/lock.txt} size=${3:-420 MB}
python=${PYTHON:-python3}

fail() { echo "error: $1" >&2; exit 1; }

# pip says what it does in a hundred lines; on a terminal one line that changes is enough.
progress() {
  awk -v total="$(grep -c '==' "$lock")" -v terminal="$1" '
    /^Requirement already satisfied/ { n++ }
    /^(Collecting|Processing) / { n++; sub(/.*\//, "", $2); if (terminal) printf "\r  %d of %d: %-50s", n, total, $2
                     else if (n % 20 == 0) printf "  %d of %d\n", n, total }
    /^Installing collected/ { if (terminal) printf "\r"; printf "  unpacking %d packages ...%40s\n", n, "" }
    { fflush() }'
}

command -v "$python" >/dev/null || fail "no $python here; run: sudo scripts/debian-packages.sh"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old, 3.11 is needed; name a newer one with: make PYTHON=python3.12 ..."
[ "$(uname -s)" = Linux ] || fail "sandboxes need Linux; this is $(uname -s)"

# As root on Debian, what is missing can be had without asking.
debian_packages() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    scripts/debian-packages.sh
  else
    fail "$1; run: sudo scripts/debian-packages.sh"
  fi
}

if [ ! -x "$venv/bin/pip" ]; then
  rm -rf "$venv"
  if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
    rm -rf "$venv"
    debian_packages "$python cannot make virtual environments"
    "$python" -m venv "$venv"
  fi
fi

echo "installing the $(grep -c '==' "$lock") packages of $lock into $venv (about $size of downloads the first time) ..."
status=$venv/.pip-status errors=$venv/.pip-errors  # its warnings, a hundred lines in some networks, matter if it fails
if [ -t 1 ]; then terminal=1; else terminal=0; fi
{ code=0
  "$venv/bin/pip" install --disable-pip-version-check --progress-bar off --no-deps --requirement "$lock" 2>"$errors" || code=$?
  echo "$code" >"$status"
} | progress "$terminal"
[ "$(cat "$status")" = 0 ] || cat "$errors" >&2
[ "$(cat "$status")" = 0 ] || fail "pip could not install $lock, see above; run the same command again to go on"
# Every folder with a pyproject.toml is a package of its own; all of them are built by what the lock has.
set --
for project in . */pyproject.toml packages/*/pyproject.toml; do
  if [ -e "$project" ]; then set -- "$@" --editable "${project%/pyproject.toml}"; fi
done
"$venv/bin/uv" pip install --quiet --offline --python "$venv/bin/python" --no-deps --no-build-isolation "$@"
# A wheel has this file beside the packages; an editable install has not.
cp packages/compat/lachesis_compat/lachesis_old_paths.pth "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$venv/bin/python" -c 'import xllamacpp' 2>/dev/null || debian_packages "a library that the embedded model needs is missing"
