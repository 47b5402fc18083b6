// The fold of pass 2: a round of states joins the total.  One state after the other, it would be
//
//     for each state (m, l, o):                         where states are leaves: eight of them into a node's sum,
//         top = max(sum_m, m)                           then the node, in the same way, into the total
//         sum_l = flush(sum_l * 2**(sum_m - top) + l * 2**(m - top)), and o likewise
//         sum_m = top
//
// The weights 2**(...) depend on maxima alone, and sum_m is the maximum of all states before.  So find_weights makes
// those of all merges of a round at once, a lane for each state; then the products are made, and last the sums, in order.

uint lane, wave;   // the invocation's, and its wave's number
uint place;        // in the round, of the lane's state ...
uint batch_place;  // ... and of the first state of the wave's batch

// The lane's dimensions of the batch, and of the total of all states before it.
vec2 o[BATCH];    // of the states, then weighted; where they are leaves, of their nodes in the end
float node_l[BATCH / LEAVES_PER_NODE];
float total_m = EMPTY_M, total_l = 0.0;  // find_weights already makes total_m that of the whole round
vec2 total_o = vec2(0.0);

shared float sum_w[ROUND];                // the weight of the sum that a state joins: its node's, or the total
#define state_m sum_w                     // before that, in the same words: m of each state
shared float state_w[ROUND];              // the weight of the state itself
shared float state_l[ROUND];              // the state's l, so weighted
shared vec2 node_w[ROUND / LEAVES_PER_NODE];  // where states are leaves: the weights of (the total, a node that joins it)
shared float wave_m[WAVES];               // the largest m of each wave's batch
shared vec4 passed[WAVE];                 // the total, from wave to wave: two dimensions of o, l, unused

void find_place() {
    place = gl_LocalInvocationID.x;
    lane = place % WAVE;
    wave = place / WAVE;
    batch_place = wave * BATCH;
}

// Lane = state: to total_m, and to all weights in shared memory.
void find_weights(vec2 ml, bool there, bool leaves) {
    float m = there ? ml.x : EMPTY_M;
    state_m[place] = m;
    barrier();
    uint in_node = lane & (LEAVES_PER_NODE - 1u);
    uint total_end = leaves ? lane - in_node : lane;  // the total holds all before it when the state (its node) joins
    float node_before = EMPTY_M, total_before = total_m, batch_m = EMPTY_M;  // maxima
    for (uint t = 0u; t < BATCH; ++t) {
        float other = state_m[batch_place + t];
        total_before = max(total_before, t < total_end ? other : EMPTY_M);
        batch_m = max(batch_m, other);
    }
    for (uint t = 0u; t < LEAVES_PER_NODE; ++t) {
        float other = state_m[place - in_node + t];
        node_before = max(node_before, leaves && t < in_node ? other : EMPTY_M);
    }
    wave_m[wave] = batch_m;
    barrier();
    for (uint w = 0u; w < WAVES; ++w) {
        float other = wave_m[w];
        total_before = max(total_before, w < wave ? other : EMPTY_M);
        total_m = max(total_m, other);
    }
    vec2 total_w = merge_weights(total_before, max(node_before, m));
    vec2 w = leaves ? merge_weights(node_before, m) : total_w;
    precise float weighted_l = ml.y * w.y;
    sum_w[place] = there ? w.x : 1.0;
    state_w[place] = there ? w.y : 0.0;
    state_l[place] = there ? weighted_l : 0.0;
    if (in_node == LEAVES_PER_NODE - 1u) {  // at a node's last leaf max(node_before, m) is the whole node's m
        node_w[place / LEAVES_PER_NODE] = total_w;
    }
    barrier();
}

// Lane = dimensions, as in all that follow: o of every state, weighted.
void weigh_states() {
    for (uint j = 0u; j < BATCH; ++j) {
        precise vec2 weighted = o[j] * state_w[batch_place + j];
        o[j] = weighted;
    }
}

// From leaves to nodes: node n of the batch to o[n] and node_l[n], weighted.  The nodes' sums take turns, so that no
// instruction waits for the one before.
void fold_leaves() {
    const uint NODES = BATCH / LEAVES_PER_NODE;
    vec2 node_o[NODES];
    for (uint n = 0u; n < NODES; ++n) {
        node_l[n] = 0.0;
        node_o[n] = vec2(0.0);
    }
    for (uint t = 0u; t < LEAVES_PER_NODE; ++t) {
        for (uint n = 0u; n < NODES; ++n) {
            uint j = n * LEAVES_PER_NODE + t;
            node_l[n] = merge_weighted(node_l[n], sum_w[batch_place + j], state_l[batch_place + j]);
            node_o[n] = merge_weighted(node_o[n], sum_w[batch_place + j], o[j]);
        }
    }
    for (uint n = 0u; n < NODES; ++n) {
        float w = node_w[batch_place / LEAVES_PER_NODE + n].y;
        precise vec2 weighted_o = node_o[n] * w;
        precise float weighted_l = node_l[n] * w;
        o[n] = weighted_o;
        node_l[n] = weighted_l;
    }
}

// The total as the wave before, or the last one of the round before, has left it.
void take_total() {
    total_o = passed[lane].xy;
    total_l = passed[lane].z;
}

// The wave's turn: its batch joins the total.  first: there is no total yet.  A single wave keeps it.
void fold_into_total(bool leaves, bool first) {
    if (WAVES > 1u && !first) {
        take_total();
    }
    if (leaves) {
        for (uint n = 0u; n < BATCH / LEAVES_PER_NODE; ++n) {
            float w = node_w[batch_place / LEAVES_PER_NODE + n].x;
            total_l = merge_weighted(total_l, w, node_l[n]);
            total_o = merge_weighted(total_o, w, o[n]);
        }
    } else {
        for (uint t = 0u; t < BATCH; ++t) {
            total_l = merge_weighted(total_l, sum_w[batch_place + t], state_l[batch_place + t]);
            total_o = merge_weighted(total_o, sum_w[batch_place + t], o[t]);
        }
    }
    passed[lane] = vec4(total_o, total_l, 0.0);
}
