#!/bin/sh
# Debian and Ubuntu packages that the project needs besides git and make. CI runs this, and so may you.
#
#   scripts/debian-packages.sh           what `make demo` needs
#   scripts/debian-packages.sh engines   and what the tests of all sandbox backends need: a Docker engine, an ssh server, ...
#   scripts/debian-packages.sh browser   and what the tests of `lachesis view` in a browser need
set -eu
packages="python3 python3-venv libgomp1" # libgomp1: the embedded model's OpenMP
case ${1:-} in
"") ;;
engines)
  packages="$packages docker.io openssh-server bubblewrap busybox-static iproute2"
  packages="$packages binutils-aarch64-linux-gnu binutils-x86-64-linux-gnu" # for the code that starts shells
  packages="$packages patchelf squashfs-tools libseccomp2 libsqlite3-0" # what scripts/install-apptainer.sh builds on
  ;;
browser) packages="$packages chromium" ;;
*) echo "error: $0 takes nothing, or one of the words engines and browser; not $1" >&2; exit 2 ;;
esac
missing=$(for package in $packages; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
done)
[ -z "$missing" ] && exit 0
[ "$(id -u)" = 0 ] || { echo "error: needs root; run: sudo $0 $*" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 # a list of words
apt-get install -q -y --no-install-recommends $missing
