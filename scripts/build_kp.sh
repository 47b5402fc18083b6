#!/usr/bin/env bash
# usage: scripts/build_kp.sh [PYTHON]   (default: .venv/bin/python)
# Builds Kompute's Python binding (kp) into a local wheel, once per Python version, and installs it.
# kp is published as source only and its build fetches libraries with git. Here g++, cmake, make, the
# Vulkan headers and fmt are the distribution's and pybind11 is pip's, so only the package index is used.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cache=${ZINC_ATTN_CACHE:-$root/.cache}
python=${1:-$root/.venv/bin/python}
version=0.9.0
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')

export KOMPUTE_OPT_INSTALL=OFF KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON
export KOMPUTE_OPT_USE_BUILT_IN_{VULKAN_HEADER,PYBIND11,FMT,SPDLOG}=OFF
# Otherwise kp turns the validation layer on wherever it is installed, timed runs included.
export KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS=ON
# kp reads one digit.
jobs=$(nproc)
export KOMPUTE_PYTHON_NUM_PARALLEL_THREADS=$((jobs < 8 ? jobs : 8))

build() {
    work=$(mktemp -d "$cache/kp-build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m venv "$work/env"
    local pip=("$work/env/bin/python" -m pip --disable-pip-version-check)
    # pip prepares kp's metadata with setuptools and wheel, which recent venvs lack.
    "${pip[@]}" install setuptools==80.9.0 wheel==0.45.1 pybind11==2.13.6
    "${pip[@]}" download --no-deps --no-binary kp --no-build-isolation -d "$work" "kp==$version"
    tar -xf "$work/kp-$version.tar.gz" -C "$work"
    # A comma is missing in setup.py: cmake never sees PYTHON_EXECUTABLE and takes any Python it finds.
    # The NumPy pin is older than pybind11 2.13, which supports NumPy 2.
    sed -i -e "s/\(VERSION_CHECK=ON'\)\$/\1,/" -e 's/"numpy<2.0.0"/"numpy"/' "$work/kp-$version/setup.py"
    pybind11_DIR=$("$work/env/bin/python" -m pybind11 --cmakedir)
    export pybind11_DIR
    "${pip[@]}" wheel --no-deps --no-build-isolation -w "$work/out" "$work/kp-$version"
    mv "$work"/out/kp-*.whl "$cache/wheels/"
}

install_and_import() {
    "$python" -m pip --disable-pip-version-check install --force-reinstall --no-deps "$1" && "$python" -c 'import kp'
}

mkdir -p "$cache/wheels"
wheel=$(compgen -G "$cache/wheels/kp-$version-$tag-*.whl" || true)
if [[ -n $wheel ]]; then
    install_and_import "$wheel" && exit 0
    rm -f "$wheel" # built against libraries that are gone
fi
build
install_and_import "$(compgen -G "$cache/wheels/kp-$version-$tag-*.whl")"
