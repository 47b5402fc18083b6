// Norms of rows, and their rotary positions; see norm.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#define TURNED
#include "contract.glsl"
#include "norm.glsl"
