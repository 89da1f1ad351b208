/* Rotary embedding. The step's angles are worked out once: `table` holds (cosine, sine) for each
 * token and pair. */

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void rope_table(global const int *positions, uint positions_at, global const float *frequencies,
                uint pairs, float scale, global float2 *table)
{
    const uint token = get_global_id(1);
    const float position = positions[positions_at + token];
    for (uint pair = LANE; pair < pairs; pair += LANES) {
        float cosine, sine = sincos(position * frequencies[pair], &cosine);
        table[(ulong)token * pairs + pair] = (float2)(cosine * scale, sine * scale);
    }
}

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void rope(global const float *x, uint x_at, uint x_stride, global const float2 *table, uint pairs,
          uint interleaved, uint heads, uint dim, global float *out)
{
    const uint head = get_group_id(1), token = get_group_id(2);
    x += x_at + (ulong)token * x_stride + head * dim;
    out += ((ulong)token * heads + head) * dim;
    table += (ulong)token * pairs;
    for (uint i = LANE; i < pairs; i += LANES) {
        uint a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + pairs;
        out[a] = x[a] * table[i].x - x[b] * table[i].y;
        out[b] = x[b] * table[i].x + x[a] * table[i].y;
    }
    for (uint i = 2 * pairs + LANE; i < dim; i += LANES)
        out[i] = x[i];
}
