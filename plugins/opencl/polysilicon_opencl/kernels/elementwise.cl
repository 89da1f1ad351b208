/* What is computed element by element: `kind` says what. A work-group makes SEGMENT columns of one
 * row of the result, which is contiguous. */

enum { ADD, SCALE_BY, SOFTCAP, SILU, GELU, GELU_TANH, RELU, SWIGLU_OAI };

static inline float16 sigmoid(float16 x) { return 1.0f / (1.0f + exp(-x)); }

static inline float16 activated(uint kind, float16 gate, float16 up)
{
    float16 cubic;
    switch (kind) {
    case SILU:
        return gate * sigmoid(gate) * up;
    case GELU:
        return 0.5f * gate * (1.0f + erf(gate * 0.70710678f)) * up;
    case GELU_TANH:
        cubic = gate + 0.044715f * gate * gate * gate;
        return 0.5f * gate * (1.0f + tanh(0.7978845608f * cubic)) * up;
    case RELU:
        return fmax(gate, 0.0f) * up;
    default:
        gate = fmin(gate, 7.0f);
        up = clamp(up, -7.0f, 7.0f);
        return (up + 1.0f) * gate * sigmoid(1.702f * gate);
    }
}

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void elementwise(uint kind, global const float *a, uint a_at, uint a_stride, global const float *b,
                 uint b_at, uint b_stride, float factor, uint columns, global float *out)
{
    const uint row = get_global_id(2), begin = get_group_id(1) * SEGMENT;
    const uint end = min(begin + SEGMENT, columns);
    a += a_at + (ulong)row * a_stride;
    b += b_at + (ulong)row * b_stride;
    out += (ulong)row * columns;
    for (uint column = begin + 16 * LANE; column < end; column += 16 * LANES) {
        float16 x = read16(a, column, columns), y;
        switch (kind) {
        case ADD:
            y = x + read16(b, column, columns);
            break;
        case SCALE_BY:
            y = x * factor;
            break;
        case SOFTCAP:
            y = factor * tanh(x / factor);
            break;
        default:
            y = activated(kind, x, read16(b, column, columns));
        }
        write16(y, out, column, columns);
    }
}
