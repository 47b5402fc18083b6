# shellcheck shell=bash
# Sourced after setup.sh. `prepare_llama` builds llama.cpp, out of the source archive of llama-cpp-python, and the back
# end libggml-zinc.so for it, once, and the back end again where something was changed here. Sets ZINC_ATTN_LLAMA,
# llama.cpp's folder, and ZINC_ATTN_GGML, the back end's.

llama=$cache/llama
back_end=$llama/zinc-$(cksum <<<"$root" | cut -d' ' -f1) # a build folder is of one source folder
llama_version=0.3.36 # of llama-cpp-python: llama.cpp 0c1e57098, ggml 0.25.3
llama_programs=(llama-server llama-cli llama-completion llama-perplexity llama-bench test-backend-ops test-llama-archs llama-quantize test-state-restore-fragmented test-save-load-state)

fetch_llama() {
    local work
    work=$(mktemp -d "$llama/fetch.XXXXXX")
    (
        trap 'rm -rf "$work"' EXIT
        cd "$work" || exit
        "$py" -m pip --disable-pip-version-check download --no-deps --no-binary :all: "llama-cpp-python==$llama_version" || exit
        tar xzf llama_cpp_python-*.tar.gz && mv llama_cpp_python-*/vendor/llama.cpp "$llama/src"
    )
}
# No kernels of llamafile and no OpenMP: with them products may depend on the batch and on threads, see docs/llama.md.
build_llama() {
    cmake -S "$llama/src" -B "$llama/plain" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O2 -DNDEBUG" \
        -DGGML_NATIVE=OFF -DGGML_LLAMAFILE=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF &&
        nice -n 19 cmake --build "$llama/plain" -j "${LLAMA_JOBS:-2}" --target "${llama_programs[@]}" &&
        echo "${llama_programs[*]}" >"$llama/plain/.ready"
}
build_back_end() {
    cmake -S "$root/native/ggml" -B "$back_end" -DLLAMA="$llama/src" -DZINC_ATTN_CPU_LEVELS=ON &&
        cmake --build "$back_end" &&
        build_program digests && build_program depth && echo "$1" >"$back_end/.ready"
}
build_program() { # build_program NAME: of llama_NAME.cpp
    c++ -std=c++17 -O2 -Wall -Wextra "$root/scripts/lib/llama_$1.cpp" -o "$back_end/$1" \
        -I"$llama/src/include" -I"$llama/src/ggml/include" -L"$llama/plain/bin" -Wl,-rpath-link,"$llama/plain/bin" -lllama -lggml -lggml-base
}
# ggml_vulkan: print the library that ZINC_ATTN_GGML_VULKAN stands for, after building it where that is "build".
ggml_vulkan() {
    local library=${ZINC_ATTN_GGML_VULKAN:-}
    if [[ $library == build ]]; then
        library=$llama/vulkan/bin/libggml-vulkan.so
        [[ -f $library ]] || step llama-vulkan "building ggml-vulkan, about an hour on two cores" build_vulkan || exit 1
    fi
    echo "$library"
}
# It needs glslc, and headers of Vulkan 1.3.275 and SPIR-V (Debian: glslc libvulkan-dev spirv-headers of trixie or later).
build_vulkan() {
    cmake -S "$llama/src" -B "$llama/vulkan" -DCMAKE_BUILD_TYPE=Release -DGGML_VULKAN=ON -DGGML_BACKEND_DL=ON \
        -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF &&
        nice -n 19 cmake --build "$llama/vulkan" -j "${LLAMA_JOBS:-2}" --target ggml-vulkan
}

prepare_gguf() { # for models with random weights
    "$py" -c 'import gguf' 2>"$cache/logs/gguf" || step gguf "installing gguf into .venv" \
        "$py" -m pip --disable-pip-version-check install 'gguf>=0.17' || exit 1
}
prepare_source() {
    mkdir -p "$llama" "$cache/logs"
    [[ -d $llama/src ]] || step llama-fetch "fetching the source of llama.cpp (77 MB)" fetch_llama || exit 1
}
prepare_llama() {
    local hash
    prepare_source
    [[ $(cat "$llama/plain/.ready" 2>/dev/null) == "${llama_programs[*]}" ]] || step llama "building llama.cpp, 10 to 60 minutes on two cores" build_llama || exit 1
    hash=$(hash_of native zinc_attn shaders scripts)
    [[ $(cat "$back_end/.ready" 2>/dev/null) == "$hash" ]] ||
        step llama-zinc "building the back end, a minute" build_back_end "$hash" || exit 1
    export ZINC_ATTN_LLAMA=$llama ZINC_ATTN_GGML=$back_end
    export LD_LIBRARY_PATH=$llama/plain/bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} # also where the clone was moved
}
