/* Low-rank adapters: slot s of a target holds for each of its parts A `[rank, inputs]`, and for all
 * its outputs rows of B `[outputs, rank]`; ranks below the pool's are filled up with zeros. */

/* inner[t][part * rank + r] = x[t] . A[slot of t][part][r]. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void lora_down(global const float *x, uint x_at, uint x_stride, global const int *batch,
               uint slots_at, global const float *down, uint inputs, uint ranks,
               global float *inner)
{
    local float scratch[LANES];
    const uint token = get_group_id(2), rank = get_group_id(1);
    const uint slot = batch[slots_at + token];
    if (!slot)
        return;
    x += x_at + (ulong)token * x_stride;
    down += ((ulong)slot * ranks + rank) * inputs;
    float16 sum = 0;
    for (uint c = 16 * LANE; c < inputs; c += 16 * LANES)
        sum += read16(x, c, inputs) * read16(down, c, inputs);
    const float value = lanes_sum(sum16(sum), scratch);
    if (LANE == 0)
        inner[token * ranks + rank] = value;
}

/* out[t][n] += inner[t] . B[slot of t][n], for the outputs of one part, which begin at `first`. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void lora_up(global const float *inner, uint inner_at, uint ranks, global const int *batch,
             uint slots_at, global const float *up, uint rank, uint all_outputs, uint first,
             uint outputs, global float *out, uint out_at, uint out_stride)
{
    const uint token = get_group_id(2), begin = get_group_id(1) * SEGMENT;
    const uint end = min(begin + SEGMENT, outputs), slot = batch[slots_at + token];
    if (!slot)
        return;
    inner += inner_at + (ulong)token * ranks;
    up += ((ulong)slot * all_outputs + first) * rank;
    out += out_at + (ulong)token * out_stride;
    for (uint n = begin + LANE; n < end; n += LANES) {
        float16 sum = 0;
        for (uint r = 0; r < rank; r += 16)
            sum += read16(inner, r, rank) * read16(up + (ulong)n * rank, r, rank);
        out[n] += sum16(sum);
    }
}
