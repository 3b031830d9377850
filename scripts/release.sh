#!/bin/sh
# Build the wheels of all packages into dist/, check them as PyPI does, install them from there into an empty environment,
# and play the demo with them.
# scripts/release.sh VENV [VERSION]: with VERSION, all packages, the pins between them and CITATION.cff get it first.
# PYTHONS="3.11 3.14" tries the wheels with each of these interpreters, which uv finds or downloads.
set -eu
venv=$1 version=${2:-}
fail() { echo "error: $1" >&2; exit 1; }
of_packages=$(ls pyproject.toml */pyproject.toml packages/*/pyproject.toml)
now=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
if [ -n "$version" ] && [ "$version" != "$now" ]; then
  echo "$version" | grep -Eq '^[0-9]+\.[0-9]+\.[0-9]+([a-z0-9.]*)$' || fail "$version is no version such as 0.3.0"
  # shellcheck disable=SC2086 # a list of files
  sed -i -e "s/^version = \"$now\"\$/version = \"$version\"/" -e "/lachesis-/s/==$now\"/==$version\"/g" $of_packages
  sed -i "s/^version: .*/version: $version/" CITATION.cff
  now=$version
fi
rm -rf dist
"$venv/bin/uv" build --quiet --offline --all-packages --wheel --no-build-isolation --python "$venv/bin/python" --out-dir dist
built=$(find dist -name "*-$now-*.whl" | wc -l)
# shellcheck disable=SC2086
[ "$built" = "$(echo $of_packages | wc -w)" ] || fail "dist/ has $built wheels of version $now; every pyproject.toml has one"
"$venv/bin/uv" tool run --quiet twine==7.0.0 check --strict dist/*.whl >dist/.checked || fail "$(cat dist/.checked)"
rm dist/.checked
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
# A folder of its own: uv remembers the wheels of a place by their names.
cp -r dist "$empty/links"
for python in ${PYTHONS:-$venv/bin/python}; do
  in=$empty/$(basename "$python")
  "$venv/bin/uv" venv --quiet --python "$python" "$in"
  "$venv/bin/uv" pip install --quiet --python "$in/bin/python" --find-links "$empty/links" --constraint requirements/lock.txt "lachesis-rl==$now"
  [ "$("$in/bin/lachesis" --version)" = "lachesis $now" ] || fail "the installed command does not say that it is $now"
  "$in/bin/lachesis" envs >/dev/null
  mkdir "$in/demo"
  (cd "$in/demo" && "$in/bin/lachesis" demo --items 2) >"$in/demo.txt" 2>&1 ||
    { cat "$in/demo.txt"; fail "the demo did not end well"; }
  echo "installed from dist/ into an empty environment of $("$in/bin/python" --version): lachesis $now; its demo ran"
done
du -ch dist/*.whl | tail -1 | sed "s/total/in $built wheels in dist/"
