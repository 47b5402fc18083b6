// Reductions of a row by a workgroup of SUM_LANES invocations. Partial sum r is the sum of the elements j = r mod
// SUM_LANES, ascending. Then halves of the partial sums are added, 128, 64, ... 1 apart.

shared float partial[SUM_LANES];

// The sum of `size` neighboring invocations' terms; size is a power of two. The other partial sums of their row are 0.
float group_sum(float term, uint size) {
    uint r = gl_LocalInvocationID.x;
    partial[r] = term;
    for (uint apart = size / 2u; apart > 0u; apart /= 2u) {
        barrier();
        if (r % size < apart) {
            precise float sum = partial[r] + partial[r + apart];
            partial[r] = sum;
        }
    }
    barrier();
    float sum = partial[r - r % size];
    barrier();
    return sum;
}

float workgroup_sum(float term) {
    return group_sum(term, SUM_LANES);
}

// The row of a workgroup, in a grid of one or two dimensions.
uint workgroup_row() {
    return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
}
