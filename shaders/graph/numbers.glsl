// Float functions of the graph's operations.
#include "../contract.glsl"
#include "../floats.glsl"
