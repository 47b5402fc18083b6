// Matrix times few vectors, of devices without the integer dot product; see mul_mat_vec.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#include "contract.glsl"
#include "mul_mat_vec.glsl"
