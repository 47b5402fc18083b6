#!/usr/bin/env bash
# usage: scripts/lib/compilers.sh
# Brings what `zinc-attn compilers` wants beside this system's Mesa into .cache/compilers, in about three minutes:
# mesa/, Debian sid's drivers with all that they load, unpacked, and drm shims: libraries that answer ioctls in place of
# the kernel, so that drivers compile for chips that are not there. Debian has those of AMD and NVIDIA. Intel's, and one
# of gfx1151, are built here from Debian 13's Mesa 25.0.7.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
out=$cache/compilers work=$cache/compilers/build
mkdir -p "$cache/logs" "$work"

install_packages() {
    local sudo=() backports=() apt_updated=''
    can_install || die "Mesa's shims need $*"
    apt_update
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        "${apt[@]}" install -y --no-install-recommends "${backports[@]}" "$@"
}
debian() { # debian deb|deb-src SUITE ARGUMENT…: apt-get for another suite of this machine's Debian, nothing installed
    local folder=$work/$2 mirror
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null | sed -nE \
        's/^URIs: *([^ ]*\/debian)\/?( .*)?$/\1/p; s/^deb( \[[^]]*\])? ([^ ]*\/debian)\/? .*/\2/p' | sed -n 1p)
    [[ -n $mirror ]] || die "no Debian source among apt's: these compilers are Debian's"
    mkdir -p "$folder"/{lists,archives}/partial
    echo "$1 [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $2 main" >"$folder/sources.list"
    touch "$folder/status"
    apt-get -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::Cache="$folder" \
        -o Dir::State::Lists="$folder/lists" -o Dir::State::Status="$folder/status" -o APT::Sandbox::User=root \
        -o Debug::NoLocking=true -o Acquire::Check-Valid-Until=false "${@:3}"
}
fetch_mesa() {
    local package
    debian deb sid update
    debian deb sid install -y --download-only --no-install-recommends mesa-vulkan-drivers mesa-drm-shim libvulkan1
    rm -rf "$out/mesa"
    for package in "$work"/sid/archives/*.deb; do dpkg -x "$package" "$out/mesa"; done
}
fetch_source() {
    debian deb-src trixie update
    cd "$work" && debian deb-src trixie source --tar-only --download-only mesa
    rm -rf mesa && mkdir mesa && tar xf mesa_*.orig.tar.xz -C mesa --strip-components=1
    local amd=mesa/src/amd/drm-shim
    # the last chip of AMD's becomes gfx1151, and what newer drivers ask for is answered
    sed -i '/"gfx1150"/,$ { s/gfx1150/gfx1151/; s/GFX1150/GFX1151/; s/0xb0500/0xb0501/; s/0x150e/0x1586/
        s/external_rev = 0x11/external_rev = 0xc1/; s/vgprs = 1024/vgprs = 1536/ }' $amd/amdgpu_devices.c
    sed -i 's/version_minor = 49/version_minor = 64/; s/^   case AMDGPU_INFO_MEMORY:/   case AMDGPU_INFO_HW_IP_COUNT:\
      *out.ui32 = 1;\n      break;\n&/' $amd/amdgpu_noop_drm_shim.c
}
build_shims() { # a driver of each vendor is named, whose folder has the shim; no driver is built
    find_python && "$python" -m venv "$work/venv" && "$work/venv/bin/pip" install meson ninja mako pyyaml packaging
    export PATH=$work/venv/bin:$PATH
    cd "$work" && rm -rf made
    meson setup made mesa --buildtype=release -Dtools=drm-shim,intel -Dgallium-drivers=r600 -Dopengl=false \
        -D{vulkan-drivers,platforms}= -D{glx,egl,gbm,gles1,gles2,llvm,zstd,libunwind}=disabled
    ninja -C made src/{amd/drm-shim/libamdgpu,intel/tools/libintel}_noop_drm_shim.so
    cp made/src/intel/tools/libintel_noop_drm_shim.so "$out/"
    cp made/src/amd/drm-shim/libamdgpu_noop_drm_shim.so "$out/libgfx1151_noop_drm_shim.so"
}

step compilers-apt "installing what Mesa's shims are built with" \
    install_packages libdrm-dev libexpat1-dev zlib1g-dev bison flex pkg-config
step compilers-mesa "fetching Debian sid's Mesa (200 MB)" fetch_mesa
step compilers-source "fetching the source of Mesa 25.0.7 (47 MB)" fetch_source
step compilers-build "building the drm shims of Intel and gfx1151" build_shims
rm -rf "$work"
say "now: zinc-attn compilers --mesa $out/mesa --target bmg"
