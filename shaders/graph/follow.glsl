// The operation that follows another in its dispatch, one of FOLLOW_OPS. It needs numbers.glsl.

bool reads(uint op) {
    return op == FOLLOW_OP_MUL || op == FOLLOW_OP_ADD;
}

float followed(uint op, float v, float number) {
    precise float product = v * number, sum = v + number;
    return op == FOLLOW_OP_NONE ? v : flush(op == FOLLOW_OP_ADD ? sum : product);
}
