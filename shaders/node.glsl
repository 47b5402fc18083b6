// NODE: the eight waves of a workgroup, its members, attend a leaf each and fold their leaves into the node.
//
// The fold is shared out by query vectors: member w folds vector w (a NODE has eight at most).  m and l are folded
// first: the fold of values needs its powers of two, and each pass that writes output needs l.  Behind each pass over
// V, in rounds, every member puts FOLD_DIMS dimensions of all its vectors to shared memory, [member][h][dim] [lane], and
// takes those of its own vector from all members, leaves ascending.  So each state crosses shared memory once, and each
// member then writes the node's state of one vector.  With one pass that memory is the place of the weights; with
// several, whose weights are still wanted, it lies behind them.

shared float member_m[MEMBERS * VECTORS];  // [member][h]
shared float member_parts[MEMBERS * VECTORS * WEIGHT_PARTIALS];  // [member][h][key mod 4]: sums of weights
vec2 fold_powers[MEMBERS];  // powers of two for (the sum so far, a member's leaf)

// The member's leaf.  Members behind the item's last leaf attend none of its keys, which gives the empty state.
Leaf leaf_of_member(Item item) {
    uint index = item.leaf_begin + member;
    Leaf leaf = leaf_of(item, min(index, item.leaf_end - 1u));
    leaf.count = index < item.leaf_end ? leaf.count : 0u;
    return leaf;
}

// The vector that the member folds; members behind the last vector fold that one once more and write nothing.
uint folded_vector() {
    return min(member, VECTORS - 1u);
}

// To member_m and member_parts, what every member's m and l are made of; to m[0] and l[0] those of the node's vector
// `member`, and to fold_powers those of the fold that makes them.
void fold_ml_of_members() {
    uint own_h = folded_vector();
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
    float top = EMPTY_M, sum = 0.0;
    for (uint t = 0u; t < MEMBERS; ++t) {
        uint at = (t * VECTORS + own_h) * WEIGHT_PARTIALS;
        float leaf_m = member_m[t * VECTORS + own_h];
        fold_powers[t] = merge_powers(top, leaf_m);
        top = max(top, leaf_m);
        vec2 p01 = vec2(member_parts[at], member_parts[at + 1u]);
        vec2 p23 = vec2(member_parts[at + 2u], member_parts[at + 3u]);
        sum = merge(sum, fold_powers[t].x, sum_of_parts(p01, p23), fold_powers[t].y);
    }
    m[0] = top;
    l[0] = sum;
}

// From every member's o of this pass over V to the node's of vector `member`, in o[0 ... PAIRS - 1].
void fold_values_of_members() {
    uint own_h = folded_vector();
    [[unroll]] for (uint d = 0u; d < SLICE; d += FOLD_DIMS) {
        barrier();  // everybody has read what is overwritten now
        for (uint h = 0u; h < VECTORS; ++h) {
            for (uint e = 0u; e < FOLD_DIMS; ++e) {
                uint at = FOLD_AT + ((member * VECTORS + h) * FOLD_DIMS + e) * WAVE + lane;
                weights[at] = o[h * PAIRS + d / 2u][(d + e) % 2u];
            }
        }
        barrier();
        for (uint e = 0u; e < FOLD_DIMS; ++e) {
            float x = 0.0;
            for (uint t = 0u; t < MEMBERS; ++t) {
                uint at = FOLD_AT + ((t * VECTORS + own_h) * FOLD_DIMS + e) * WAVE + lane;
                x = merge(x, fold_powers[t].x, weights[at], fold_powers[t].y);
            }
            o[d / 2u][(d + e) % 2u] = x;
        }
    }
}

// Steps 3 to 5: each pass over V, its fold, and where its part of the node's state goes.
void find_node_values(Item item, Leaf leaf) {
    if (VALUE_PASSES == 1u) {
        sum_slices(item, leaf, lane);
        fold_values_of_members();
        if (member < VECTORS) {
            emit_vector(item, item.leaf_begin, member, 0u, 0u);
        }
        return;
    }
    [[dont_unroll]] for (uint pass = 0u; pass < VALUE_PASSES; ++pass) {
        sum_slices(item, leaf, pass * VALUE_LANES + lane);
        fold_values_of_members();
        if (member < VECTORS) {
            emit_vector(item, item.leaf_begin, member, 0u, pass);
        }
    }
}
