// Pass 1 of attention, as shaders/attend/attend.comp: the states (m, l, o) of nodes of 512 keys, for the query vectors
// (rows and heads) of a workgroup. The steps of a leaf of 64 keys are
//
//     scores    s[h][key] = scale * (q[h] . k[key])    K in chunks of 8 dimensions, transposed: lane = key
//     weights   p[h][key] = 2**(s - m), and their sum  lane = key
//     values    o[h] = sum of p[h][key] * v[key]       V in blocks of 32 dimensions: lane = dimension
//     fold      of the leaf's state into the node's    lane = dimension
#include "rows.h"

namespace zinc {
namespace {
constexpr uint KEYS = KEYS_PER_LEAF;
enum Sums { PLAIN_SUMS, FUSED_SUMS, WHOLE_SUMS };

// To `to` (8, KEYS): chunk c of all keys. blocks: each key's block that has the chunk.
template <uint S> void unpack_keys(const Rows &rows, const Row *keys, const Block *blocks, uint c, float *to) {
    for (uint t = 0; t < KEYS; t += 8) {
        F8 r[8];
        ZINC_UNROLL for (uint i = 0; i < 8; ++i) r[i] = values_of<S>(rows, keys[t + i], c, blocks[t + i]);
        transpose(r);
        ZINC_UNROLL for (uint i = 0; i < 8; ++i) store(to + i * KEYS + t, r[i]);
    }
}

// To `to` (keys, BLOCK): chunks chunks.x ... chunks.y - 1 of keys of_keys.x ... of_keys.y - 1.
template <uint S>
void unpack_values(const Rows &rows, const Row *keys, const Block *blocks, uvec2 of_keys, uvec2 chunks, float *to) {
    for (uint t = of_keys.x; t < of_keys.y; ++t)
        for (uint c = chunks.x; c < chunks.y; ++c)
            store(to + t * BLOCK + CHUNK * (c - chunks.x), values_of<S>(rows, keys[t], c, blocks[t]));
}

#define ZINC_EACH(f) {f<0>, f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>}  // storage types
constexpr decltype(&unpack_keys<0>) UNPACK_KEYS[] = ZINC_EACH(unpack_keys);
constexpr decltype(&unpack_values<0>) UNPACK_VALUES[] = ZINC_EACH(unpack_values);

// a * b + c, as the arithmetic rounds it; sums of "integer" are whole numbers that float32 holds.
template <Sums SUMS> ZINC_INLINE F multiply_add(F a, F b, F c) {
    return SUMS == FUSED_SUMS ? fma(a, b, c) : c + a * b;
}

// Sums over keys begin ... end - 1, ascending, of p (H, KEYS) times v (KEYS, BLOCK): two vectors wide, to o, whose rows
// are `step` apart. units: what the sums of "integer" are multiples of.
template <Sums SUMS, int H>
void sum_block(const float *v, const float *p, uint begin, uint end, const float *units, float *o, size_t step) {
    F sums[H][2] = {};
    for (uint t = begin; t < end; ++t) {
        const F first = load<F>(v + t * BLOCK), second = load<F>(v + t * BLOCK + LANES);
        ZINC_UNROLL for (int h = 0; h < H; ++h) {
            const F by = all(p[h * KEYS + t] * (SUMS == FUSED_SUMS ? FUSED_SCALE : 1.0f));
            sums[h][0] = multiply_add<SUMS>(first, by, sums[h][0]);
            sums[h][1] = multiply_add<SUMS>(second, by, sums[h][1]);
        }
    }
    ZINC_UNROLL for (int i = 0; i < 2 * H; ++i) {
        const float unit = SUMS == FUSED_SUMS ? 1.0f / FUSED_SCALE : SUMS == WHOLE_SUMS ? units[i / 2] : 1.0f;
        store(o + i / 2 * step + i % 2 * LANES, flush(sums[i / 2][i % 2] * unit));
    }
}

ZINC_INLINE F8 flushed(F8 x) { return (F8)((U8)x & 0x7FFFFFFFu) < FLUSH ? (F8){} : x; }

// A workgroup.
template <Sums SUMS> struct Attention : Invocation {
    using Invocation::Invocation;
    const uint K_DIM = spec[ATTEND_SPEC_K_DIM], V_DIM = spec[ATTEND_SPEC_V_DIM], VECTORS = spec[ATTEND_SPEC_VECTORS];
    const uint TILE = spec[ATTEND_SPEC_TILE], ROWS = spec[ATTEND_SPEC_ROWS_SHARED], MASK = spec[ATTEND_SPEC_MASK];
    const uint *const work = static_cast<const uint *>(bound[ATTEND_BIND_WORK]);
#include "states.h"
#include "item.h"
    const Item item = read_item();
    Rows k = Rows(bound[ATTEND_BIND_K], spec[ATTEND_SPEC_K_STORAGE], K_DIM, spec[ATTEND_SPEC_K_SIZE], TILE,
                  spec[ATTEND_SPEC_K_STRIDE], true, head_scale(HEAD_K_SCALE));
    Rows own_v = Rows(bound[ATTEND_BIND_V], spec[ATTEND_SPEC_V_STORAGE], V_DIM, spec[ATTEND_SPEC_V_SIZE], TILE,
                      spec[ATTEND_SPEC_V_STRIDE], false, head_scale(HEAD_V_SCALE));
    const Rows &v = spec[ATTEND_SPEC_LATENT] ? k : own_v;
    char *left = room.scratch;
    float *const dots = array(VECTORS * KEYS);        // (VECTORS, KEYS): dot products, scores, weights
    float *const block_dots = array(VECTORS * KEYS);  // arithmetic integer: dot products of a block
    float *const factors = array(VECTORS * KEYS);     // arithmetic integer: weights as integers
    float *const chunk = array(KEYS * BLOCK);         // (8, KEYS) of K, or (KEYS, BLOCK) of V
    float *const o = array(VECTORS * V_DIM), *const leaf_o = array(VECTORS * V_DIM);  // (VECTORS, V_DIM)
    float *const m = array(VECTORS), *const l = array(VECTORS), *const units = array(VECTORS);
    float *const leaf_m = array(VECTORS), *const leaf_l = array(VECTORS);
    const float **const q_of = reinterpret_cast<const float **>(array(2 * VECTORS));  // the query vectors
    Row k_rows[KEYS], v_rows[KEYS];
    Block blocks[KEYS];
    int present[KEYS];   // -1 where the leaf has the key, else 0
    float scales[KEYS];  // arithmetic integer: scales of the keys' blocks, whose values come unscaled

    float *array(size_t count) {
        char *start = left;
        left += (count * sizeof(float) + 63) / 64 * 64;
        return reinterpret_cast<float *>(start);
    }
    float head_scale(uint word) const {
        const uint head = (work[HEADER_KV_FIRST] + gl_WorkGroupID.z) * work[HEADER_GROUP];
        return uintBitsToFloat(HEAD_WORD(head, word));
    }

    void run() {
        for (uint h = 0; h < VECTORS; ++h) {
            const uvec2 vector = vector_of(item, h);
            const size_t number = size_t(vector.x) * work[HEADER_Q_HEADS] + vector.y;
            q_of[h] = static_cast<const float *>(bound[ATTEND_BIND_Q]) + number * K_DIM;
        }
        const uint end = spec[ATTEND_SPEC_WALKS] ? item.node_end : min(item.node_end, item.node_begin + 1);
        for (uint node = item.node_begin; node < end; ++node) {
            for (uint h = 0; h < VECTORS; ++h)
                m[h] = EMPTY_M, l[h] = 0.0f;
            std::memset(o, 0, sizeof(float) * VECTORS * V_DIM);
            for (uint i = 0; i < LEAVES_PER_NODE; ++i) {
                const Leaf leaf = leaf_of(item, node * LEAVES_PER_NODE + i);
                if (has_keys(leaf))
                    attend_leaf(leaf);
            }
            for (uint h = 0; h < VECTORS; ++h)
                if (is_mine(item, h))
                    emit(node, h);
        }
    }

    void attend_leaf(const Leaf &leaf) {
        locate(leaf);
        std::memset(dots, 0, sizeof(float) * VECTORS * KEYS);
        std::memset(block_dots, 0, sizeof(float) * VECTORS * KEYS);
        for (uint c = 0; c < K_DIM / CHUNK; ++c) {
            if (c % 4 == 0)
                find_blocks(k, k_rows, c / 4);
            UNPACK_KEYS[k.storage](k, k_rows, blocks, c, chunk);
            add_chunk(c, SUMS == WHOLE_SUMS ? block_dots : dots);
            if (SUMS == WHOLE_SUMS && (c % 4 == 3 || c + 1 == K_DIM / CHUNK))
                add_block_dots();
        }
        for (uint h = 0; h < VECTORS; ++h) {
            find_scores(leaf, h);
            find_weights(h);
        }
        for (uint d = 0; d < V_DIM; d += BLOCK)
            sum_values(leaf, d);
        for (uint h = 0; h < VECTORS; ++h)
            fold(h);
    }

    // To present, k_rows and v_rows: where the leaf's keys lie. An absent key has the place of the nearest present one.
    void locate(const Leaf &leaf) {
        const uint shift = work[HEADER_PAGE_SHIFT], page_tiles = work[HEADER_PAGE_TILES], head = gl_WorkGroupID.z;
        for (uint t = 0; t < KEYS; ++t) {
            present[t] = t >= leaf.begin && t < leaf.end ? -1 : 0;
            const uint token = leaf.index * KEYS + min(max(t, leaf.begin), leaf.end - 1), tile = token / TILE;
            const uint in_page = tile & ((1u << shift) - 1u);
            const size_t page = work[HEADER_FIRST_PAGE] + work[item.page_table + (tile >> shift)];
            const size_t slot = (page * page_tiles + in_page) * TILE + token % TILE;
            const size_t row = slot * work[HEADER_TOKEN_ROWS] + head * work[HEADER_HEAD_ROWS];
            const size_t of_head = (page * work[HEADER_KV_HEADS] + head) * page_tiles + in_page;
            k_rows[t] = k.row(row, of_head, token % TILE), v_rows[t] = v.row(row, of_head, token % TILE);
        }
    }

    void find_blocks(const Rows &rows, const Row *keys, uint block) {
        for (uint t = 0; t < KEYS; ++t) {
            blocks[t] = block_of(rows, keys[t], block);
            if (SUMS == WHOLE_SUMS)
                scales[t] = blocks[t].scale, blocks[t].scale = 1.0f;
        }
    }

    // Adds the dot products of q's chunk c and `chunk`, each summed in ascending order, to `to`.
    void add_chunk(uint c, float *to) {
        for (uint t = 0; t < KEYS; t += LANES) {
            F keys[8];
            ZINC_UNROLL for (uint i = 0; i < 8; ++i) keys[i] = load<F>(chunk + i * KEYS + t);
            for (uint h = 0; h < VECTORS; ++h) {
                const float *by = q_of[h] + CHUNK * c;
                F sum = all(by[0]) * keys[0];
                ZINC_UNROLL for (uint i = 1; i < 8; ++i) sum = multiply_add<SUMS>(all(by[i]), keys[i], sum);
                store(to + h * KEYS + t, load<F>(to + h * KEYS + t) + sum);
            }
        }
    }

    // Adds the dot products of a block, times its scale, to the row's.
    void add_block_dots() {
        for (uint i = 0; i < VECTORS * KEYS; i += LANES) {
            store(dots + i, load<F>(dots + i) + load<F>(block_dots + i) * load<F>(scales + i % KEYS));
            store(block_dots + i, (F){});
        }
    }

    // From dot products to scores, EMPTY_M for absent keys; see score_mod.glsl.
    void find_scores(const Leaf &leaf, uint h) {
        const uvec2 vector = vector_of(item, h);
        const uint *record = work + work[HEADER_ROW_TABLE] + vector.x * ROW_WORDS;
        auto number = [this](uint word) { return uintBitsToFloat(work[word]); };
        const float scale = number(HEADER_SCORE_SCALE), cap = number(HEADER_SOFTCAP);
        const float inverse = number(HEADER_SOFTCAP_INVERSE), factor = uintBitsToFloat(HEAD_WORD(vector.y, HEAD_MASK));
        for (uint t = 0; t < KEYS; t += LANES) {
            F s = load<F>(dots + h * KEYS + t) * scale, distance;
            if (spec[ATTEND_SPEC_SOFTCAP])
                s = cap * zinc::hyperbolic_tangent(s * inverse) * LOG2E;
            const uint key = leaf.index * KEYS + t + item.key_shift;
            if (spec[ATTEND_SPEC_BIASES] & BIAS_ALIBI) {
                for (uint i = 0; i < LANES; ++i)
                    distance[i] = float(int(key + i - record[ROW_POSITION]));
                s = s + uintBitsToFloat(HEAD_WORD(vector.y, HEAD_ALIBI)) * -abs(distance);
            }
            for (uint i = 0; MASK && i < LANES; ++i)
                if (key + i >= record[ROW_MASK_BEGIN] && key + i < record[ROW_MASK_END]) {
                    const uint word = work[record[ROW_MASK] + key + i - record[ROW_MASK_BEGIN]];
                    s[i] = word == HIDDEN ? EMPTY_M : s[i] + uintBitsToFloat(word) * factor;
                }
            store(dots + h * KEYS + t, load<I>(present + t) ? s : all(EMPTY_M));
        }
    }

    // From scores to weights, and the leaf's m and l.
    void find_weights(uint h) {
        float *s = dots + h * KEYS, top = EMPTY_M;
        F most = load<F>(s);
        for (uint t = LANES; t < KEYS; t += LANES)
            most = max(most, load<F>(s + t));
        for (uint i = 0; i < LANES; ++i)
            top = max(top, most[i]);
        leaf_m[h] = roundEven(top);
        for (uint t = 0; t < KEYS; t += LANES) {
            const F x = load<F>(s + t);
            store(s + t, (MASK ? x > EMPTY_M : load<I>(present + t)) ? zinc::weight(x, all(leaf_m[h])) : (F){});
        }
        Vector<float, WEIGHT_PARTIALS> quarters = {};
        for (uint t = 0; t < KEYS; t += WEIGHT_PARTIALS)
            quarters = quarters + load<Vector<float, WEIGHT_PARTIALS>>(s + t);
        leaf_l[h] = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
    }

    // To factors and units: the weights of h times the scales of a block of V as integers; see integer.glsl.
    void find_factors(const Leaf &leaf, uint h) {
        float scaled[KEYS] = {}, top = 0.0f;
        for (uint t = leaf.begin; t < leaf.end; ++t) {
            scaled[t] = dots[h * KEYS + t] * scales[t];
            top = max(top, abs(scaled[t]));
        }
        const float power = integer_power(top);
        for (uint t = 0; t < KEYS; t += LANES)
            store(factors + h * KEYS + t, roundEven(load<F>(scaled + t) * power));
        units[h] = inverse_power(power);
    }

    // To leaf_o: the block of dimensions from d on.
    void sum_values(const Leaf &leaf, uint d) {
        const uint dims = min(V_DIM - d, BLOCK);
        find_blocks(v, v_rows, d / BLOCK);
        const uvec2 keys(leaf.begin, leaf.end), chunks(d / CHUNK, (d + dims) / CHUNK);
        UNPACK_VALUES[v.storage](v, v_rows, blocks, keys, chunks, chunk);
        for (uint h = 0; h < VECTORS && SUMS == WHOLE_SUMS; ++h)
            find_factors(leaf, h);
        constexpr decltype(&sum_block<SUMS, 1>) SUM[] = {sum_block<SUMS, 1>, sum_block<SUMS, 2>, sum_block<SUMS, 3>,
                                                         sum_block<SUMS, 4>};
        for (uint h = 0; h < VECTORS; h += 4) {
            const uint heads = min(VECTORS - h, 4u);
            float sums[4 * BLOCK];
            const float *p = (SUMS == WHOLE_SUMS ? factors : dots) + h * KEYS;
            for (uint w = 0; w < BLOCK; w += 2 * LANES)
                SUM[heads - 1](chunk + w, p, leaf.begin, leaf.end, units + h, sums + w, BLOCK);
            for (uint i = 0; i < heads; ++i)
                std::memcpy(leaf_o + (h + i) * V_DIM + d, sums + i * BLOCK, dims * sizeof(float));
        }
    }

    // Merges the leaf's state into the node's.
    void fold(uint h) {
        const vec2 powers = merge_powers(m[h], leaf_m[h]);
        l[h] = merge(l[h], powers.x, leaf_l[h], powers.y);
        m[h] = max(m[h], leaf_m[h]);
        for (uint d = h * V_DIM; d < (h + 1) * V_DIM; d += 8)
            store(o + d, flushed(load<F8>(o + d) * powers.x + load<F8>(leaf_o + d) * powers.y));
    }

    // Writes the node's state of vector h, or the output if every row has a single state; see node.glsl.
    void emit(uint node, uint h) {
        float *const states = static_cast<float *>(bound[ATTEND_BIND_STATES]);
        float *const result = static_cast<float *>(bound[ATTEND_BIND_OUT]);
        const uint q_heads = work[HEADER_Q_HEADS];
        const uvec2 vector = vector_of(item, h);
        if (!work[HEADER_SINGLE_PASS]) {
            const size_t slot = size_t(state_of(vector.x, node)) * q_heads + vector.y;
            std::memcpy(states + slot * V_DIM, o + h * V_DIM, V_DIM * sizeof(float));
            float *ml = states + size_t(work[HEADER_STATE_STRIDE]) * q_heads * V_DIM + 2 * slot;
            ml[0] = m[h], ml[1] = l[h];
            return;
        }
        const size_t slot = size_t(vector.x) * q_heads + vector.y;
        const float power = merge_sink(HEAD_WORD(vector.y, HEAD_SINK), m[h], l[h]);
        for (uint d = 0; d < V_DIM; ++d)
            result[slot * V_DIM + d] = normalize(vec2(o[h * V_DIM + d]), power, l[h]).x;
        if (work[HEADER_ROWS])
            result[size_t(work[HEADER_ROWS]) * q_heads * V_DIM + slot] = natural_lse(m[h], l[h]);
    }
};

// Pass 2, as shaders/attend/merge.comp: a workgroup folds 64 dimensions of a row's states of a query head.
struct Merge : Invocation {
    using Invocation::Invocation;
    const uint V_DIM = spec[MERGE_SPEC_V_DIM];
    const uint *const work = static_cast<const uint *>(bound[MERGE_BIND_WORK]);
#include "states.h"

    void run() {
        const float *const states = static_cast<const float *>(bound[MERGE_BIND_STATES]);
        float *const result = static_cast<float *>(bound[MERGE_BIND_OUT]);
        const uint q_heads = work[HEADER_Q_HEADS], head = gl_WorkGroupID.y, first = gl_WorkGroupID.x * MERGE_DIMS;
        const uint *record = work + work[HEADER_ROW_TABLE] + gl_WorkGroupID.z * ROW_WORDS;
        const uint dims = min(V_DIM - first, MERGE_DIMS);
        float m = EMPTY_M, l = 0.0f, o[MERGE_DIMS] = {};
        for (uint s = record[ROW_STATE]; s < record[ROW_STATE] + record[ROW_COUNT]; ++s) {
            const size_t slot = size_t(s) * q_heads + head;
            const float *state_o = states + slot * V_DIM + first;
            const float *ml = states + size_t(work[HEADER_STATE_STRIDE]) * q_heads * V_DIM + 2 * slot;
            const vec2 powers = merge_powers(m, ml[0]);
            m = max(m, ml[0]), l = merge(l, powers.x, ml[1], powers.y);
            for (uint d = 0; d < dims; d += 8)
                store(o + d, flushed(load<F8>(o + d) * powers.x + load<F8>(state_o + d) * powers.y));
        }
        const float power = merge_sink(HEAD_WORD(head, HEAD_SINK), m, l);
        const size_t slot = size_t(gl_WorkGroupID.z) * q_heads + head;
        for (uint d = 0; d < dims; ++d)
            result[slot * V_DIM + first + d] = normalize(vec2(o[d]), power, l).x;
        if (first == 0 && work[HEADER_ROWS])
            result[size_t(work[HEADER_ROWS]) * q_heads * V_DIM + slot] = natural_lse(m, l);
    }
};

void merge(const Step &step, uint64_t number, Room &room) {
    Merge(step, room, group_of(step, number), 0, 1).run();
}

void attend(const Step &step, uint64_t number, Room &room) {
    const uvec3 group = group_of(step, number);
    const uint arithmetic = step.spec[ATTEND_SPEC_ARITHMETIC];
    if (arithmetic == CANONICAL)
        Attention<PLAIN_SUMS>(step, room, group, 0, 1).run();
    else if (arithmetic == INTEGER_SUMS)
        Attention<WHOLE_SUMS>(step, room, group, 0, 1).run();
    else
        Attention<FUSED_SUMS>(step, room, group, 0, 1).run();
}
}  // namespace

const NamedKernel ATTENTION[] = {{"attend", &attend}, {"merge", &merge}, {nullptr, nullptr}};
}  // namespace zinc
