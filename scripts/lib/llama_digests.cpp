// digests MODEL [TYPE [TOKENS [PIECE]]]: a line for each way in which a host can come to the same prompt, with a
// digest of the logits behind the prompt and of four steps more, of stock llama.cpp and of the back end.  A star marks
// one that is not its group's first, a dash a way that llama.cpp refuses: recurrent layers take few tokens back, or none,
// and not every model moves positions.  TYPE: of the cache, f16 if not said.  PIECE: of the names of the ways to try.
// Exit status 1 where the back end's digests differ within a group.
#include "llama_program.h"

#include <map>

enum { LEAST_TOKENS = 130, MOST_TOKENS = 1900 };  // 100 in a first call, 40 removed; 2,048 cells

struct Way {
    const char *group, *name;
    int ubatch = 512, threads = 1, slots = 1;
    bool unified = true;  // slots share one stream of cells
    bool other = false;   // another sequence was decoded first and left holes
    int cut = 0;          // the prompt comes in two calls, the first of so many tokens
    int again = 0;        // so many tokens at the end are removed and decoded once more
    int shift = 0;        // positions move by so much before the steps, which rotates K in place
    bool restore = false; // the sequence is saved, the cache cleared, the sequence restored
    bool drafts = false;  // the steps are decoded again, in drafts of 1 to 8 tokens
};

static const Way WAYS[] = {
    {"prompt", "ubatch 512"},
    {"prompt", "ubatch 64", 64},
    {"prompt", "ubatch 16", 16},
    {"prompt", "ubatch 1", 1},
    {"prompt", "2 threads", 512, 2},
    {"prompt", "2 threads, ubatch 64", 64, 2},
    {"prompt", "after another sequence", 512, 1, 2, true, true},
    {"prompt", "the same, in holes, ubatch 64", 64, 1, 2, true, true, 100},
    {"prompt", "4 slots, one stream", 512, 1, 4, true},
    {"prompt", "4 slots, separate streams", 512, 1, 4, false},
    {"prompt", "4 slots, separate, after another", 64, 1, 4, false, true},
    {"prompt", "in two calls", 512, 1, 1, true, false, 100},
    {"prompt", "tail removed and decoded again", 512, 1, 1, true, false, 0, 40},
    {"prompt", "3 tokens removed and decoded again", 64, 1, 1, true, false, 0, 3},
    {"prompt", "tail again, in holes, 2 threads", 64, 2, 2, true, true, 100, 40},
    {"prompt", "saved and restored", 512, 1, 1, true, false, 0, 0, 0, true},
    {"prompt", "saved in holes and restored", 64, 1, 2, true, true, 100, 0, 0, true},
    {"prompt", "in drafts of 1 to 8 tokens", 512, 1, 1, true, false, 0, 0, 0, false, true},
    {"shifted", "ubatch 512", 512, 1, 1, true, false, 0, 0, 5},
    {"shifted", "ubatch 16, 2 threads", 16, 2, 1, true, false, 0, 0, 5},
    {"shifted", "in holes", 64, 1, 2, true, true, 100, 0, 5},
};

static std::vector<uint8_t> saved(llama_context *context, int sequence) {
    std::vector<uint8_t> state(llama_state_seq_get_size(context, sequence));
    llama_state_seq_get_data(context, state.data(), state.size(), sequence);
    return state;
}

static void restore(llama_context *context, const std::vector<llama_token> &tokens) {
    const std::vector<uint8_t> state = saved(context, 0);
    if (llama_n_seq_max(context) > 1) {  // one that begins as the first does is decoded and saved later
        decode(context, tokens, 1, 0, 50);
        saved(context, 1);
    }
    llama_memory_clear(llama_get_memory(context), true);
    if (!llama_state_seq_set_data(context, state.data(), state.size(), 0)) std::exit(1);
}

// The prompt as `way` says; logits of its last token are there afterwards.  False: llama.cpp keeps its tail.
static bool decode_prompt(llama_context *context, const Way &way, const std::vector<llama_token> &tokens) {
    llama_memory_t memory = llama_get_memory(context);
    int n = int(tokens.size());
    if (way.other) {
        decode(context, tokens, 1, 0, 150);
        for (int i = 0; i < 150; i += 5) llama_memory_seq_rm(memory, 1, i, i + 3);
    }
    if (way.cut) decode(context, tokens, 0, 0, way.cut);
    if (way.cut && way.other) llama_memory_seq_rm(memory, 1, -1, -1);  // lower cells are free for the second part
    decode(context, tokens, 0, way.cut, n);
    if (way.again && !llama_memory_seq_rm(memory, 0, n - way.again, -1)) return false;
    if (way.again) decode(context, tokens, 0, n - way.again, n);
    return true;
}

// The steps from `position` on once more, two in a call, of which the second is a guess; wrong ones are taken back.
static uint64_t fold_drafts(llama_context *context, const std::vector<llama_token> &steps, int position, int guesses,
                            uint64_t hash, size_t words) {
    llama_memory_t memory = llama_get_memory(context);
    const size_t n = size_t(1 + guesses);
    for (size_t i = 0; i < steps.size(); i += 2, position += 2) {
        llama_memory_seq_rm(memory, 0, position, -1);
        std::vector<llama_token> call(n, steps[i]);  // as wrong guesses
        call[size_t(position + 1) % n] = steps[i + 1];
        decode(context, call, 0, position, position + int(n), true);
        for (int k = 0; k < 2; ++k) hash = fold(hash, llama_get_logits_ith(context, k), words);
    }
    return hash;
}

static std::string digest(llama_model *model, const Way &way, ggml_type type, const std::vector<llama_token> &tokens) {
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = uint32_t(2048 * (way.unified ? 1 : way.slots));
    parameters.n_batch = 2048;
    parameters.n_ubatch = uint32_t(way.ubatch);
    parameters.n_outputs_max = 16;  // a large vocabulary's logits of a whole ubatch may be beyond a binding
    parameters.n_threads = parameters.n_threads_batch = way.threads;
    parameters.n_seq_max = uint32_t(way.slots);
    parameters.kv_unified = way.unified;
    parameters.n_rs_seq = way.again <= 3 ? uint32_t(way.again) : 0;  // states that are kept for that
    parameters.type_k = parameters.type_v = type;
    parameters.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context *context = llama_init_from_model(model, parameters);
    if (!context) std::exit(1);
    // a state of recurrent layers goes back within the last call alone
    const bool takes_back = !llama_model_is_recurrent(model) && !llama_model_is_hybrid(model);
    const bool possible = (takes_back || !way.drafts) && (!way.shift || llama_memory_can_shift(llama_get_memory(context)));
    if (!possible || !decode_prompt(context, way, tokens)) {
        llama_free(context);
        return "-";
    }
    const size_t words = words_of(model);
    const uint64_t of_prompt = fold(FOLD_BEGIN, llama_get_logits_ith(context, -1), words);
    uint64_t hash = of_prompt;
    std::vector<float> logits(llama_get_logits_ith(context, -1), llama_get_logits_ith(context, -1) + words);
    if (way.shift) llama_memory_seq_add(llama_get_memory(context), 0, 0, -1, way.shift);
    if (way.restore) restore(context, tokens);
    const int behind = int(tokens.size()) + way.shift;
    std::vector<llama_token> steps;
    for (int i = 0; i < 4; ++i) {
        llama_token best = 0;
        for (size_t j = 1; j < words; ++j) if (logits[j] > logits[size_t(best)]) best = llama_token(j);
        decode(context, {best}, 0, behind + i, behind + i + 1);
        steps.push_back(best);
        logits.assign(llama_get_logits_ith(context, -1), llama_get_logits_ith(context, -1) + words);
        hash = fold(hash, logits.data(), words);
    }
    for (int guesses = 1; way.drafts && guesses <= 8; ++guesses) {
        const uint64_t found = fold_drafts(context, steps, behind, guesses, of_prompt, words);
        if (found == hash) continue;
        hash = found;
        break;
    }
    llama_free(context);
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

static std::vector<llama_token> prompt_of(const llama_model *model, size_t n) {
    const llama_vocab *vocab = llama_model_get_vocab(model);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        std::vector<llama_token> tokens(n);
        for (size_t i = 0; i < n; ++i) tokens[i] = llama_token(i * i * 7 % size_t(llama_vocab_n_tokens(vocab)));
        return tokens;
    }
    std::string text = "Once upon a time there was a sum whose last bit was decided by the order of its terms. ";
    while (text.size() < 8 * n) text += "It was added from left to right, then from right to left, and " +
                                       std::to_string(text.size()) + " people disagreed about what came out. ";
    std::vector<llama_token> tokens(text.size());
    int found = llama_tokenize(vocab, text.c_str(), int(text.size()), tokens.data(), int(tokens.size()), true, true);
    tokens.resize(std::min(n, size_t(found)));
    return tokens;
}

int main(int argc, char **argv) {
    ggml_type type;
    const int n = argc > 3 ? std::atoi(argv[3]) : 600;
    if (argc < 2 || !type_named(argc > 2 ? argv[2] : "f16", &type) || n < LEAST_TOKENS || n > MOST_TOKENS) {
        std::fprintf(stderr, "digests MODEL [TYPE [TOKENS [PIECE]]]: got type %s and %d tokens, expected a type of "
                     "ggml's such as f16, and %d to %d tokens\n", argc > 2 ? argv[2] : "f16", n, LEAST_TOKENS, MOST_TOKENS);
        return 2;
    }
    begin_stock();
    std::vector<std::string> found[2];  // by way, of stock and of the back end
    int different[2] = {0, 0};
    for (int side = 0; side < 2; ++side) {
        llama_model *model = load(argv[1], side ? open_device() : nullptr);
        const std::vector<llama_token> tokens = prompt_of(model, size_t(n));
        std::map<std::string, std::string> firsts;  // by group
        if (side) std::printf("%-42s  %-17s  zinc_attn\n", "", "stock");
        for (const Way &way : WAYS) {
            if (argc > 4 && !std::strstr(way.name, argv[4])) continue;
            std::string one = digest(model, way, type, tokens);
            const bool fits = one == "-" || firsts.emplace(way.group, one).first->second == one;
            different[side] += !fits;
            found[side].push_back(one + (fits ? "" : "*"));
            if (!side) continue;
            const std::string name = std::string(way.group) + ": " + way.name;
            std::printf("%-42s  %-17s  %s\n", name.c_str(), found[0][found[1].size() - 1].c_str(), found[1].back().c_str());
            std::fflush(stdout);
        }
        llama_model_free(model);
    }
    std::printf("%-42s  %-17d  %d\n", "different", different[0], different[1]);
    if (found[1].empty()) std::fprintf(stderr, "PIECE: got %s, expected a piece of a way's name, as ubatch\n", argv[4]);
    return found[1].empty() || different[1] > 0;
}
