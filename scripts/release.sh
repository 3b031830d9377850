#!/bin/sh
# Build the wheels of all packages into dist/, install them from there into an empty environment, and ask for the version.
# scripts/release.sh VENV [VERSION]: with VERSION, all packages and the pins between them get it first.
set -eu
venv=$1 version=${2:-}
fail() { echo "error: $1" >&2; exit 1; }
of_packages=$(ls pyproject.toml */pyproject.toml packages/*/pyproject.toml)
now=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
if [ -n "$version" ] && [ "$version" != "$now" ]; then
  echo "$version" | grep -Eq '^[0-9]+\.[0-9]+\.[0-9]+([a-z0-9.]*)$' || fail "$version is no version such as 0.2.0"
  # shellcheck disable=SC2086 # a list of files
  sed -i -e "s/^version = \"$now\"\$/version = \"$version\"/" -e "/lachesis-/s/==$now\"/==$version\"/g" $of_packages
  now=$version
fi
rm -rf dist
"$venv/bin/uv" build --quiet --offline --all-packages --wheel --no-build-isolation --python "$venv/bin/python" --out-dir dist
built=$(find dist -name "*-$now-*.whl" | wc -l)
# shellcheck disable=SC2086
[ "$built" = "$(echo $of_packages | wc -w)" ] || fail "dist/ has $built wheels of version $now; every pyproject.toml has one"
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$empty"
# A folder of its own: uv remembers the wheels of a place by their names.
cp -r dist "$empty/links"
"$venv/bin/uv" pip install --quiet --python "$empty/bin/python" --find-links "$empty/links" --constraint requirements/lock.txt "lachesis-rl==$now"
[ "$("$empty/bin/lachesis" --version)" = "lachesis $now" ] || fail "the installed command does not say that it is $now"
"$empty/bin/lachesis" envs >/dev/null
du -ch dist/*.whl | tail -1 | sed "s/total/in $built wheels in dist/"
echo "installed from dist/ into an empty environment: lachesis $now"
