// What the programs of scripts/llama that call llama.cpp share: the device, digests of logits, and a decode.
#ifndef LLAMA_PROGRAM_H
#define LLAMA_PROGRAM_H

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

constexpr uint64_t FOLD_BEGIN = 14695981039346656037u;

inline uint64_t fold(uint64_t hash, const float *values, size_t n) {
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(values);
    for (size_t i = 0; i < n * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

[[noreturn]] inline void stop(const char *why) {
    std::fprintf(stderr, "%s\n", why);
    std::exit(1);
}

// Positions [begin, end) of a sequence whose tokens are these, again and again; exits where llama.cpp refuses.
inline void decode(llama_context *context, const std::vector<llama_token> &tokens, int sequence, int begin, int end,
                   bool all_logits = false) {
    llama_batch batch = llama_batch_init(end - begin, 0, 1);
    for (int position = begin; position < end; ++position) {
        int i = batch.n_tokens++;
        batch.token[i] = tokens[size_t(position) % tokens.size()];
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = all_logits || position + 1 == end;
    }
    if (llama_decode(context, batch)) stop("llama_decode failed");
    llama_batch_free(batch);
}

inline bool type_named(const char *name, ggml_type *type) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i)
        if (const char *found = ggml_type_name(ggml_type(i)); found && !std::strcmp(found, name))
            return *type = ggml_type(i), true;
    return false;
}

// llama.cpp without the back end, with its errors on stderr and nothing else of its.
inline void begin_stock() {
    auto log = [](ggml_log_level level, const char *line, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(line, stderr);
    };
    llama_log_set(log, nullptr);
    llama_backend_init();
    const std::string path = std::getenv("GGML_BACKEND_PATH") ? std::getenv("GGML_BACKEND_PATH") : "";
    unsetenv("GGML_BACKEND_PATH");
    ggml_backend_load_all();
    setenv("GGML_BACKEND_PATH", path.c_str(), 1);
}

// The back end's device. Whatever is loaded afterwards may use its processor, too.
inline ggml_backend_dev_t open_device() {
    ggml_backend_load(std::getenv("GGML_BACKEND_PATH"));
    ggml_backend_dev_t device = ggml_backend_dev_by_name("ZINC0");
    if (!device) stop("no device ZINC0; is GGML_BACKEND_PATH the back end's file?");
    return device;
}

// device: NULL is the CPU. $LLAMA_ARG_N_GPU_LAYERS and $LLAMA_ARG_CPU_MOE, all experts: what of it stays on the CPU.
inline llama_model *load(const char *file, ggml_backend_dev_t device) {
    ggml_backend_dev_t devices[2] = {device, nullptr};
    llama_model_params parameters = llama_model_default_params();
    parameters.devices = devices;
    const char *layers = std::getenv("LLAMA_ARG_N_GPU_LAYERS");
    parameters.n_gpu_layers = !device ? 0 : layers ? std::atoi(layers) : 99;
    const llama_model_tensor_buft_override experts[] = {
        {"ffn_(up|down|gate|gate_up)_(ch|)exps", ggml_backend_cpu_buffer_type()}, {nullptr, nullptr}};
    if (device && std::getenv("LLAMA_ARG_CPU_MOE")) parameters.tensor_buft_overrides = experts;
    llama_model *model = llama_model_load_from_file(file, parameters);
    if (!model) stop("the model was not loaded");
    return model;
}

inline size_t words_of(const llama_model *model) { return size_t(llama_vocab_n_tokens(llama_model_get_vocab(model))); }

#endif
