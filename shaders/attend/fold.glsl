// The fold of pass 2: a round of states joins the total.  One state after the other, it would be
//
//     for each state (m, l, o):
//         top = max(total_m, m)
//         total_l = flush(total_l * 2**(total_m - top) + l * 2**(m - top)), and o likewise
//         total_m = top
//
// The powers 2**(...) depend on maxima alone, and total_m is the maximum of all states before.  So find_powers makes
// those of all merges of a round at once, a lane for each state; then states are scaled, and last summed, in order.

uint lane, wave;  // the invocation's, and its wave's number
uint lane_state;         // in the round: the lane's state ...
uint batch;       // ... and the first state of the wave's batch

// The lane's dimensions of the batch's states, then scaled; and of the total.
vec2 o[BATCH];
float total_m = EMPTY_M, total_l = 0.0;  // find_powers takes the whole round into total_m
vec2 total_o = vec2(0.0);

shared float total_power[ROUND];  // 2**(...) of the total that a state joins
#define state_m total_power       // before that, in the same words: m of each state
shared float state_power[ROUND];  // of the state itself
shared float state_l[ROUND];      // the state's l times that
shared float wave_m[WAVES];       // the largest m of each wave's batch
shared vec4 passed[WAVE];         // the total, from wave to wave: (o, o, l, unused)

void find_wave() {
    lane_state = gl_LocalInvocationID.x;
    lane = lane_state % WAVE;
    wave = lane_state / WAVE;
    batch = wave * BATCH;
}

// Lane = state: to total_m, all powers and state_l.
void find_powers(vec2 ml, bool there) {
    float m = there ? ml.x : EMPTY_M;
    state_m[lane_state] = m;
    barrier();
    float before = total_m, batch_m = EMPTY_M;  // maxima
    for (uint t = 0u; t < BATCH; ++t) {
        float other = state_m[batch + t];
        before = max(before, t < lane ? other : EMPTY_M);
        batch_m = max(batch_m, other);
    }
    wave_m[wave] = batch_m;
    barrier();
    for (uint w = 0u; w < WAVES; ++w) {
        float other = wave_m[w];
        before = max(before, w < wave ? other : EMPTY_M);
        total_m = max(total_m, other);
    }
    vec2 powers = merge_powers(before, m);
    precise float scaled_l = ml.y * powers.y;
    total_power[lane_state] = there ? powers.x : 1.0;
    state_power[lane_state] = there ? powers.y : 0.0;
    state_l[lane_state] = there ? scaled_l : 0.0;
    barrier();
}

// Lane = dimensions, as in all that follow: o of every state, scaled.
void scale_states() {
    for (uint j = 0u; j < BATCH; ++j) {
        precise vec2 scaled = o[j] * state_power[batch + j];
        o[j] = scaled;
    }
}

// The total as the wave before, or the last one of the round before, has left it.
void take_total() {
    total_o = passed[lane].xy;
    total_l = passed[lane].z;
}

// The wave's turn: its batch joins the total.  first: there is no total yet.  A single wave keeps it.
void fold_into_total(bool first) {
    if (WAVES > 1u && !first) {
        take_total();
    }
    for (uint t = 0u; t < BATCH; ++t) {
        total_l = merge_scaled(total_l, total_power[batch + t], state_l[batch + t]);
        total_o = merge_scaled(total_o, total_power[batch + t], o[t]);
    }
    passed[lane] = vec4(total_o, total_l, 0.0);
}
