// NODE: the eight waves of a workgroup, its members, attend a leaf each and fold their leaves into the node.
//
// The fold is shared out by query vectors: member w folds vector w.  In PAIRS rounds every member puts one pair of
// dimensions of all its vectors to shared memory, [member][h][2][lane], in the place of its weights, and takes the pair
// of its own vector from all members, leaves ascending.  So each state crosses shared memory once, and each member then
// writes the node's state of one vector.

shared vec2 member_ml[MEMBERS * VECTORS];  // [member][h]: (m, l)

// To member, lane and own.  Subgroups of 32 are the waves, whichever invocations a driver puts into them, and a number
// that a subgroup has in common keeps what follows from it in scalar registers.  The remainders change nothing; they tell
// a compiler what can be.
void find_place() {
    bool waves = gl_SubgroupSize == WAVE;
    member = (waves ? gl_SubgroupID : gl_LocalInvocationID.y) % MEMBERS;
    lane = (waves ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % WAVE;
    own = member * WAVE_WEIGHTS;
}

// The member's leaf.  Members behind the item's last leaf attend none of its keys, which gives the empty state.
Leaf leaf_of_member(Item item) {
    uint index = item.leaf_begin + member;
    Leaf leaf = leaf_of(item, min(index, item.leaf_end - 1u));
    leaf.count = index < item.leaf_end ? leaf.count : 0u;
    return leaf;
}

// From every member's m, l and o to the node's state of vector `member`, in m[0], l[0] and o[0 ... PAIRS - 1].
void fold_members() {
    uint own_h = min(member, VECTORS - 1u);
    if (lane == 0u) {
        for (uint h = 0u; h < VECTORS; ++h) {
            member_ml[member * VECTORS + h] = vec2(m[h], l[h]);
        }
    }
    vec2 w[MEMBERS];  // what the sum so far and a member's leaf are weighted with
    [[unroll]] for (uint i = 0u; i < PAIRS; ++i) {
        barrier();  // everybody has read what is overwritten now
        for (uint h = 0u; h < VECTORS; ++h) {
            uint at = own + 2u * WAVE * h + lane;
            weights[at] = o[h * PAIRS + i].x;
            weights[at + WAVE] = o[h * PAIRS + i].y;
        }
        barrier();
        if (i == 0u) {
            float top = EMPTY_M, sum = 0.0;
            for (uint t = 0u; t < MEMBERS; ++t) {
                vec2 ml = member_ml[t * VECTORS + own_h];
                w[t] = merge_weights(top, ml.x);
                top = max(top, ml.x);
                sum = merge(sum, w[t].x, ml.y, w[t].y);
            }
            m[0] = top;
            l[0] = sum;
        }
        vec2 x = vec2(0.0);
        for (uint t = 0u; t < MEMBERS; ++t) {
            uint at = t * WAVE_WEIGHTS + 2u * WAVE * own_h + lane;
            x = merge(x, w[t].x, vec2(weights[at], weights[at + WAVE]), w[t].y);
        }
        o[i] = x;
    }
}
