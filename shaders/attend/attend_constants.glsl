// The constants of attend.comp: specialization constants, and the sizes of a lane's share that follow from them.
layout(local_size_x_id = ATTEND_SPEC_WORKGROUP_SIZE, local_size_x = 256) in;
const uint WAVES = LEAVES_PER_NODE;               // of a workgroup, a leaf each
const uint LANES = gl_WorkGroupSize.x / WAVES;    // of a wave: 32, 16 or 8
layout(constant_id = ATTEND_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = ATTEND_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, whole slices of a lane
layout(constant_id = ATTEND_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = ATTEND_SPEC_VECTORS) const uint VECTORS = 4u;  // query vectors of a workgroup
layout(constant_id = ATTEND_SPEC_CHUNKS_AHEAD) const uint CHUNKS_AHEAD = 1u;  // chunks of a key in flight: 1, 2 or 4
layout(constant_id = ATTEND_SPEC_TILE) const uint TILE = 64u;  // tokens per tile: 64, or the page size if smaller
layout(constant_id = ATTEND_SPEC_SOFTCAP) const uint SOFTCAP = 0u;  // 1: scores are capped
layout(constant_id = ATTEND_SPEC_BIASES) const uint BIASES = 0u;  // the biases that scores have: a sum of BIAS_...
layout(constant_id = ATTEND_SPEC_MASK) const uint MASK = 0u;  // 1: scores have a bias by row and key
layout(constant_id = ATTEND_SPEC_ROWS_SHARED) const uint ROWS = 1u;  // query rows that share these keys
layout(constant_id = ATTEND_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F32;  // type of K
layout(constant_id = ATTEND_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F32;  // type of V; a latent shape's is K's
layout(constant_id = ATTEND_SPEC_ARITHMETIC) const uint ARITHMETIC = CANONICAL;  // see multiply_add.glsl, integer.glsl
layout(constant_id = ATTEND_SPEC_SUBGROUPS) const uint SUBGROUPS = 0u;  // 1: subgroups of LANES invocations are waves
layout(constant_id = ATTEND_SPEC_WALKS) const uint WALKS = 1u;  // 0: every item has one node
layout(constant_id = ATTEND_SPEC_K_SIZE) const uint K_SIZE = 128u;  // of K_DIM, dimensions that rows have
layout(constant_id = ATTEND_SPEC_V_SIZE) const uint V_SIZE = 128u;  // of V_DIM
layout(constant_id = ATTEND_SPEC_K_STRIDE) const uint K_STRIDE = 0u;  // bytes from row to row; 0: K lies in tiles
layout(constant_id = ATTEND_SPEC_V_STRIDE) const uint V_STRIDE = 0u;  // of V
layout(constant_id = ATTEND_SPEC_ROWS_AHEAD) const uint ROWS_AHEAD = 8u;  // most rows of V in flight: 4 or 8
layout(constant_id = ATTEND_SPEC_PASS_SUMS) const uint PASS_SUMS = 2048u;  // sums of values of a wave in a pass over V
#include "attend_sizes.glsl"
const bool INTEGER = ARITHMETIC == INTEGER_SUMS;
const bool CPU = CHUNKS_AHEAD == 1u;  // a CPU device: no other has a single chunk of K in flight
const bool FOLDS = !CPU;  // a GPU's compiler folds conversions of float16 into products; see storage.glsl

const uint KEY_PAIRS = KEYS_PER_LEAF / LANES / 2u;  // of a lane: keys lane and lane + LANES, then the next two
const uint LANE_SLICES = LANES == WAVE ? 1u : VALUE_LANES / LANES;  // slices lane, lane + LANES, ...
const uint LANE_PAIRS = LANE_SLICES * PAIRS;  // pairs of dimensions in all of these slices
const uint LANE_QUARTERS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;  // pairs (h, key mod 4) of a lane
