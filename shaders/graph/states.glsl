// Rows of recurrent states in registers, and sums along them.
//
// A workgroup of 32 has ROWS rows of SIZE elements: LANES neighboring lanes share OWN neighboring rows. Lane `part` of
// a row has the row's elements i with i / 4 mod LANES = part, in vectors of four. Elements after the row's end are 0.

const uint LANES = LANES_OF_STATE(SIZE);
const uint VECTORS = (SIZE + 4u * LANES - 1u) / (4u * LANES);
const uint ROWS = 32u / LANES * OWN;
const bool WHOLE = SIZE % (4u * LANES) == 0u;
shared float partial[OWN * 32u];

uint part = gl_LocalInvocationID.x % LANES;

// Number, in the workgroup, of the lane's row `lane_row`.
uint row_of(uint lane_row) {
    return gl_LocalInvocationID.x / LANES * OWN + lane_row;
}

// Where the lane's vector m begins in a row.
uint element(uint m) {
    return 4u * (m * LANES + part);
}

float above(float x, float least) {
    return abs(x) < least ? 0.0 : x;
}

void flush_row(inout vec4 row[VECTORS]) {
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        row[m] = mix(row[m], vec4(0.0), lessThan(abs(row[m]), vec4(STATE_MIN)));
    }
}

// The lane's vectors of a row that begins at element `begin` of a buffer.
#define LOAD_ROW(vectors, buffer, begin) \
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) { \
        [[unroll]] for (uint i = 0u; i < 4u; ++i) { \
            vectors[m][i] = WHOLE || element(m) + i < SIZE ? buffer[(begin) + element(m) + i] : 0.0; \
        } \
    }

#define STORE_ROW(vectors, buffer, begin) \
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) { \
        [[unroll]] for (uint i = 0u; i < 4u; ++i) { \
            if (WHOLE || element(m) + i < SIZE) { \
                buffer[(begin) + element(m) + i] = vectors[m][i]; \
            } \
        } \
    }

vec4 multiply(vec4 a, vec4 b) {
    precise vec4 product = a * b;
    return product;
}

vec4 add(vec4 a, vec4 b) {
    precise vec4 sum = a + b;
    return sum;
}

// The lane's part of the sum of a * b along a row.
float dot_of(vec4 a[VECTORS], vec4 b[VECTORS]) {
    precise float sum = 0.0;
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        vec4 product = multiply(a[m], b[m]);
        sum = sum + product.x;
        sum = sum + product.y;
        sum = sum + product.z;
        sum = sum + product.w;
    }
    return sum;
}

// Add the lanes' parts of the sums of rows, halves of the parts first.
void add_parts(inout float sum[OWN]) {
    barrier();
    [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
        partial[lane_row * 32u + gl_LocalInvocationID.x] = sum[lane_row];
    }
    barrier();
    [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
        float parts[LANES];
        [[unroll]] for (uint i = 0u; i < LANES; ++i) {
            parts[i] = partial[lane_row * 32u + gl_LocalInvocationID.x - part + i];
        }
        [[unroll]] for (uint apart = LANES / 2u; apart > 0u; apart /= 2u) {
            [[unroll]] for (uint i = 0u; i < apart; ++i) {
                precise float both = parts[i] + parts[i + apart];
                parts[i] = both;
            }
        }
        sum[lane_row] = parts[0];
    }
}
