// Matrix times matrix, for devices without the integer dot product; see mul_mat.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"
#include "mul_mat.glsl"
