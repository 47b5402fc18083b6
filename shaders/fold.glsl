// The fold of pass 2: a round of states joins the total.  One state after the other, it would be
//
//     for each state (m, l, o):                         where states are leaves: eight of them into a node's sum,
//         top = max(sum_m, m)                           then the node, in the same way, into the total
//         sum_l = flush(sum_l * 2**(sum_m - top) + l * 2**(m - top)), and o likewise
//         sum_m = top
//
// The powers 2**(...) depend on maxima alone, and sum_m is the maximum of all states before.  So find_powers makes
// those of all merges of a round at once, a lane for each state; then states are scaled, and last summed, in order.

uint lane, wave;   // the invocation's, and its wave's number
uint place;        // in the round, of the lane's state ...
uint batch_place;  // ... and of the first state of the wave's batch

// The lane's dimensions of the batch, and of the total.
vec2 o[BATCH];    // of the states, then scaled; where they are leaves, of their nodes in the end
float node_l[BATCH / LEAVES_PER_NODE];
float total_m = EMPTY_M, total_l = 0.0;  // find_powers takes the whole round into total_m
vec2 total_o = vec2(0.0);

shared float sum_power[ROUND];            // 2**(...) of the sum that a state joins: its node's, or the total
#define state_m sum_power                 // before that, in the same words: m of each state
shared float state_power[ROUND];          // of the state itself
shared float state_l[ROUND];              // the state's l times that
shared vec2 node_powers[ROUND / LEAVES_PER_NODE];  // where states are leaves: of (the total, a node that joins it)
shared float wave_m[WAVES];               // the largest m of each wave's batch
shared vec4 passed[WAVE];                 // the total, from wave to wave: (o, o, l, unused)

void find_place() {
    place = gl_LocalInvocationID.x;
    lane = place % WAVE;
    wave = place / WAVE;
    batch_place = wave * BATCH;
}

// Lane = state: to total_m, all powers and state_l.
void find_powers(vec2 ml, bool there, bool leaves) {
    float m = there ? ml.x : EMPTY_M;
    state_m[place] = m;
    barrier();
    uint in_node = lane & (LEAVES_PER_NODE - 1u);
    uint total_end = leaves ? lane - in_node : lane;  // what joins the total (the state, or its node) begins here
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
    vec2 total_powers = merge_powers(total_before, max(node_before, m));
    vec2 powers = leaves ? merge_powers(node_before, m) : total_powers;
    precise float scaled_l = ml.y * powers.y;
    sum_power[place] = there ? powers.x : 1.0;
    state_power[place] = there ? powers.y : 0.0;
    state_l[place] = there ? scaled_l : 0.0;
    if (in_node == LEAVES_PER_NODE - 1u) {  // at a node's last leaf max(node_before, m) is the whole node's m
        node_powers[place / LEAVES_PER_NODE] = total_powers;
    }
    barrier();
}

// Lane = dimensions, as in all that follow: o of every state, scaled.
void scale_states() {
    for (uint j = 0u; j < BATCH; ++j) {
        precise vec2 scaled = o[j] * state_power[batch_place + j];
        o[j] = scaled;
    }
}

// From leaves to nodes: node n of the batch to o[n] and node_l[n], scaled.  The nodes' sums take turns, so that no
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
            node_l[n] = merge_scaled(node_l[n], sum_power[batch_place + j], state_l[batch_place + j]);
            node_o[n] = merge_scaled(node_o[n], sum_power[batch_place + j], o[j]);
        }
    }
    for (uint n = 0u; n < NODES; ++n) {
        float power = node_powers[batch_place / LEAVES_PER_NODE + n].y;
        precise vec2 scaled_o = node_o[n] * power;
        precise float scaled_l = node_l[n] * power;
        o[n] = scaled_o;
        node_l[n] = scaled_l;
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
            float power = node_powers[batch_place / LEAVES_PER_NODE + n].x;
            total_l = merge_scaled(total_l, power, node_l[n]);
            total_o = merge_scaled(total_o, power, o[n]);
        }
    } else {
        for (uint t = 0u; t < BATCH; ++t) {
            total_l = merge_scaled(total_l, sum_power[batch_place + t], state_l[batch_place + t]);
            total_o = merge_scaled(total_o, sum_power[batch_place + t], o[t]);
        }
    }
    passed[lane] = vec4(total_o, total_l, 0.0);
}
