// Executes programs for gfx1201, decoded by decode.py: wave32, a dispatch at a time, one instruction after the other.
// operations.def has what the operations compute. A fault ends the dispatch with a sentence.
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef int16_t i16;
typedef uint32_t u32;
typedef int32_t i32;
typedef unsigned long long u64;
typedef long long i64;

enum { LANES = 32, VCC = 106, TTMP = 108, NONE = 124, EXEC = 126, SCC = 253, CONSTANT = 255, VECTOR = 256 }; // operands
enum { SPACE = 40 }; // bits of an address within a buffer
#define EACH_LANE for (int l = 0; l < LANES; l++)

typedef struct { // decode.py has the same in RECORD
    u16 op;
    u8 dual;                         // the first of a pair that is issued at once
    u8 neg, abs, half, mixed;        // a bit per operand; half: its upper 16 bits; mixed: a float16 of type x
    u8 omod;                         // the factor of a float result: 2, 4, 1/2
    u8 quad;                         // of each four lanes, which lane's first operand each takes: 2 bits a lane, xor 0xe4
    i16 dst, sdst, src[3];           // registers as the code numbers them, vector registers of src from 256 on
    u16 count;                       // 32-bit words of an access
    i32 offset[2];                   // bytes of an access, [1] -1 where it is one; [0]: the instruction that a jump goes to
    u32 constant[3];                 // of the operands that are no registers
} Instruction;

typedef struct { // judge.py has the same in WAVE
    u32 v[256][LANES], s[128], scc, pc;
    u32 state, epoch, signaled;      // epoch: barriers passed; signaled: it waits for the next one, or soon will
} Wave;
enum { RUNNING, WAITING, DONE };

// Who wrote and who read a word last, as group << 24 | epoch << 8 | wave; groups are numbered for as long as the process lives.
typedef struct { u64 writer, reader; } Touched;
enum { SEVERAL = 254, ATOMIC = 255 }; // in the place of a wave

typedef struct { u8 *data; Touched *touched; u64 size, writable; } Buffer; // touched: null where no kernel writes

typedef struct { // runtime.py has the same in Run
    const Instruction *code;
    const u32 *sgprs;                // the first scalar registers
    Buffer *buffers;
    u8 *descriptors;
    u64 count, sgpr_count, buffer_count, descriptors_at, descriptors_size, issued, loads_outside, limit;
    u32 groups[3], size[3], lds, mode, poison, seed, fault_at;
    char fault[200];
} Dispatch;

static Dispatch *run;
static u32 keep32, keep16, random_state; // keep: mantissa bits of a denormal that a float operation sees
static u32 lds[1 << 14];
static Touched lds_touched[1 << 14];
static u64 group, since; // the workgroup that runs, and a number before the first one of its dispatch

static void fault(const Wave *w, const char *text, ...) {
    if (*run->fault) return;
    va_list values;
    va_start(values, text);
    vsnprintf(run->fault, sizeof run->fault, text, values);
    va_end(values);
    run->fault_at = w->pc;
}

// --- values ---
static inline float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static inline u32 as_word(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline u32 flushed(u32 x) { return x & 0x7f800000 ? x : x & (0x80000000 | keep32); }
static inline float of_half(u32 x) {
    u32 exponent = x >> 10 & 31, mantissa = x & 0x3ff, sign = (x & 0x8000) << 16;
    u32 normal = (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    return as_float(sign | (exponent ? normal : as_word((float)(mantissa & keep16) * 0x1p-24f)));
}
static inline i32 to_i32(float x) { return x >= 0x1p31f ? INT32_MAX : x >= -0x1p31f ? (i32)x : x < 0 ? INT32_MIN : 0; }
static inline u32 to_u32(float x) { return x >= 0x1p32f ? UINT32_MAX : x > -1 ? (u32)(i64)x : 0; }
static inline u32 field(u32 x, u32 bits) { return bits < 32 ? x & ((1u << bits) - 1) : x; }
static inline i32 signed_field(u32 x, u32 bits) { return bits ? (i32)(x << (32 - bits)) >> (32 - bits) : 0; }
static inline float max_num(float a, float b) {
    return isnan(a) ? b : isnan(b) ? a : a > b || (a == b && !signbit(a)) ? a : b;
}
static inline float min_num(float a, float b) {
    return isnan(a) ? b : isnan(b) ? a : a < b || (a == b && signbit(a)) ? a : b;
}
static inline u32 reversed(u32 x) {
    u32 y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static inline u32 dot_of_bytes(u32 a, u32 b) {
    u32 sum = 0;
    for (int i = 0; i < 32; i += 8) sum += (u32)((int8_t)(a >> i) * (int8_t)(b >> i));
    return sum;
}
static inline u32 permuted(u64 bytes, u32 chosen) { // a byte each: of the 8, the sign of one of 4 halves, 0 or 255
    u32 result = 0;
    for (int i = 0; i < 32; i += 8) {
        u32 c = chosen >> i & 255, sign = c < 12 && bytes >> (16 * (c & 3) + 15) & 1 ? 255 : 0;
        result |= (c > 12 ? 255 : c > 7 ? sign : (bytes >> 8 * c) & 255) << i;
    }
    return result;
}
static inline u32 class_of(u32 x, u32 bits, u32 most) { // the bit of the mask that asks for its kind; bits: of a mantissa
    u32 minus = x >> bits > most, exponent = x >> bits & most, mantissa = x & ((1u << bits) - 1);
    if (exponent == most) return mantissa ? mantissa >> (bits - 1) : minus ? 2 : 9;
    return exponent ? minus ? 3 : 8 : mantissa ? minus ? 4 : 7 : minus ? 5 : 6;
}

// --- the types of operations.def: what an operand of 32 lanes gives a lane, and what becomes of the value ---
#define LANE_u(p) p[l]
#define LANE_g(p) p[l]
#define LANE_b(p) p[l]
#define LANE_i(p) (i32)p[l]
#define LANE_f(p) as_float(flushed(p[l]))
#define LANE_x(p) as_float(flushed(p[l]))
#define LANE_h(p) of_half(p[l])
#define LANE_w(p) (p[l] & 0xffff)
#define LANE_q(p) (p[l] | (u64)p[LANES + l] << 32)
#define LANE_o(p) 0
#define GIVE_u(x) u32 d = (x); r[l] = d
#define GIVE_o(x) GIVE_u(x)
#define GIVE_f(x) float d = (x); r[l] = flushed(as_word(d))
#define GIVE_m(x) u32 d = (x) != 0; r[l] = d << l
#define GIVE_c(x) u64 d = (x); r[l] = d, r[LANES + l] = (u32)(d >> 32 & 1) << l
#define GIVE_q(x) u64 d = (x); r[l] = d, r[LANES + l] = d >> 32
#define GIVE_l(x) GIVE_q(x)
#define FUNCTION(name, D, A, B, C, value, lanes, after) \
    static void of_##name(const u32 *pa, const u32 *pb, const u32 *pc, u32 *restrict r, u32 *restrict code) { \
        u32 scc = *code; \
        (void)pa, (void)pb, (void)pc, (void)scc; \
        for (int l = 0; l < lanes; l++) { \
            __auto_type a = LANE_##A(pa); __auto_type b = LANE_##B(pb); __auto_type c = LANE_##C(pc); \
            (void)a, (void)b, (void)c; \
            GIVE_##D(value); \
            if (lanes == 1) *code = (after); \
        } \
    }
#define V(name, D, A, B, C, value) FUNCTION(name, D, A, B, C, value, LANES, scc)
#define S(name, D, A, B, value, after) FUNCTION(name, D, A, B, o, value, 1, after)
#define E(name, value) FUNCTION(name, u, u, u, o, value, 1, d != 0)
#define B(name, taken) FUNCTION(name, o, u, o, o, taken, 1, scc)
#define N(name)
#include "operations.def"
#undef V
#undef S
#undef E
#undef B
#undef N

// --- the table, which decode.py reads: kind, and types of the result and the operands ---
typedef struct {
    const char *name, *kind, *types;
    void (*function)(const u32 *, const u32 *, const u32 *, u32 *, u32 *);
} Operation;
enum { END, SIGNAL, WAIT, FIRST_LANE, SWAP, MATRIX, SCALAR_LOAD, SCALAR_BUFFER_LOAD, LDS_LOAD, LDS_STORE, BUFFER_LOAD,
       BUFFER_STORE, BUFFER_AND, BUFFER_OR };
const Operation operations[] = {
    {"s_endpgm", "N"}, {"s_barrier_signal", "N"}, {"s_barrier_wait", "N"}, {"v_readfirstlane_b32", "V", "suoo"},
    {"v_swap_b32", "V", "uuoo"}, {"v_wmma_i32_16x16x16_iu8", "W", "uuuu"}, {"s_load", "M"}, {"s_buffer_load", "M"}, {"ds_load", "M"}, {"ds_store", "M"},
    {"buffer_load", "M"}, {"buffer_store", "M"}, {"buffer_atomic_and", "M"}, {"buffer_atomic_or", "M"},
#define V(name, D, A, B, C, value) {#name, "V", #D #A #B #C, of_##name},
#define S(name, D, A, B, value, after) {#name, "S", #D #A #B "o", of_##name},
#define E(name, value) {#name, "E", "uuuo", of_##name},
#define B(name, taken) {#name, "B", "ouoo", of_##name},
#define N(name) {#name, "N"},
#include "operations.def"
    {0},
};

// --- operands ---
static u32 scalar(const Wave *w, const Instruction *i, int k) {
    int n = i->src[k];
    return n < CONSTANT ? n == SCC ? w->scc : w->s[n] : i->constant[k];
}
static void set_scalar(Wave *w, int n, u32 value) {
    if (n != NONE) w->s[n] = value;
}
static const u32 *source(const Wave *w, const Instruction *i, int k, char type, u32 *values) {
    int n = i->src[k], changed = (i->neg | i->abs | i->half) >> k & 1, quad = k ? 0xe4 : i->quad ^ 0xe4;
    if (type == 'o') return values;
    if (n >= VECTOR && !changed && quad == 0xe4 && type != 'x') return w->v[n - VECTOR];
    u32 word = n < VECTOR ? scalar(w, i, k) : 0;
    u32 sign = type == 'h' ? 0x8000 : 0x80000000;
    int half_of_mix = type == 'x' && i->mixed >> k & 1;
    EACH_LANE {
        u32 x = n < VECTOR ? word : w->v[n - VECTOR][(l & ~3) | (quad >> 2 * (l & 3) & 3)];
        if (type == 'b') x = x >> l & 1;
        if (i->half >> k & 1) x >>= 16;
        if (half_of_mix) x = as_word(of_half(x & 0xffff));
        if (i->abs >> k & 1) x &= ~sign;
        if (i->neg >> k & 1) x ^= sign;
        values[l] = x;
    }
    return values;
}
static void set_lanes(Wave *w, int n, const u32 *r) {
    u32 on = w->s[EXEC];
    if (on == UINT32_MAX) memcpy(w->v[n], r, sizeof w->v[n]);
    else EACH_LANE if (on >> l & 1) w->v[n][l] = r[l];
}
static u32 joined(const u32 *bits) {
    u32 all = 0;
    EACH_LANE all |= bits[l];
    return all;
}

// --- vector operations ---
static void compute(Wave *w, const Instruction *i, u32 *r) {
    const Operation *op = &operations[i->op];
    u32 values[3][LANES];
    const u32 *p[3];
    for (int k = 0; k < 3; k++) p[k] = source(w, i, k, op->types[k + 1], values[k]);
    op->function(p[0], p[1], p[2], r, &w->scc);
    if (i->omod) EACH_LANE r[l] = flushed(as_word(as_float(r[l]) * (i->omod == 3 ? 0.5f : 2.0f * i->omod)));
}
static void store(Wave *w, const Instruction *i, const u32 *r) {
    char type = *operations[i->op].types;
    if (type == 'm') set_scalar(w, i->sdst, joined(r) & w->s[EXEC]);
    else set_lanes(w, i->dst, r);
    if (type == 'c') set_scalar(w, i->sdst, joined(r + LANES) & w->s[EXEC]);
}
static void vector(Wave *w, const Instruction *i) {
    u32 first[2 * LANES], second[2 * LANES];
    if (i->op == FIRST_LANE) {
        int lane = w->s[EXEC] ? __builtin_ctz(w->s[EXEC]) : 0;
        set_scalar(w, i->sdst, i->src[0] < VECTOR ? scalar(w, i, 0) : w->v[i->src[0] - VECTOR][lane]);
    } else if (i->op == SWAP) {
        memcpy(first, w->v[i->dst], sizeof w->v[0]);
        set_lanes(w, i->dst, w->v[i->src[0] - VECTOR]);
        set_lanes(w, i->src[0] - VECTOR, first);
    } else {
        compute(w, i, first);
        if (i->dual) compute(w, i + 1, second);
        store(w, i, first);
        if (i->dual) store(w, i + 1, second);
    }
}

// 16 x 16 sums in eight registers: a lane has column l % 16, a register a row of the lane's half. Factors, of signed bytes,
// are in two: a lane has row (or column) l % 16, and of the 16 products its half's.
static void matrix(Wave *w, const Instruction *i) {
    u32 sums[8][LANES], n = i->src[2] - VECTOR;
    if (w->s[EXEC] != UINT32_MAX) fault(w, "a product of matrices with lanes that are off");
    for (int k = 0; k < 8; k++) EACH_LANE {
        int row = l / 16 * 8 + k;
        sums[k][l] = i->src[2] < VECTOR ? scalar(w, i, 2) : w->v[n + k][l];
        for (int word = 0; word < 2; word++) for (int half = 0; half < LANES; half += 16) {
            const u32 *a = w->v[i->src[0] - VECTOR + word], *b = w->v[i->src[1] - VECTOR + word];
            sums[k][l] += dot_of_bytes(a[half + row], b[half + l % 16]);
        }
    }
    for (int k = 0; k < 8; k++) memcpy(w->v[i->dst + k], sums[k], sizeof sums[k]);
}

// --- memory ---
// A race: two waves touch a word, one of them writes, and no barrier of their common workgroup lies between. begun: the
// first workgroup whose accesses are not over.
static void touch(const Wave *w, Touched *word, u64 begun, int writes, int atomic, const char *where, u64 byte) {
    u64 now = group << 24 | w->epoch << 8, mark = now | (w->s[TTMP + 8] >> 25), before[] = {word->writer, word->reader};
    for (int k = 0; k <= writes; k++) {
        int near = before[k] >> 24 == group, ordered = near ? before[k] < now || before[k] == mark : before[k] >> 24 < begun;
        if (!ordered && !(atomic && (before[k] & 255) == ATOMIC))
            fault(w, "a race: byte %llu of %s is %s by wave %llu and %s by another %s, with no barrier between", byte, where,
                  writes ? "written" : "read", mark & 255, k ? "read" : "written", near ? "wave" : "workgroup");
    }
    if (writes) word->writer = atomic ? now | ATOMIC : mark;
    else if (word->reader >> 24 == group) word->reader = word->reader < now || word->reader == mark ? mark : now | SEVERAL;
    else word->reader = word->reader >> 24 < begun ? mark : begun << 24; // by several workgroups
}
static u32 *lds_word(const Wave *w, u64 byte, int writes) {
    if (byte % 4 || byte + 4 > run->lds) {
        fault(w, "an access to byte %llu of shared memory, expected a word of the program's %u bytes", byte, run->lds);
        return 0;
    }
    if (w->signaled) fault(w, "an access to shared memory between a barrier's signal and its wait");
    touch(w, &lds_touched[byte / 4], group, writes, 0, "shared memory", byte);
    return &lds[byte / 4];
}
static u32 *buffer_word(const Wave *w, const u32 *descriptor, u64 byte, int writes, int atomic) {
    u64 base = descriptor[0] | (u64)descriptor[1] << 32, number = (base >> SPACE) - 1;
    if (number >= run->buffer_count || base << (64 - SPACE) || descriptor[2] != run->buffers[number].size) {
        fault(w, "%08x %08x %08x, expected a buffer's descriptor", descriptor[0], descriptor[1], descriptor[2]);
        return 0;
    }
    Buffer *b = &run->buffers[number];
    if (byte % 4 || (writes && (byte + 4 > b->size || !b->writable)))
        fault(w, "an access to byte %llu of binding %llu, expected a word of its %llu bytes%s", byte, number, b->size,
              writes ? ", and a kernel that declares to write it" : "");
    if (byte + 4 > b->size) {
        run->loads_outside++;
        return 0;
    }
    if (b->touched) touch(w, &b->touched[byte / 4], since, writes, atomic, "a buffer", byte);
    return (u32 *)(b->data + byte);
}
static void scalar_load(Wave *w, const Instruction *i) {
    const u32 *base = &w->s[i->src[0]];
    u64 byte = (u64)i->offset[0] + scalar(w, i, 1);
    u64 address = (base[0] | (u64)base[1] << 32) + byte - run->descriptors_at;
    u32 words[16] = {0};
    for (int k = 0; k < i->count; k++) {
        const u32 *word = (u32 *)(run->descriptors + address + 4 * k);
        if (i->op == SCALAR_BUFFER_LOAD) word = buffer_word(w, base, byte + 4 * k, 0, 0);
        else if (address % 4 || address + 4 * k + 4 > run->descriptors_size)
            fault(w, "a scalar load from elsewhere than the descriptors"), word = 0;
        if (word) words[k] = *word;
    }
    for (int k = 0; k < i->count; k++) set_scalar(w, i->sdst + k, words[k]);
}
static void vector_access(Wave *w, const Instruction *i) {
    int in_lds = i->op == LDS_LOAD || i->op == LDS_STORE, loads = i->op == LDS_LOAD || i->op == BUFFER_LOAD;
    u32 address[LANES] = {0}, base = in_lds ? 0 : scalar(w, i, 1);
    if (i->src[0] >= VECTOR) memcpy(address, w->v[i->src[0] - VECTOR], sizeof address); // may be a register of the result
    for (int part = 0; part < 1 + (in_lds && i->offset[1] >= 0); part++) EACH_LANE {
        for (int k = 0; k < i->count && w->s[EXEC] >> l & 1; k++) {
            u64 byte = (u64)address[l] + base + i->offset[part] + 4 * k;
            u32 *word = in_lds ? lds_word(w, byte, !loads)
                               : buffer_word(w, &w->s[i->src[2]], byte, !loads, i->op >= BUFFER_AND);
            u32 *value = &w->v[loads ? i->dst + part * i->count + k : (part ? i->src[2] - VECTOR : i->dst) + k][l];
            if (loads) *value = word ? *word : 0;
            else if (word) *word = i->op == BUFFER_AND ? *word & *value : i->op == BUFFER_OR ? *word | *value : *value;
        }
    }
}

// --- waves ---
static void scalar_operation(Wave *w, const Instruction *i, const Operation *op, u32 *next) {
    u32 operands[2][2 * LANES], r[2 * LANES], lanes = w->s[EXEC];
    for (int k = 0; k < 2; k++) if (op->types[k + 1] != 'o') {
        operands[k][0] = scalar(w, i, k);
        operands[k][LANES] = i->src[k] < NONE ? w->s[i->src[k] + 1] : i->constant[k + 1]; // of 64-bit operations
    }
    op->function(operands[0], operands[1], 0, r, &w->scc);
    if (*op->kind == 'B') { if (r[0]) *next = i->offset[0]; return; }
    if (*op->kind == 'E') w->s[EXEC] = r[0], r[0] = lanes;
    if (op->types[0] != 'o') set_scalar(w, i->sdst, r[0]);
    if (op->types[0] == 'q') set_scalar(w, i->sdst + 1, r[LANES]);
}
static void step(Wave *w) {
    if (w->pc >= run->count) { fault(w, "no instruction here"); return; }
    const Instruction *i = &run->code[w->pc];
    const Operation *op = &operations[i->op];
    u32 next = w->pc + 1 + i->dual;
    run->issued++;
    switch (*op->kind) {
    case 'V': vector(w, i); break;
    case 'W': matrix(w, i); break;
    case 'M': if (i->op <= SCALAR_BUFFER_LOAD) scalar_load(w, i); else vector_access(w, i); break;
    case 'N':
        if (i->op == END) w->state = DONE;
        if (i->op == SIGNAL) w->signaled = 1;
        if (i->op == WAIT) w->state = WAITING;
        if (i->op == WAIT && !w->signaled) fault(w, "a wait for a barrier that the wave has not signaled");
        break;
    default: scalar_operation(w, i, op, &next);
    }
    w->pc = next;
}
static void begin(Wave *w, u32 x, u32 y, u32 z, u32 number, u32 threads) {
    for (u32 *p = (u32 *)w; p < (u32 *)(w + 1); p++) *p = run->poison; // what nobody wrote is no zero
    w->pc = w->state = w->epoch = w->scc = w->signaled = 0;
    memcpy(w->s, run->sgprs, 4 * run->sgpr_count);
    w->s[TTMP + 9] = x, w->s[TTMP + 7] = y | z << 16, w->s[TTMP + 8] = number << 25;
    u32 left = threads - LANES * number, a = run->size[0], b = run->size[1];
    w->s[EXEC] = left < LANES ? (1u << left) - 1 : UINT32_MAX;
    EACH_LANE {
        u32 t = LANES * number + l;
        w->v[0][l] = t % a | t / a % b << 10 | t / a / b << 20;
    }
}
static u32 drawn(u32 below) { // of a fixed sequence
    random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
    return random_state % below;
}
// The waves run in slices of random length, in random order, from barrier to barrier.
static void workgroup(Wave *waves, u32 count) {
    u32 done = 0, waiting = 0;
    while (done < count && !*run->fault) {
        Wave *w = &waves[drawn(count)];
        if (w->state != RUNNING) continue;
        for (u32 n = drawn(400) + 1; n && w->state == RUNNING && !*run->fault; n--) step(w);
        done += w->state == DONE, waiting += w->state == WAITING;
        if (waiting && done) fault(w, "a wave that ended, where others wait for it at a barrier");
        if (run->issued > run->limit) fault(w, "more than %llu instructions", run->limit);
        if (waiting == count) {
            for (u32 k = 0; k < count; k++) waves[k].state = RUNNING, waves[k].signaled = 0, waves[k].epoch++;
            waiting = 0;
        }
    }
}
static void enter(Dispatch *request) {
    run = request, keep32 = run->mode & 0x20 ? 0x7fffff : 0, keep16 = run->mode & 0x80 ? 0x3ff : 0;
    random_state = run->seed, since = ++group;
}
void dispatch(Dispatch *request) {
    enter(request);
    u32 *n = run->groups, total = n[0] * n[1] * n[2], threads = run->size[0] * run->size[1] * run->size[2];
    u32 count = (threads + LANES - 1) / LANES;
    Wave *waves = malloc(count * sizeof *waves);
    for (u32 k = 0; k < total && !*run->fault; k++) {
        u32 g = run->seed % 2 ? k : total - 1 - k;
        group++;
        for (u32 b = 0; b < run->lds / 4; b++) lds[b] = run->poison;
        for (u32 q = 0; q < count; q++) begin(&waves[q], g % n[0], g / n[0] % n[1], g / n[0] / n[1], q, threads);
        workgroup(waves, count);
    }
    free(waves);
}
// One instruction, or a pair, of a wave whose state is given.
void single(Dispatch *request, Wave *w) {
    enter(request);
    step(w);
}
