// Copies of pages of K and V within the cache, made before a shared page is written.
//
// Grid: x = pair of pages (source, target), y = KV head, z = tile of the page.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = COPY_SPEC_K_TILE_WORDS) const uint K_TILE_WORDS = 8192u;
layout(constant_id = COPY_SPEC_V_TILE_WORDS) const uint V_TILE_WORDS = 8192u;  // 0 for a latent shape

layout(set = 0, binding = COPY_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = COPY_BIND_K, std430) restrict buffer K { uint k[]; };
layout(set = 0, binding = COPY_BIND_V, std430) restrict buffer V { uint v[]; };

void main() {
    uint record = work[HEADER_APPEND_TABLE] + gl_WorkGroupID.x * COPY_WORDS;
    uint in_page = gl_WorkGroupID.y * gl_NumWorkGroups.z + gl_WorkGroupID.z;
    uint tiles = gl_NumWorkGroups.y * gl_NumWorkGroups.z;
    uint source = work[record + COPY_SOURCE] * tiles + in_page;
    uint target = work[record + COPY_TARGET] * tiles + in_page;
    for (uint i = gl_LocalInvocationID.x; i < K_TILE_WORDS; i += WAVE) {
        k[target * K_TILE_WORDS + i] = k[source * K_TILE_WORDS + i];
    }
    for (uint i = gl_LocalInvocationID.x; i < V_TILE_WORDS; i += WAVE) {
        v[target * V_TILE_WORDS + i] = v[source * V_TILE_WORDS + i];
    }
}
