// How float32 numbers enter and leave an operation: magnitudes below 2**-100 become +0, so that neither denormal handling
// nor the sign of zero can show.

float flush(float x) {
    return abs(x) < 7.888609052210118e-31 ? 0.0 : x;
}
