// Gated activations, with the results as int8, too; see glu.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#define QUANTIZED
#include "contract.glsl"
#include "glu.glsl"
