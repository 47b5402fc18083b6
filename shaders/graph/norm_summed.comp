// Norms of rows that are sums of experts' results, with the norms as int8, too; see norm.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#define QUANTIZED
#define SUMMED
#include "contract.glsl"
#include "norm.glsl"
