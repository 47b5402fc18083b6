// Norms of rows, with the results as int8, too; see norm.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#define QUANTIZED
#include "contract.glsl"
#include "norm.glsl"
