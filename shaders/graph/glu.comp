// Gated activations; see glu.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"
#include "glu.glsl"
