// The columns of a product, which are rows of x and of y, and the workgroup's matrix of weights.
//
// Column n of the grid is row n of plane gl_WorkGroupID.z. With the constant EXPERTS a column is a pair of slot and
// token, slot + slots * token, and its matrix is the expert that `ids` names for the pair: column n is pair n. For
// kernels in tiles (TILED) `ids` is by_expert.comp's list: column n is the n-th pair of the list, and a tile has one
// expert. The last columns of such a kernel may not exist in y.

const uint NO_COLUMN = 0xFFFFFFFFu;  // in a list: a column, or a whole tile, that is not there
uint expert;  // the workgroup's; the number of all experts, if the id is no expert's
uint matrix;  // the expert's number among the bound experts

uint pair_at(uint n) {
    return TILED ? ids[gl_NumWorkGroups.y + n] : n;
}

// Whether the workgroup's matrix is bound; else the workgroup has nothing to do. An id that is none of the experts
// counts as the first expert, and its results are NaN.
bool find_matrix() {
    if (EXPERTS == 0u) {
        return true;
    }
    uint n = gl_WorkGroupID.y, all = p.experts[2];
    expert = TILED ? ids[n] : min(ids[place(p.ids, uvec4(n % p.y.n[1], n / p.y.n[1], 0u, 0u))], all);
    matrix = (expert < all ? expert : 0u) - p.experts[0];
    return expert != NO_COLUMN && matrix < p.experts[1];
}

// Where column n begins in y. A column that y does not have gets a place after y's last column.
uvec4 column_of_y(uint n) {
    if (EXPERTS == 0u) {
        return uvec4(0u, n, gl_WorkGroupID.z % p.y.n[2], gl_WorkGroupID.z / p.y.n[2]);
    }
    uint pair = pair_at(n);
    return uvec4(0u, pair % p.y.n[1], pair / p.y.n[1], 0u);
}

// Where column n begins in x. A column that x does not have gets the place of a column that x has.
uvec4 column_of_x(uint n) {
    if (EXPERTS == 0u) {
        return column_of_y(TILED ? min(n, p.y.n[1] - 1u) : n);
    }
    uint pair = min(pair_at(n), p.y.n[1] * p.y.n[2] - 1u);
    return uvec4(0u, pair % p.y.n[1] % p.x_slots, pair / p.y.n[1], 0u);
}

// The number of column n among all rows of x.
uint number_in_x(uint n) {
    uvec4 column = EXPERTS == 0u ? uvec4(0u, min(n, p.y.n[1] - 1u), gl_WorkGroupID.z, 0u) : column_of_x(n);
    return column.z * (EXPERTS == 0u ? p.y.n[1] : p.x_slots) + column.y;
}

uint rows_of_x() {
    return EXPERTS == 0u ? p.y.n[1] * p.y.n[2] * p.y.n[3] : p.x_slots * p.y.n[2];
}
