#!/usr/bin/env bash
# usage: scripts/build_kp.sh [--wheel | --installed] [PYTHON]   (default: .venv/bin/python)
# Builds Kompute's Python binding (kp) into a local wheel, once per Python version, and installs it. --wheel leaves the
# wheel in dist/ in place of that, and says the SHA-256 of what it was built from. --installed only tells whether the
# Python has a kp that zinc_attn can use.
# kp is published as source only and its build fetches libraries with git. Here g++, cmake, make, the
# Vulkan headers and fmt are the distribution's and pybind11 is pip's, so only the package index is used.
# kp ignores most of Vulkan's errors; lib/kp_checked.hpp and lib/patch_kp.py make it raise them. zinc_attn refuses a kp
# without lib/kp_zinc_attn.hpp, by which its dispatcher records into kp's sequences over a device and pipelines of its
# own. The wheel lies in a folder named by their hash, so that a change of them builds it again.
set -euo pipefail

mode=--install
if [[ ${1:-} == --wheel || ${1:-} == --installed ]]; then
    mode=$1
    shift
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cache=${ZINC_ATTN_CACHE:-$root/.cache}
python=${1:-$root/.venv/bin/python}
version=0.9.0
sha256=98e583dc6e9731ff6d7a3e3317817e4d93f7b2945929619e29a56325db279949 # of kp's source archive
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
sources=("$root"/scripts/build_kp.sh "$root"/scripts/lib/{kp_checked.hpp,kp_zinc_attn.hpp,patch_kp.py})
is_installed() { # a kp of the version that lib/kp_zinc_attn.hpp gives
    grep -q "version\") = $("$python" -c 'import kp; print(kp.zinc_attn.version)');" "${sources[2]}"
}
if [[ $mode == --installed ]]; then
    is_installed
    exit
fi
hash=$(cat "${sources[@]}" | sha256sum)
wheels=$cache/wheels/kp-${hash:0:16}

export KOMPUTE_OPT_INSTALL=OFF KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON
export KOMPUTE_OPT_USE_BUILT_IN_{VULKAN_HEADER,PYBIND11,FMT,SPDLOG}=OFF
# Otherwise kp turns the validation layer on wherever it is installed, timed runs included.
export KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS=ON
# kp reads one digit.
jobs=$(nproc)
export KOMPUTE_PYTHON_NUM_PARALLEL_THREADS=$((jobs < 8 ? jobs : 8))

build() {
    work=$(mktemp -d "$cache/kp-build.XXXXXX")
    include=$(mktemp -d) # CXXFLAGS is split at spaces, which the cache's path may have
    trap 'rm -rf "$work" "$include"' EXIT
    local pip=("$python" -m pip --disable-pip-version-check)
    # pip prepares kp's metadata with setuptools and wheel, which recent venvs lack.
    "${pip[@]}" install --no-compile --target "$work/env" setuptools==80.9.0 wheel==0.45.1 pybind11==2.13.6
    local -x PYTHONPATH=$work/env # while this function runs
    "${pip[@]}" download --no-deps --no-binary kp --no-build-isolation -d "$work" "kp==$version"
    sha256sum --check --quiet <<<"$sha256  $work/kp-$version.tar.gz"
    tar -xf "$work/kp-$version.tar.gz" -C "$work"
    rm -rf "$wheels/src" && cp -r "$work/kp-$version/src" "$wheels/src" # as published, for examples/kompute_cpp
    "$python" "$root/scripts/lib/patch_kp.py" "$work/kp-$version"
    pybind11_DIR=$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())') # --cmakedir quotes it for a shell
    export pybind11_DIR
    cp "$root"/scripts/lib/kp_{checked,zinc_attn}.hpp "$include/"
    # kp_checked.hpp takes vulkan.hpp's noexcept away. Its error classes keep theirs: the standard's base classes ask
    # for it. So kp is built with a copy of vulkan.hpp in which these functions say it themselves.
    local header
    header=$("${CXX:-g++}" -E -x c++ - <<<'#include <vulkan/vulkan.hpp>' | sed -n 's/^# 1 "\(.*\/vulkan\.hpp\)".*/\1/p')
    mkdir "$include/vulkan"
    sed -E 's/ (name|what)\(\) const VULKAN_HPP_NOEXCEPT/ \1() const noexcept/' "${header%%$'\n'*}" >"$include/vulkan/vulkan.hpp"
    export CXXFLAGS="${CXXFLAGS:-} -I$include -include $include/kp_checked.hpp"
    "${pip[@]}" wheel --no-deps --no-build-isolation -w "$work/out" "$work/kp-$version"
    mv "$work"/out/kp-*.whl "$wheels/"
}

install_and_import() {
    if [[ $mode == --wheel ]]; then
        mkdir -p "$root/dist"
        cp "$1" "$root/dist/"
        echo "dist/${1##*/}: kp $version, SHA-256 $sha256, with scripts/lib of SHA-256 ${hash%% *}"
        return 0
    fi
    "$python" -m pip --disable-pip-version-check install --force-reinstall --no-deps "$1" && is_installed
}

mkdir -p "$wheels"
wheel=$(compgen -G "$wheels/kp-$version-$tag-*.whl" || true)
if [[ -n $wheel ]]; then
    install_and_import "$wheel" && exit 0
    rm -f "$wheel" # built against libraries that are gone
fi
build
install_and_import "$(compgen -G "$wheels/kp-$version-$tag-*.whl")"
