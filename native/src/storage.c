/* As in zinc_attn/storage.py and zinc_attn/cache/; a test compares them. */
#include "storage.h"

const struct storage_type za_storage[ZA_DTYPES] = {
    [ZA_F32] = {"f32", 32, 0, 0, 0, 0},
    [ZA_F16] = {"f16", 16, 0, 0, 0, 65504.0},
    [ZA_BF16] = {"bf16", 16, 0, 0, 0, 0},
    [ZA_Q8_0] = {"q8_0", 8, 1, 0, 0, 8319008.0},
    [ZA_FP8_E4M3] = {"fp8_e4m3", 8, 0, 0, 1, 0},
    [ZA_Q5_1] = {"q5_1", 4, 2, 1, 0, 65504.0},
    [ZA_Q5_0] = {"q5_0", 4, 1, 1, 0, 1048064.0},
    [ZA_Q4_1] = {"q4_1", 4, 2, 0, 0, 65504.0},
    [ZA_Q4_0] = {"q4_0", 4, 1, 0, 0, 524032.0},
    [ZA_IQ4_NL] = {"iq4_nl", 4, 1, 0, 0, 6550400.0},
};
const float za_iq4_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const struct storage_limits za_storage_limits = {
    .growth = 1.125,
    .fp8_unit = 256.0,
    .fp8_most = 448.0,
    .least_scale = 4.656612873077393e-10,
    .most_scale = 2251799813685248.0,
};
