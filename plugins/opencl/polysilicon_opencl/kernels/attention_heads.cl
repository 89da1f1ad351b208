/* What attention does before it looks at the context: norms and rotations of queries and keys,
 * storing of keys and values. A work-group takes one head of one token: queries first, then keys,
 * then values. Queries come out scaled, and turned where the keys are. calibrated: scales of fp8
 * planes by key head, of keys, then of values.
 */

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void attention_heads(
    global const float *q, uint q_at, uint q_stride, global const float *k, uint k_at,
    uint k_stride, global const float *v, uint v_at, uint v_stride, global const float *q_norm,
    float q_eps, global const float *k_norm, float k_eps, global const float2 *table, uint pairs,
    uint interleaved, global const int *batch, uint slots_at, float scale, uint heads,
    uint key_heads, global float *queries, global Stored *keys, global Stored *values,
    global float *key_scales, global float *value_scales, global const float *calibrated,
    uint has_calibrated)
{
    local float row[KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM], scratch[LANES];
    const uint token = get_group_id(2);
    uint head = get_group_id(1);
    const bool is_query = head < heads, is_value = head >= heads + key_heads;
    const uint dim = is_value ? VALUE_DIM : KEY_DIM;
    global const float *x;
    if (is_query) {
        x = q + q_at + (ulong)token * q_stride;
    } else if (is_value) {
        head -= heads + key_heads;
        x = v + v_at + (ulong)token * v_stride;
    } else {
        head -= heads;
        x = k + k_at + (ulong)token * k_stride;
    }
    x += head * dim;
    for (uint i = LANE; i < dim; i += LANES)
        row[i] = x[i];

    /* An eps below 0 says that there is no norm. */
    const float eps = is_value ? -1.0f : is_query ? q_eps : k_eps;
    if (eps >= 0) {
        global const float *weight = is_query ? q_norm : k_norm;
        float squares = 0;
        for (uint i = LANE; i < dim; i += LANES)
            squares += row[i] * row[i];
        const float factor = 1.0f / sqrt(lanes_sum(squares, scratch) / dim + eps);
        for (uint i = LANE; i < dim; i += LANES)
            row[i] *= factor * weight[i];
    }
    SYNC();
    if (!is_value) {
        table += (ulong)token * pairs;
        for (uint i = LANE; i < pairs; i += LANES) {
            uint first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + pairs;
            float a = row[first], b = row[second];
            row[first] = a * table[i].x - b * table[i].y;
            row[second] = b * table[i].x + a * table[i].y;
        }
    }
#if KV_KIND == KV_INT8
    turn(row, dim);
#endif
    SYNC();
    if (is_query) {
        for (uint i = LANE; i < dim; i += LANES)
            queries[((ulong)token * heads + head) * dim + i] = row[i] * scale;
        return;
    }
    const ulong place = (ulong)batch[slots_at + token] * key_heads + head;
    global Stored *target = (is_value ? values : keys) + place * dim;
#if KV_QUANTISED
    float largest = 0, wrong = 0;
    for (uint i = LANE; i < dim; i += LANES) {
        largest = fmax(largest, fabs(row[i]));
        if (!isfinite(row[i]))
            wrong = 1;
    }
    float unit = lanes_max(largest, scratch) / LARGEST_CODE;
    wrong = lanes_max(wrong, scratch);
    if (wrong > 0)
        unit = NAN;
    else if (has_calibrated)
        unit = calibrated[is_value ? key_heads + head : head];
    else if (unit < 0x1p-126f)
        unit = 0;
    for (uint i = LANE; i < dim; i += LANES)
        target[i] = to_code(unit > 0 ? row[i] / unit : 0.0f);
    if (LANE == 0)
        (is_value ? value_scales : key_scales)[place] = unit;
#else
    for (uint i = LANE; i < dim; i += LANES)
        store_number(row[i], i, target);
#endif
}
