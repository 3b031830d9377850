#!/bin/sh
# Make the virtual environment $2 beside the project's own, $1: the same packages, the project among them, and those of
# the list $3 on top. The list is complete, so nothing is resolved here (--no-deps); where both have a package, the
# list's version is used.
set -eu
own=$1 venv=$2 list=$3
[ -x "$venv/bin/python" ] || "$own/bin/python" -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir reads the .pth files there, which lead to the project's packages.
"$own/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
  >"$site/project.pth"
printf '#!/bin/sh\nexec "%s" -m lachesis "$@"\n' "$("$venv/bin/python" -c 'import sys; print(sys.executable)')" \
  >"$venv/bin/lachesis"
chmod +x "$venv/bin/lachesis"
cmp -s "$list" "$venv/.installed" && exit
echo "installing $(grep -c '==' "$list") packages of $list into $venv ..."
"$venv/bin/pip" install --quiet --quiet --disable-pip-version-check --no-deps --requirement "$list" || {
  echo "error: pip could not install $list, see above" >&2
  # "+cpu" admits no CUDA build of some GB, which is what PyPI has.
  ! grep -q '^torch.*+cpu' "$list" || echo "  If it names torch: its index has no CPU build. Name one that has, from PyTorch's" \
    "installation page: PIP_EXTRA_INDEX_URL=URL make train-venv" >&2
  echo "  If a download broke: run the same command again, which goes on." >&2
  exit 1
}
cp "$list" "$venv/.installed"
