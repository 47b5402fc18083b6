// NODE: the eight waves of a workgroup, its members, attend a leaf each and fold their leaves into the node.
//
// The fold is shared out by query vectors: member w folds vectors w and w + 8, as far as there are.  m and l are folded
// first: the fold of values needs its powers of two, and each pass that writes output needs l.  Behind each pass over
// V, in rounds, every member puts FOLD_DIMS dimensions of all its vectors to shared memory, [member][h][dim] [lane],
// and takes those of its own vectors from all members, leaves ascending.  So each state crosses shared memory once, and
// each member then writes the node's state of its vectors.  With one pass that memory is the place of the weights; with
// several, whose weights are still wanted, it lies behind them.

shared float member_m[MEMBERS * VECTORS];  // [member][h]
shared float member_parts[MEMBERS * VECTORS * WEIGHT_PARTIALS];  // [member][h][key mod 4]: sums of weights
const uint FOLDED = (VECTORS + MEMBERS - 1u) / MEMBERS;  // vectors that a member folds
vec2 fold_powers[FOLDED * MEMBERS];  // [vector][member]: powers of two for (the sum so far, the member's leaf)

// The member's leaf.  Members behind the item's last leaf attend none of its keys, which gives the empty state.
Leaf leaf_of_member(Item item) {
    uint index = item.leaf_begin + member;
    Leaf leaf = leaf_of(item, min(index, item.leaf_end - 1u));
    leaf.count = index < item.leaf_end ? leaf.count : 0u;
    return leaf;
}

// Vector f of those that the member folds.  What is behind the last vector is that one once more, and is not written.
uint folded_vector(uint f) {
    return min(member + f * MEMBERS, VECTORS - 1u);
}

// To member_m and member_parts, what every member's m and l are made of; to m[f] and l[f] the node's of vector
// folded_vector(f), and to fold_powers those of the fold that makes them.
void fold_ml_of_members() {
    for (uint g = 0u; g < PARTS; ++g) {
        uint at = g * LANES + lane;
        if (at < VECTORS * WEIGHT_PARTIALS) {
            member_parts[member * VECTORS * WEIGHT_PARTIALS + at] = parts[g];
        }
    }
    if (lane == 0u) {
        for (uint h = 0u; h < VECTORS; ++h) {
            member_m[member * VECTORS + h] = m[h];
        }
    }
    barrier();
    for (uint f = 0u; f < FOLDED; ++f) {
        float top = EMPTY_M, sum = 0.0;
        for (uint t = 0u; t < MEMBERS; ++t) {
            uint at = t * VECTORS + folded_vector(f);
            vec2 powers = merge_powers(top, member_m[at]);
            top = max(top, member_m[at]);
            at *= WEIGHT_PARTIALS;
            vec2 p01 = vec2(member_parts[at], member_parts[at + 1u]);
            vec2 p23 = vec2(member_parts[at + 2u], member_parts[at + 3u]);
            sum = merge(sum, powers.x, sum_of_parts(p01, p23), powers.y);
            fold_powers[f * MEMBERS + t] = powers;
        }
        m[f] = top;
        l[f] = sum;
    }
}

// From every member's o of this pass over V to the node's of its vectors f, in o[f * PAIRS ... f * PAIRS + PAIRS - 1].
void fold_values_of_members() {
    [[unroll]] for (uint d = 0u; d < SLICE; d += FOLD_DIMS) {
        barrier();  // everybody has read what is overwritten now
        for (uint h = 0u; h < VECTORS; ++h) {
            for (uint e = 0u; e < FOLD_DIMS; ++e) {
                uint at = FOLD_AT + ((member * VECTORS + h) * FOLD_DIMS + e) * WAVE + lane;
                weights[at] = o[h * PAIRS + d / 2u][(d + e) % 2u];
            }
        }
        barrier();
        for (uint i = 0u; i < FOLDED * FOLD_DIMS; ++i) {
            uint f = i / FOLD_DIMS, e = i % FOLD_DIMS;
            float x = 0.0;
            for (uint t = 0u; t < MEMBERS; ++t) {
                uint at = FOLD_AT + ((t * VECTORS + folded_vector(f)) * FOLD_DIMS + e) * WAVE + lane;
                vec2 powers = fold_powers[f * MEMBERS + t];
                x = merge(x, powers.x, weights[at], powers.y);
            }
            o[f * PAIRS + d / 2u][(d + e) % 2u] = x;
        }
    }
}

// Steps 3 to 5 of a pass over V: its values, their fold, and where its part of the node's state goes.
void make_pass(Item item, Leaf leaf, uint pass) {
    sum_slices(item, leaf, pass * VALUE_LANES + lane);
    fold_values_of_members();
    for (uint f = 0u; f < FOLDED; ++f) {
        uint h = member + f * MEMBERS;
        if (h < VECTORS) {
            emit_vector(item, item.leaf_begin, h, f, pass);
        }
    }
}

void find_node_values(Item item, Leaf leaf) {
    if (VALUE_PASSES == 1u) {
        make_pass(item, leaf, 0u);
        return;
    }
    [[dont_unroll]] for (uint pass = 0u; pass < VALUE_PASSES; ++pass) {
        make_pass(item, leaf, pass);
    }
}
