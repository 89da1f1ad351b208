/* x W^T for few rows of x: a work-group makes OUTPUTS outputs of TOKENS rows, and its lanes stride
 * over the blocks of 32 columns.
 *
 * A work-group does so `rounds` times, one after the other. With stack > 0 the matrix is a stack of
 * experts of `outputs` rows: row t takes number experts[t] of it and row t / stack of x, and TOKENS
 * is 1.
 */

#ifdef WHOLE /* columns fill their blocks */
#define READ_INPUTS(x, column, columns) vload16(0, (x) + (column))
#else
#define READ_INPUTS(x, column, columns) read16(x, column, columns)
#endif

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void product_few(global const float *restrict x, uint x_at, uint x_stride, Matrix matrix,
                 global const float *restrict bias, int bias_at, global float *restrict out,
                 uint tokens, uint outputs, uint out_stride, global const int *experts, uint stack,
                 uint rounds)
{
    local float scratch[LANES];
    const uint columns = matrix[COLUMNS], blocks = matrix[BLOCKS];
    const uint first_token = get_group_id(2) * TOKENS;
    const ulong base = stack ? (ulong)experts[first_token] * outputs : 0;
    global const float *inputs[TOKENS];
#pragma unroll
    for (uint t = 0; t < TOKENS; t++) {
        uint token = min(first_token + t, tokens - 1);
        inputs[t] = x + x_at + (ulong)(stack ? token / stack : token) * x_stride;
    }
    for (uint round = 0; round < rounds; round++) {
        const uint first_output = (get_group_id(1) * rounds + round) * OUTPUTS;
        if (first_output >= outputs)
            break;
        ulong rows[OUTPUTS];
#if LANES == 1
        global const uchar *codes[OUTPUTS];
#endif
        float16 sums[OUTPUTS][TOKENS];
#pragma unroll
        for (uint n = 0; n < OUTPUTS; n++) {
            rows[n] = base + min(first_output + n, outputs - 1);
#if LANES == 1
            codes[n] = codes_row(matrix, rows[n]);
#endif
#pragma unroll
            for (uint t = 0; t < TOKENS; t++)
                sums[n][t] = 0;
        }
#if LANES == 1
        const uint step = held_blocks(matrix);
#else
        const uint step = blocks;
#endif
        for (uint start = 0; start < blocks; start += step) {
#if LANES == 1
            Groups groups[OUTPUTS];
#pragma unroll
            for (uint n = 0; n < OUTPUTS; n++)
                hold_groups(matrix, rows[n], start, &groups[n]);
#endif
            for (uint block = start + LANE; block < min(start + step, blocks); block += LANES) {
                float16 first[TOKENS], second[TOKENS];
#pragma unroll
                for (uint t = 0; t < TOKENS; t++) {
                    first[t] = READ_INPUTS(inputs[t], 32 * block, columns);
                    second[t] = READ_INPUTS(inputs[t], 32 * block + 16, columns);
                }
#pragma unroll
                for (uint n = 0; n < OUTPUTS; n++) {
                    float16 a, b;
#if LANES == 1
                    decode_held(matrix, codes[n], block, start, &groups[n], &a, &b);
#else
                    decode_block(matrix, rows[n], block, &a, &b);
#endif
#pragma unroll
                    for (uint t = 0; t < TOKENS; t++) {
                        sums[n][t] += first[t] * a;
                        sums[n][t] += second[t] * b;
                    }
                }
            }
        }
#pragma unroll
        for (uint n = 0; n < OUTPUTS; n++) {
#pragma unroll
            for (uint t = 0; t < TOKENS; t++) {
                float sum = lanes_sum(sum16(sums[n][t]), scratch);
                uint output = first_output + n, token = first_token + t;
                if (LANE == 0 && output < outputs && token < tokens)
                    out[(ulong)token * out_stride + output] =
                        bias_at >= 0 ? sum + bias[bias_at + output] : sum;
            }
        }
    }
}
