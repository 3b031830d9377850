#!/bin/sh
# Put the environments of the atroposlib 0.4.0 source distribution into the cache, once: 94 MB from PyPI.
# The wheel does not hold them. $1 is a Python with pip. Prints the folder.
set -eu
python=${1:-python3}
cache=${LACHESIS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lachesis}
folder=$cache/atroposlib-0.4.0

if [ ! -d "$folder/environments" ]; then
  echo "downloading the environments of atroposlib into $cache (94 MB, once)" >&2
  mkdir -p "$cache"
  download=$(mktemp -d "$cache/download.XXXXXX")
  trap 'rm -rf "$download"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary atroposlib \
    --dest "$download" atroposlib==0.4.0 >&2
  tar -xzf "$download"/atroposlib-0.4.0.tar.gz -C "$download"
  # A folder that is there is complete: it is moved into its place as a whole.
  mv "$download/atroposlib-0.4.0" "$folder" 2>/dev/null || [ -d "$folder/environments" ]
fi
echo "$folder"
