// Decode attention in a C++ Kompute program: append, attend and merge in one kp::Sequence, evaluated once a token.
//
//     host SPIRV TOKENS      SPIRV: the folder that `zinc-attn export` writes
//
// A sequence of shape 4/2/64 in float32 grows from nothing. Out (q_heads, head_dim) and lse (q_heads) of every token
// go to standard output. manifest.json has the names, and docs/c-hosts.md explains the words.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <kompute/Manager.hpp>
#include <kompute/operations/OpAlgoDispatch.hpp>
#include <kompute/operations/OpMemoryBarrier.hpp>
#include <kompute/operations/OpTensorSyncDevice.hpp>
#include <kompute/operations/OpTensorSyncLocal.hpp>

using Words = std::vector<uint32_t>;
using Tensors = std::vector<std::shared_ptr<kp::Tensor>>;

constexpr uint32_t Q_HEADS = 4, KV_HEADS = 2, DIM = 64, NODES = 2; // nodes of the longest context, ...
constexpr uint32_t NODE = 512, PAGE = 64, PAGES = NODES * NODE / PAGE; // ... of so many keys; tokens of a page
constexpr uint32_t HEADER_WORDS = 24, ITEM_WORDS = 9, ROW_WORDS = 7, APPEND_WORDS = 2;
constexpr uint32_t ROW_TABLE = HEADER_WORDS + NODES * ITEM_WORDS;
constexpr uint32_t APPEND_TABLE = ROW_TABLE + ROW_WORDS, PAGE_TABLE = APPEND_TABLE + APPEND_WORDS;
constexpr uint32_t HEAD_TABLE = PAGE_TABLE + PAGES, HIDDEN = 0xFF800000; // of a head without a sink

static Words read_spirv(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    Words words;
    for (uint32_t word; file.read(reinterpret_cast<char*>(&word), 4);) words.push_back(word);
    if (words.empty()) throw std::runtime_error(path + ": got no SPIR-V, expected the folder of zinc-attn export");
    return words;
}

// The work buffer of a call that appends the last of `tokens` tokens and attends it: header, an item and a state per
// node, the row, the appended token, the page table, head records. Surplus items have no nodes and return at once.
static Words work_words(uint32_t tokens) {
    const float scale = static_cast<float>(0.125 * 1.4426950408889634); // 1 / sqrt(DIM) * log2(e)
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    Words words{Q_HEADS, KV_HEADS, 0, KV_HEADS, Q_HEADS / KV_HEADS, bits, NODES, 0, 1, 1, ROW_TABLE, 0, APPEND_TABLE,
                0, 0, HEAD_TABLE};
    words.resize(HEADER_WORDS);
    const uint32_t nodes = (tokens + NODE - 1) / NODE;
    for (uint32_t node = 0; node < NODES; ++node)
        // row, limit, node_begin, node_end, rows, page_table, first, key_shift, row_step
        words.insert(words.end(), {0, tokens, node, node < nodes ? node + 1 : node, 1, PAGE_TABLE, 0, 0, 0});
    words.insert(words.end(), {0, nodes, 0, tokens - 1, 0, 0, 0}); // state, count, node, position
    words.insert(words.end(), {tokens - 1, PAGE_TABLE});
    for (uint32_t page = 0; page < PAGES; ++page) words.push_back(PAGES - 1 - page); // any place gives the same bits
    for (uint32_t head = 0; head < Q_HEADS; ++head) words.insert(words.end(), {HIDDEN, 0, 0, 0, 0}); // sink, ...
    return words;
}

// Some number of tensor 0 (q), 1 (k) or 2 (v): a multiple of 1/64 from -2 to 2.
static float value(uint32_t tensor, uint32_t token, uint32_t index) {
    return (static_cast<int>((((tensor * 977 + token) * 4096 + index) * 2654435761u) >> 24) - 128) / 64.0f;
}

static void decode(const std::string& folder, uint32_t tokens) {
    kp::Manager manager;
    const bool cpu = manager.getDeviceProperties().deviceType == vk::PhysicalDeviceType::eCpu;
    const auto on_device = [&](size_t size) {
        return manager.tensorT<float>(std::vector<float>(size), kp::Tensor::TensorTypes::eStorage);
    };
    auto work = manager.tensorT<uint32_t>(work_words(1));
    auto q = manager.tensor(std::vector<float>(Q_HEADS * DIM));
    auto rows = manager.tensor(std::vector<float>(KV_HEADS * 2 * DIM)); // of each KV head K, then V
    auto k = on_device(PAGES * KV_HEADS * PAGE * DIM), v = on_device(PAGES * KV_HEADS * PAGE * DIM);
    auto states = on_device(NODES * Q_HEADS * (DIM + 2));
    auto out = manager.tensor(std::vector<float>(Q_HEADS * (DIM + 1)));

    // Specialization constants in the order of the manifest, for f32.
    const auto kernel = [&](const char* name, const Tensors& bound, kp::Workgroup groups, const Words& constants) {
        return manager.algorithm<uint32_t, uint32_t>(bound, read_spirv(folder + name), groups, constants, {});
    };
    auto append = kernel("append.spv", {work, rows, k, v}, {1, KV_HEADS, 1}, {DIM, DIM, 0, 0, 8, PAGE});
    auto attend = kernel("attend.spv", {work, q, k, v, states, states}, {1, NODES, KV_HEADS},
                         {DIM, DIM, 0, Q_HEADS / KV_HEADS, cpu ? 1u : 4u, PAGE, 0, 0, 0, 1, 0, 0, 0, 256, 0, 0});
    auto merge = kernel("merge.spv", {work, states, out}, {1, Q_HEADS, 1}, {DIM, cpu ? 32u : 256u});

    // Kompute orders only copies before dispatches that read them. Bytes that one dispatch writes and another reads
    // need a barrier, and so do rows, which a copy writes and append binds as a buffer that it may write.
    using Access = vk::AccessFlagBits;
    const auto wrote = Access::eShaderWrite, reads = Access::eShaderRead;
    const auto copy = vk::PipelineStageFlagBits::eTransfer, shader = vk::PipelineStageFlagBits::eComputeShader;
    auto sequence = manager.sequence();
    sequence->record<kp::OpTensorSyncDevice>({work, q, rows});
    sequence->record<kp::OpMemoryBarrier>(Tensors{rows}, Access::eTransferWrite, wrote, copy, shader);
    sequence->record<kp::OpAlgoDispatch>(append);
    sequence->record<kp::OpMemoryBarrier>(Tensors{k, v}, wrote, reads, shader, shader);
    sequence->record<kp::OpAlgoDispatch>(attend);
    sequence->record<kp::OpMemoryBarrier>(Tensors{states}, wrote, reads, shader, shader);
    sequence->record<kp::OpAlgoDispatch>(merge)->record<kp::OpTensorSyncLocal>({out});

    for (uint32_t token = 0; token < tokens; ++token) {
        work->setData(work_words(token + 1));
        for (uint32_t i = 0; i < Q_HEADS * DIM; ++i) q->data()[i] = value(0, token, i);
        for (uint32_t i = 0; i < 2 * KV_HEADS * DIM; ++i)
            rows->data()[i] = value(1 + i / DIM % 2, token, i / DIM / 2 * DIM + i % DIM);
        sequence->eval();
        std::fwrite(out->data(), sizeof(float), out->size(), stdout);
    }
}

int main(int count, char** arguments) try {
    const uint32_t tokens = count == 3 ? std::strtoul(arguments[2], nullptr, 10) : 0;
    if (tokens < 1 || tokens > NODES * NODE)
        return std::fprintf(stderr, "usage: host SPIRV TOKENS, with 1 to %u tokens\n", NODES * NODE), 2;
    decode(std::string(arguments[1]) + "/", tokens);
} catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
}
