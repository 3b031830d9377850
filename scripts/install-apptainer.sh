#!/bin/sh
# Put Apptainer into the folder $1 (default: the project's cache), for Debian releases that do not have it. Needs no root.
# The package comes from Debian's unstable suite with the C library that it wants beside it; nothing is installed on the
# system, nothing of it is changed. Mirror: the one that the system uses, or $DEBIAN_MIRROR.
set -eu
prefix=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/lachesis/apptainer}

fail() { echo "error: $1" >&2; exit 1; }

case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
if "$prefix/usr/bin/apptainer" --version 2>/dev/null; then
  exit 0
fi
for program in apt-get dpkg-deb patchelf; do
  command -v $program >/dev/null || fail "$program is missing; on Debian: apt-get install apt dpkg patchelf squashfs-tools"
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r $keys ] || fail "$keys is missing: this works on Debian alone; see apptainer.org for other systems"
sources=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null || :)
mirror=${DEBIAN_MIRROR:-$(echo "$sources" | grep -Eo '^(URIs:|deb )[^#]*https?://[^ ]+/debian/?( |$)' |
  grep -Eo 'https?://[^ ]+' | head -n 1)}
[ -n "$mirror" ] || fail "no Debian mirror is configured here; name one with DEBIAN_MIRROR"

mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$prefix.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/new"
echo "deb [signed-by=$keys] $mirror unstable main" >"$work/sources.list"
touch "$work/status"
# The system's settings (a proxy, say) hold, its sources and state are left alone.
apt() {
  apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
    -o Dir::State="$work/state" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
    -o APT::Sandbox::User="$(id -un)" -o APT::Update::Error-Mode=any -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}
echo "apptainer: fetching it and its C library from $mirror (unstable), about 20 MB"
apt update >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "the package lists cannot be fetched from $mirror"; }
(cd "$work" && apt download apptainer libc6) >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; fail "the packages cannot be fetched from $mirror"; }

new=$work/new
dpkg-deb -x "$work"/apptainer_*.deb "$new"
dpkg-deb -x "$work"/libc6_*.deb "$new/glibc"
rm -rf "$new/usr/share" "$new/glibc/usr/share"
loader=$(cd "$new" && echo glibc/usr/lib/*/ld-linux-*.so.*)
libraries=$(dirname "$loader")
[ -f "$new/$loader" ] || fail "the package libc6 is laid out in a way that this script does not know ($loader)"
for program in "$new/usr/bin/apptainer" "$new"/usr/lib/*/apptainer/bin/starter; do
  # Only the C library is the private one; the few others are the system's. Apptainer runs itself with LD_LIBRARY_PATH,
  # which an RPATH precedes and a RUNPATH does not.
  patchelf --force-rpath --set-interpreter "$prefix/$loader" --set-rpath "$prefix/$libraries:/${libraries#glibc/}" "$program"
done
# It takes its own path for its prefix, and looks for its settings in two places below that.
conf=$new/etc/apptainer/apptainer.conf
sed -i 's/^root default capabilities = .*/root default capabilities = no/; s/^systemd cgroups = .*/systemd cgroups = no/' \
  "$conf"
mkdir -p "$new/usr/lib/etc" "$new/usr/lib/var/lib/apptainer/mnt/session"
cp -a "$new/etc" "$new/usr/"
cp -a "$new/etc/apptainer" "$new/usr/lib/etc/"

chmod 755 "$new"
rm -rf "$prefix"
mv "$new" "$prefix"
"$prefix/usr/bin/apptainer" --version || {
  ldd "$prefix/usr/bin/apptainer" >&2 || :
  fail "unstable's apptainer does not run here, see above; remove $prefix, and use a package of apptainer.org's"
}
