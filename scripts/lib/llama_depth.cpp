// depth MODEL TYPE STEPS CONTEXT…: steps of a decode behind so many tokens, a line for each CONTEXT: its number, a digest
// of all logits, the median of a step in ms, and how many dispatches and barriers a step has.  Keys and values are those
// of FIRST tokens again and again, through a saved state: what a step computes and reads does not depend on them.
// TYPE: of the cache.  A CONTEXT of 0 is that of the FIRST tokens alone.
#include "llama_program.h"

#include <algorithm>
#include <chrono>

enum { FIRST = 64 };

// A saved state of one sequence, and its copy with more cells. It exits at what it does not know.
struct State {
    const std::vector<uint8_t> &from;
    std::vector<uint8_t> to;
    size_t at = 0;

    template <typename T>
    T next() {
        T value;
        if (at + sizeof value > from.size()) stop("depth: a saved state that it cannot read");
        std::memcpy(&value, &from[at], sizeof value);
        at += sizeof value;
        return value;
    }
    template <typename T>
    void put(T value) {
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(&value);
        to.insert(to.end(), bytes, bytes + sizeof value);
    }
    template <typename T>
    T copy() {
        const T value = next<T>();
        put(value);
        return value;
    }
    // Rows of FIRST cells become those of `cells`.
    void repeat(size_t row, size_t cells) {
        if (at + FIRST * row > from.size()) stop("depth: a saved state that it cannot read");
        for (size_t i = 0; i < cells; ++i) {
            const uint8_t *begin = &from[at + i % FIRST * row];
            to.insert(to.end(), begin, begin + row);
        }
        at += FIRST * row;
    }
};

// llama_kv_cache::state_write_meta: position, number of sequences, in some models three numbers of the token, the first
// two its place in an image, which of text is its position; the sequence.
static void repeat_cells(State *s, uint32_t cells) {
    const auto *words = reinterpret_cast<const int32_t *>(&s->from[s->at]);
    const size_t size = words[3] == 1 ? 3 : 6;
    if (words[0] != 0 || words[1] != 1 || words[size] != 1) stop("depth: a saved state that it cannot read");
    for (uint32_t i = 0; i < cells; ++i) {
        const int32_t first = int32_t(i % FIRST), *cell = words + size * (i % FIRST);
        for (size_t j = 0; j < size; ++j)
            s->put(j == 0 || (size > 3 && (j == 2 || j == 3) && cell[j] == first) ? int32_t(i) : cell[j]);
    }
    s->at += FIRST * 4 * size;
}

// A sequence of FIRST tokens becomes one of `cells`: keys and values of all layers, then recurrent layers' states.
static std::vector<uint8_t> grown(const std::vector<uint8_t> &from, uint32_t cells) {
    State s{from, {}};
    s.copy<uint32_t>();  // magic
    s.copy<int32_t>();   // sequence
    while (from.size() - s.at > 4 * 2) {
        const uint32_t streams = s.copy<uint32_t>();
        uint32_t count;
        std::memcpy(&count, &from[s.at], sizeof count);
        if (count != FIRST) {  // a recurrent part: one cell, whose position is the last token's
            if (streams != 1) stop("depth: a saved state that it cannot read");
            s.next<uint32_t>();
            s.put(int32_t(cells - 1));
            break;
        }
        s.next<uint32_t>();
        s.put(cells);
        repeat_cells(&s, cells);
        if (s.copy<uint32_t>()) stop("depth: expected flash attention");
        const uint32_t layers = s.copy<uint32_t>();
        for (uint32_t i = 0; i < 2 * layers; ++i) {
            s.copy<int32_t>();  // type
            s.repeat(size_t(s.copy<uint64_t>()), cells);
        }
    }
    s.to.insert(s.to.end(), from.begin() + long(s.at), from.end());
    return s.to;
}

static void measure(llama_model *model, ggml_type type, int steps, uint32_t cells) {
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = std::max<uint32_t>(cells, FIRST) + uint32_t(steps) + 1;
    parameters.n_threads = parameters.n_threads_batch = 1;
    parameters.type_k = parameters.type_v = type;
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    parameters.swa_full = true;
    llama_context *context = llama_init_from_model(model, parameters);
    if (!context) stop("no context: of so many tokens, or with such a type of cache (--type), see above");
    const size_t words = words_of(model);
    std::vector<llama_token> tokens(FIRST);
    for (size_t i = 0; i < FIRST; ++i) tokens[i] = llama_token((i * 7919 + 11) % words);
    decode(context, tokens, 0, 0, FIRST);
    if (cells > FIRST) {
        std::vector<uint8_t> state(llama_state_seq_get_size(context, 0));
        llama_state_seq_get_data(context, state.data(), state.size(), 0);
        state = grown(state, cells);
        llama_memory_clear(llama_get_memory(context), true);
        if (!llama_state_seq_set_data(context, state.data(), state.size(), 0)) stop("the state was not taken");
    }
    uint64_t hash = FOLD_BEGIN;
    std::vector<double> ms;
    uint64_t before[3], behind[3];
    auto *counts = reinterpret_cast<void (*)(uint64_t *)>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_dev_by_name("ZINC0")), "zinc_attn_counts"));
    for (int i = 0; i <= steps; ++i) {  // the first one makes pipelines
        counts(before);
        const auto begin = std::chrono::steady_clock::now();
        const int position = int(std::max<uint32_t>(cells, FIRST)) + i;
        decode(context, tokens, 0, position, position + 1);
        const float *logits = llama_get_logits_ith(context, -1);  // waits
        ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
        counts(behind);
        hash = fold(hash, logits, words);
    }
    llama_free(context);
    std::nth_element(ms.begin() + 1, ms.begin() + 1 + steps / 2, ms.end());
    std::printf("%u %016llx %.3f %llu %llu\n", cells, static_cast<unsigned long long>(hash), ms[1 + size_t(steps) / 2],
                static_cast<unsigned long long>(behind[0] - before[0]), static_cast<unsigned long long>(behind[1] - before[1]));
    std::fflush(stdout);
}

int main(int argc, char **argv) {
    ggml_type type;
    const int steps = argc > 3 ? std::atoi(argv[3]) : 0;
    if (argc < 5 || !type_named(argv[2], &type) || steps < 1) {
        std::fprintf(stderr, "depth MODEL TYPE STEPS CONTEXT...: expected a type of ggml's and at least one step\n");
        return 2;
    }
    llama_model *model = load(argv[1], open_device());
    for (int i = 4; i < argc; ++i) measure(model, type, steps, uint32_t(std::atoi(argv[i])));
    llama_model_free(model);
}
