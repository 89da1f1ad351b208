/* RMS norm (centred = 0) or layer norm of rows, after adding a residual: one work-group a row. */

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void normalize_rows(global const float *x, uint x_at, uint x_stride, global const float *residual,
               uint residual_at, uint residual_stride, uint added, global const float *weight,
               global const float *bias, uint biased, float eps, uint centred, uint columns,
               global float *out, global float *hidden)
{
    local float scratch[LANES];
    const uint row = get_global_id(1);
    x += x_at + (ulong)row * x_stride;
    residual += residual_at + (ulong)row * residual_stride;
    out += (ulong)row * columns;
    if (added) {
        hidden += (ulong)row * columns;
        for (uint c = 16 * LANE; c < columns; c += 16 * LANES)
            write16(read16(x, c, columns) + read16(residual, c, columns), hidden, c, columns);
        x = hidden;
    }
    float mean = 0;
    if (centred) {
        float16 total = 0;
        for (uint c = 16 * LANE; c < columns; c += 16 * LANES)
            total += read16(x, c, columns);
        mean = lanes_sum(sum16(total), scratch) / columns;
    }
    float16 squares = 0;
    for (uint c = 16 * LANE; c < columns; c += 16 * LANES) {
        float16 v = read16(x, c, columns) - mean;
        if (c + 16 > columns) /* what was read as 0 past the end is not to count as -mean */
            v = select((float16)0, v, COUNTING < (int16)(int)(columns - c));
        squares += v * v;
    }
    const float sum = lanes_sum(sum16(squares), scratch);
    const float factor = 1.0f / sqrt(sum / columns + eps);
    for (uint c = 16 * LANE; c < columns; c += 16 * LANES) {
        float16 v = (read16(x, c, columns) - mean) * factor * read16(weight, c, columns);
        if (biased)
            v += read16(bias, c, columns);
        write16(v, out, c, columns);
    }
}
