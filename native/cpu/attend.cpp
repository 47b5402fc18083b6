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

// A workgroup: its constants, its item, and its arrays.
struct Attention {
    const uint k_dim, v_dim, vectors, tile, softcap, biases, mask, rows_shared;
    const Sums sums;
    const uint *const work;
    const float *const q;
    float *const states, *const result;
    uint group_x, head_z, row, last_row, first, limit, key_shift, table;
    Rows k, v;
    uint *row_of, *head_of;  // of a vector
    const float **q_of;
    float *dots;             // (vectors, KEYS): dot products, scores, weights
    float *block_dots;       // (vectors, KEYS) of "integer": of a block
    float *factors;          // (vectors, KEYS) of "integer": weights as integers
    float *m, *l, *leaf_m, *leaf_l, *o, *leaf_o;  // (vectors,), and o (vectors, v_dim)
    float *chunk;            // (8, KEYS) of K, or (KEYS, BLOCK) of V
    Row k_rows[KEYS], v_rows[KEYS];
    Block blocks[KEYS];
    alignas(64) float scales[KEYS];  // of "integer": those of blocks, which then are without them

    Attention(const Step &step, uint64_t number, Room &room)
        : k_dim(step.spec[ATTEND_SPEC_K_DIM]), v_dim(step.spec[ATTEND_SPEC_V_DIM]), vectors(step.spec[ATTEND_SPEC_VECTORS]),
          tile(step.spec[ATTEND_SPEC_TILE]), softcap(step.spec[ATTEND_SPEC_SOFTCAP]), biases(step.spec[ATTEND_SPEC_BIASES]),
          mask(step.spec[ATTEND_SPEC_MASK]), rows_shared(step.spec[ATTEND_SPEC_ROWS_SHARED]),
          sums(step.spec[ATTEND_SPEC_ARITHMETIC] == CANONICAL      ? PLAIN_SUMS
               : step.spec[ATTEND_SPEC_ARITHMETIC] == INTEGER_SUMS ? WHOLE_SUMS
                                                                   : FUSED_SUMS),
          work((const uint *)step.buffers[ATTEND_BIND_WORK]), q((const float *)step.buffers[ATTEND_BIND_Q]),
          states((float *)step.buffers[ATTEND_BIND_STATES]), result((float *)step.buffers[ATTEND_BIND_OUT]),
          k(step.buffers[ATTEND_BIND_K], step.spec[ATTEND_SPEC_K_STORAGE], k_dim, step.spec[ATTEND_SPEC_K_SIZE], tile,
            step.spec[ATTEND_SPEC_K_STRIDE], true),
          v(k) {
        if (!step.spec[ATTEND_SPEC_LATENT])
            v = Rows(step.buffers[ATTEND_BIND_V], step.spec[ATTEND_SPEC_V_STORAGE], v_dim, step.spec[ATTEND_SPEC_V_SIZE],
                     tile, step.spec[ATTEND_SPEC_V_STRIDE], false);
        group_x = uint(number % step.groups[0]);
        head_z = uint(number / step.groups[0] / step.groups[1]);
        const uint *item = work + HEADER_WORDS + number / step.groups[0] % step.groups[1] * ITEM_WORDS;
        row = item[ITEM_ROW], last_row = row + item[ITEM_ROWS] - 1;
        first = item[ITEM_FIRST], limit = item[ITEM_LIMIT], key_shift = item[ITEM_KEY_SHIFT], table = item[ITEM_PAGE_TABLE];
        const uint kv_head = (work[HEADER_KV_FIRST] + head_z) * work[HEADER_GROUP];
        if (k.storage == STORAGE_FP8_E4M3)
            k.head_scale = uintBitsToFloat(HEAD_WORD(kv_head, HEAD_K_SCALE));
        if (v.storage == STORAGE_FP8_E4M3)
            v.head_scale = uintBitsToFloat(HEAD_WORD(kv_head, HEAD_V_SCALE));
        char *room_left = room.scratch;
        auto take = [&](auto *&array, size_t count) {
            array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(room_left);
            room_left += (count * sizeof *array + 63) / 64 * 64;
        };
        take(row_of, vectors), take(head_of, vectors), take(q_of, vectors), take(m, vectors), take(l, vectors);
        take(leaf_m, vectors), take(leaf_l, vectors), take(o, size_t(vectors) * v_dim), take(leaf_o, size_t(vectors) * v_dim);
        take(dots, vectors * KEYS), take(block_dots, vectors * KEYS), take(factors, vectors * KEYS), take(chunk, KEYS * BLOCK);
        find_vectors();
    }

    // The row and the query head of each vector; see item.glsl.
    void find_vectors() {
        const uint group = work[HEADER_GROUP], row_heads = vectors / rows_shared;
        const uint head = (work[HEADER_KV_FIRST] + head_z) * group + min(group_x * vectors, group - min(vectors, group));
        for (uint h = 0; h < vectors; ++h) {
            row_of[h] = rows_shared == 1 ? row : min(row + h / row_heads, last_row);
            head_of[h] = head + (rows_shared == 1 ? h : h % row_heads);
            q_of[h] = q + (size_t(row_of[h]) * work[HEADER_Q_HEADS] + head_of[h]) * k_dim;
        }
    }

    bool is_mine(uint h) const {
        const uint end = group_x * vectors + vectors, group = work[HEADER_GROUP];
        return rows_shared == 1 ? h >= max(end, group) - group : row + h / (vectors / rows_shared) <= last_row;
    }

    // To k_rows and v_rows: where the keys begin ... count - 1 of a leaf lie; others lie where the nearest of them does.
    void locate(uint leaf, uint begin, uint count) {
        const uint shift = work[HEADER_PAGE_SHIFT], page_tiles = work[HEADER_PAGE_TILES];
        for (uint t = 0; t < KEYS; ++t) {
            const uint token = leaf * KEYS + min(max(t, begin), count - 1), number = token / tile;
            const uint in_page = number & ((1u << shift) - 1u);
            const size_t page = work[HEADER_FIRST_PAGE] + work[table + (number >> shift)];
            if (k.stride) {
                const size_t slot = (page * page_tiles + in_page) * tile + token % tile;
                const size_t at = slot * work[HEADER_TOKEN_ROWS] + head_z * work[HEADER_HEAD_ROWS];
                k_rows[t] = k.in_rows(at), v_rows[t] = v.in_rows(at);
            } else {
                const size_t at = (page * work[HEADER_KV_HEADS] + head_z) * page_tiles + in_page;
                k_rows[t] = k.in_tile(at, token % tile), v_rows[t] = v.in_tile(at, token % tile);
            }
        }
    }

    template <Sums SUMS> void attend_leaf(uint leaf, uint begin, uint count);
    template <Sums SUMS> void add_chunk(uint c, float *to);
    void find_blocks(const Rows &rows, const Row *keys, uint block);
    void add_block_dots();
    void find_scores(uint leaf, uint begin, uint count);
    void find_weights(uint begin, uint count);
    template <Sums SUMS> void sum_values(uint begin, uint count);
    void find_factors(uint begin, uint count, float *units);
    void fold();
    void emit(uint node);

    template <Sums SUMS> void run(uint node_begin, uint node_end) {
        for (uint node = node_begin; node < node_end; ++node) {
            for (uint h = 0; h < vectors; ++h)
                m[h] = EMPTY_M, l[h] = 0.0f;
            std::memset(o, 0, sizeof(float) * vectors * v_dim);
            for (uint leaf = node * LEAVES_PER_NODE; leaf < (node + 1) * LEAVES_PER_NODE; ++leaf) {
                const uint key = leaf * KEYS, begin = max(first, key) - key, count = min(max(limit, key) - key, KEYS);
                if (begin < count)
                    attend_leaf<SUMS>(leaf, begin, count);
            }
            emit(node);
        }
    }
};

// To `to` (8, KEYS): chunk c of all keys. blocks: what its block shares.
template <uint S> void unpack_keys(const Rows &rows, const Row *keys, const Block *blocks, uint c, float *to) {
    for (uint t = 0; t < KEYS; t += 8) {
        F8 r[8];
        ZINC_UNROLL for (uint i = 0; i < 8; ++i) r[i] = values_of<S>(rows, keys[t + i], c, blocks[t + i]);
        transpose(r);
        ZINC_UNROLL for (uint i = 0; i < 8; ++i) store(to + i * KEYS + t, r[i]);
    }
}

// To `to` (KEYS, BLOCK): dimensions of a block of V of keys begin ... count - 1.
template <uint S>
void unpack_values(const Rows &rows, const Row *keys, const Block *blocks, uint block, uint begin, uint count, uint dims, float *to) {
    for (uint t = begin; t < count; ++t)
        for (uint c = 0; c < (dims + 7) / 8; ++c)
            store(to + t * BLOCK + 8 * c, values_of<S>(rows, keys[t], block * (BLOCK / 8) + c, blocks[t]));
}

using UnpackKeys = void (*)(const Rows &, const Row *, const Block *, uint, float *);
using UnpackValues = void (*)(const Rows &, const Row *, const Block *, uint, uint, uint, uint, float *);
#define ZINC_EACH(f) {f<0>, f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>}  // storage types
const UnpackKeys UNPACK_KEYS[] = ZINC_EACH(unpack_keys);
const UnpackValues UNPACK_VALUES[] = ZINC_EACH(unpack_values);

// a * b + c, as the arithmetic rounds it; sums of "integer" are whole numbers that float32 holds.
template <Sums SUMS> ZINC_INLINE F multiply_add(F a, F b, F c) {
    return SUMS == FUSED_SUMS ? fma(a, b, c) : c + a * b;
}

// The products of q's chunk c and `chunk`, in ascending order, join `to`.
template <Sums SUMS> void Attention::add_chunk(uint c, float *to) {
    for (uint t = 0; t < KEYS; t += LANES) {
        F keys[8];
        ZINC_UNROLL for (uint i = 0; i < 8; ++i) keys[i] = load<F>(chunk + i * KEYS + t);
        for (uint h = 0; h < vectors; ++h) {
            const float *by = q_of[h] + 8 * c;
            F sum = all(by[0]) * keys[0];
            ZINC_UNROLL for (uint i = 1; i < 8; ++i) sum = multiply_add<SUMS>(all(by[i]), keys[i], sum);
            float *at = to + h * KEYS + t;
            store(at, load<F>(at) + sum);
        }
    }
}

void Attention::find_blocks(const Rows &rows, const Row *keys, uint block) {
    for (uint t = 0; t < KEYS; ++t) {
        blocks[t] = block_of(rows, keys[t], block);
        if (sums == WHOLE_SUMS)
            scales[t] = blocks[t].scale, blocks[t].scale = 1.0f;
    }
}

void Attention::add_block_dots() {
    for (uint t = 0; t < KEYS; t += LANES) {
        const F scale = load<F>(scales + t);
        for (uint h = 0; h < vectors; ++h) {
            float *at = dots + h * KEYS + t, *block = block_dots + h * KEYS + t;
            store(at, load<F>(at) + load<F>(block) * scale);
            store(block, (F){});
        }
    }
}

template <Sums SUMS> void Attention::attend_leaf(uint leaf, uint begin, uint count) {
    locate(leaf, begin, count);
    std::memset(dots, 0, sizeof(float) * vectors * KEYS);
    std::memset(block_dots, 0, sizeof(float) * vectors * KEYS);
    const bool integers = SUMS == WHOLE_SUMS;
    for (uint c = 0; c < k_dim / 8; ++c) {
        if (c % 4 == 0)
            find_blocks(k, k_rows, c / 4);
        UNPACK_KEYS[k.storage](k, k_rows, blocks, c, chunk);
        add_chunk<SUMS>(c, integers ? block_dots : dots);
        if (integers && (c % 4 == 3 || c + 1 == k_dim / 8))
            add_block_dots();
    }
    find_scores(leaf, begin, count);
    find_weights(begin, count);
    sum_values<SUMS>(begin, count);
    fold();
}

ZINC_INLINE I places() {
    I made;
    for (int i = 0; i < LANES; ++i)
        made[i] = i;
    return made;
}

// From dot products to scores, EMPTY_M for absent keys; see score_mod.glsl.
void Attention::find_scores(uint leaf, uint begin, uint count) {
    const F scale = all(uintBitsToFloat(work[HEADER_SCORE_SCALE])), cap = all(uintBitsToFloat(work[HEADER_SOFTCAP]));
    const F inverse = all(uintBitsToFloat(work[HEADER_SOFTCAP_INVERSE]));
    for (uint h = 0; h < vectors; ++h) {
        const uint *record = work + work[HEADER_ROW_TABLE] + row_of[h] * ROW_WORDS;
        const F slope = all(biases ? uintBitsToFloat(HEAD_WORD(head_of[h], HEAD_ALIBI)) : 0.0f);
        const F factor = all(mask ? uintBitsToFloat(HEAD_WORD(head_of[h], HEAD_MASK)) : 0.0f);
        for (uint t = 0; t < KEYS; t += LANES) {
            float *at = dots + h * KEYS + t;
            F s = load<F>(at) * scale;
            if (softcap)
                s = cap * hyperbolic_tangent(s * inverse) * LOG2E;
            const uint key = leaf * KEYS + t + key_shift;
            if (biases & BIAS_ALIBI)
                s = s + slope * -abs(to_float(places() + int(key - record[ROW_POSITION])));
            if (mask) {
                U words = {};
                I there = {};
                for (uint i = 0; i < LANES; ++i)
                    if (key + i >= record[ROW_MASK_BEGIN] && key + i < record[ROW_MASK_END])
                        words[i] = work[record[ROW_MASK] + key + i - record[ROW_MASK_BEGIN]], there[i] = -1;
                s = there ? (words == HIDDEN ? all(EMPTY_M) : s + (F)words * factor) : s;
            }
            const I place = places() + int(t);
            store(at, ((place >= int(begin)) & (place < int(count))) ? s : all(EMPTY_M));
        }
    }
}

// From scores to weights, and the leaf's m and l.
void Attention::find_weights(uint begin, uint count) {
    for (uint h = 0; h < vectors; ++h) {
        float *s = dots + h * KEYS, top = EMPTY_M;
        F most = load<F>(s);
        for (uint t = LANES; t < KEYS; t += LANES)
            most = max(most, load<F>(s + t));
        for (uint i = 0; i < LANES; ++i)
            top = max(top, most[i]);
        const float whole = roundEven(top);
        Vector<float, 4> quarters = {};
        for (uint t = 0; t < KEYS; t += LANES) {
            const F x = load<F>(s + t);
            const I place = places() + int(t);
            const I seen = (mask ? x > EMPTY_M : (place >= int(begin)) & (place < int(count)));
            store(s + t, seen ? weight(x, all(whole)) : (F){});
        }
        for (uint t = 0; t < KEYS; t += 4)
            quarters = quarters + load<Vector<float, 4>>(s + t);
        leaf_m[h] = whole, leaf_l[h] = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
    }
}

// To factors: the weights times the scales of a block of V as integers; units: what they are multiples of. See
// integer.glsl.
void Attention::find_factors(uint begin, uint count, float *units) {
    for (uint h = 0; h < vectors; ++h) {
        float scaled[KEYS] = {}, top = 0.0f;
        for (uint t = begin; t < count; ++t) {
            scaled[t] = dots[h * KEYS + t] * scales[t];
            top = max(top, abs(scaled[t]));
        }
        const F power = integer_power(all(top));
        for (uint t = 0; t < KEYS; t += LANES)
            store(factors + h * KEYS + t, roundEven(load<F>(scaled + t) * power));
        units[h] = inverse_power(power)[0];
    }
}

// H vectors of the leaf's o, W vectors of lanes wide: sums over the keys, ascending.
template <Sums SUMS, int H, int W>
ZINC_INLINE void sum_block(const float *v, const float *p, uint begin, uint count, const float *units, float *o, size_t step) {
    F sums[H][W] = {};
    for (uint t = begin; t < count; ++t) {
        F value[W];
        ZINC_UNROLL for (int w = 0; w < W; ++w) value[w] = load<F>(v + t * BLOCK + w * LANES);
        ZINC_UNROLL for (int h = 0; h < H; ++h) {
            const F by = all(p[h * KEYS + t] * (SUMS == FUSED_SUMS ? FUSED_SCALE : 1.0f));
            ZINC_UNROLL for (int w = 0; w < W; ++w) sums[h][w] = multiply_add<SUMS>(value[w], by, sums[h][w]);
        }
    }
    ZINC_UNROLL for (int h = 0; h < H; ++h) ZINC_UNROLL for (int w = 0; w < W; ++w) {
        const float unit = SUMS == FUSED_SUMS ? 1.0f / FUSED_SCALE : SUMS == WHOLE_SUMS ? units[h] : 1.0f;
        store(o + h * step + w * LANES, flush(sums[h][w] * unit));
    }
}

template <Sums SUMS> void Attention::sum_values(uint begin, uint count) {
    const float *p = SUMS == WHOLE_SUMS ? factors : dots;
    alignas(64) float units[256], sums[4 * BLOCK];
    for (uint d = 0; d < v_dim; d += BLOCK) {
        find_blocks(v, v_rows, d / BLOCK);
        const uint dims = min(v_dim - d, BLOCK);
        UNPACK_VALUES[v.storage](v, v_rows, blocks, d / BLOCK, begin, count, dims, chunk);
        if (SUMS == WHOLE_SUMS)
            find_factors(begin, count, units);
        for (uint h = 0; h < vectors; h += 4) {
            const uint heads = min(vectors - h, 4u);
            const bool whole = dims == BLOCK;
            float *to = whole ? leaf_o + size_t(h) * v_dim + d : sums;
            const size_t step = whole ? v_dim : BLOCK;
            for (uint w = 0; w < BLOCK; w += 2 * LANES)
                switch (heads) {
                case 4: sum_block<SUMS, 4, 2>(chunk + w, p + h * KEYS, begin, count, units + h, to + w, step); break;
                case 3: sum_block<SUMS, 3, 2>(chunk + w, p + h * KEYS, begin, count, units + h, to + w, step); break;
                case 2: sum_block<SUMS, 2, 2>(chunk + w, p + h * KEYS, begin, count, units + h, to + w, step); break;
                default: sum_block<SUMS, 1, 2>(chunk + w, p + h * KEYS, begin, count, units + h, to + w, step);
                }
            for (uint i = 0; i < heads && !whole; ++i)
                std::memcpy(leaf_o + size_t(h + i) * v_dim + d, sums + i * BLOCK, dims * sizeof(float));
        }
    }
}

// The leaf's state joins the node's.
void Attention::fold() {
    for (uint h = 0; h < vectors; ++h) {
        const float top = max(m[h], leaf_m[h]);
        const F powers = pow2((F){m[h] - top, leaf_m[h] - top}), mine = all(powers[0]), theirs = all(powers[1]);
        l[h] = flush(all(l[h]) * mine + all(leaf_l[h]) * theirs)[0];
        m[h] = top;
        float *to = o + size_t(h) * v_dim, *from = leaf_o + size_t(h) * v_dim;
        uint d = 0;
        for (; d + LANES <= v_dim; d += LANES)
            store(to + d, flush(load<F>(to + d) * mine + load<F>(from + d) * theirs));
        for (; d < v_dim; ++d)
            to[d] = flush(all(to[d]) * mine + all(from[d]) * theirs)[0];
    }
}

// The power of two that o has when a sink has joined (m, l).
float merge_sink(uint sink, float &m, float &l) {
    if (sink == HIDDEN)
        return 1.0f;
    const float s = uintBitsToFloat(sink), whole = roundEven(s), top = max(m, whole);
    const F mine = pow2(all(m - top)), theirs = pow2(all(whole - top));
    l = flush(all(l) * mine + weight(all(s), all(whole)) * theirs)[0];
    m = top;
    return mine[0];
}

// The node's states, or, where every row has a single one, the output; see node.glsl.
void Attention::emit(uint node) {
    const uint q_heads = work[HEADER_Q_HEADS];
    for (uint h = 0; h < vectors; ++h) {
        if (!is_mine(h))
            continue;
        const uint *record = work + work[HEADER_ROW_TABLE] + row_of[h] * ROW_WORDS;
        if (!work[HEADER_SINGLE_PASS]) {
            const size_t slot = size_t(record[ROW_STATE] + node - record[ROW_NODE]) * q_heads + head_of[h];
            std::memcpy(states + slot * v_dim, o + size_t(h) * v_dim, v_dim * sizeof(float));
            float *ml = states + size_t(work[HEADER_STATE_STRIDE]) * q_heads * v_dim + 2 * slot;
            ml[0] = m[h], ml[1] = l[h];
            continue;
        }
        const size_t slot = size_t(row_of[h]) * q_heads + head_of[h];
        float top = m[h], sum = l[h];
        const float power = merge_sink(HEAD_WORD(head_of[h], HEAD_SINK), top, sum);
        const bool empty = sum < 0.25f;
        const F inverse = reciprocal(all(sum));
        for (uint d = 0; d < v_dim; ++d)
            result[slot * v_dim + d] = empty ? 0.0f : flush(flush(all(o[size_t(h) * v_dim + d]) * power) * inverse)[0];
        if (work[HEADER_ROWS])
            result[size_t(work[HEADER_ROWS]) * q_heads * v_dim + slot] =
                empty ? uintBitsToFloat(0xFF800000u) : ln(all(sum), all(top))[0];
    }
}

void attend(const Step &step, uint64_t number, Room &room) {
    Attention call(step, number, room);
    const uint *item = call.work + HEADER_WORDS + number / step.groups[0] % step.groups[1] * ITEM_WORDS;
    const uint begin = item[ITEM_NODE_BEGIN], end = item[ITEM_NODE_END];
    const uint last = step.spec[ATTEND_SPEC_WALKS] ? end : min(end, begin + 1);
    if (call.sums == PLAIN_SUMS)
        call.run<PLAIN_SUMS>(begin, last);
    else if (call.sums == FUSED_SUMS)
        call.run<FUSED_SUMS>(begin, last);
    else
        call.run<WHOLE_SUMS>(begin, last);
}
}  // namespace

const NamedKernel ATTENTION[] = {{"attend", &attend}, {nullptr, nullptr}};
}  // namespace zinc
