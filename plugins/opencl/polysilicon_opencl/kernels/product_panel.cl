/* x W^T for many rows of x on a processor with vector registers and caches: a work-group is one
 * work-item. It decodes a panel of PANEL_OUTPUTS rows of W, as many columns as fit, and multiplies
 * all of its tokens with it, 4 tokens by 4 outputs at a time.
 */

kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void product_panel(global const float *restrict x, uint x_at, uint x_stride, Matrix matrix,
                   global const float *restrict bias, int bias_at, global float *restrict out,
                   uint tokens, uint outputs, uint out_stride)
{
    local float panel[PANEL_OUTPUTS * PANEL_COLUMNS];
    const uint columns = matrix[COLUMNS], blocks = matrix[BLOCKS];
    const uint first_output = get_group_id(1) * PANEL_OUTPUTS;
    const uint first_token = get_group_id(2) * PANEL_TOKENS;
    const uint last_token = min(first_token + PANEL_TOKENS, tokens);
    const uint panels = (blocks + PANEL_COLUMNS / 32 - 1) / (PANEL_COLUMNS / 32);
    const uint step = (blocks + panels - 1) / panels, held = held_blocks(matrix);
    for (uint start = 0; start < blocks; start += step) {
        const uint count = min(step, blocks - start);
        for (uint n = 0; n < PANEL_OUTPUTS; n++) {
            const ulong row = min(first_output + n, outputs - 1);
            global const uchar *codes = codes_row(matrix, row);
            local float *values = panel + n * PANEL_COLUMNS;
            Groups groups;
            uint held_from = 0, held_until = 0;
            for (uint block = start; block < start + count; block++) {
                if (block >= held_until) {
                    held_from = block & ~(held - 1);
                    held_until = held_from + held;
                    hold_groups(matrix, row, held_from, &groups);
                }
                float16 a, b;
                decode_held(matrix, codes, block, held_from, &groups, &a, &b);
                vstore16(a, 2 * (block - start), values);
                vstore16(b, 2 * (block - start) + 1, values);
            }
        }
        const uint begin = 32 * start, width = min(32 * count, columns - begin);
        const uint whole = width / 16 * 16;
        for (uint token = first_token; token < last_token; token += 4) {
            global const float *inputs[4];
#pragma unroll
            for (uint t = 0; t < 4; t++)
                inputs[t] = x + x_at + (ulong)min(token + t, tokens - 1) * x_stride + begin;
            for (uint n = 0; n < PANEL_OUTPUTS; n += 4) {
                local const float *weights = panel + n * PANEL_COLUMNS;
                float16 sums[16];
#pragma unroll
                for (uint i = 0; i < 16; i++)
                    sums[i] = 0;
                for (uint column = 0; column < whole; column += 16) {
                    float16 a[4];
#pragma unroll
                    for (uint t = 0; t < 4; t++)
                        a[t] = vload16(0, inputs[t] + column);
#pragma unroll
                    for (uint j = 0; j < 4; j++) {
                        float16 b = vload16(0, weights + j * PANEL_COLUMNS + column);
#pragma unroll
                        for (uint t = 0; t < 4; t++)
                            sums[4 * t + j] += a[t] * b;
                    }
                }
                if (whole < width) {
#pragma unroll
                    for (uint t = 0; t < 4; t++) {
                        float16 a = read16(inputs[t], whole, width);
#pragma unroll
                        for (uint j = 0; j < 4; j++)
                            sums[4 * t + j] += a * vload16(0, weights + j * PANEL_COLUMNS + whole);
                    }
                }
                float result[16];
                vstore16(sums16(sums), 0, result);
                for (uint t = 0; t < 4 && token + t < last_token; t++)
                    for (uint j = 0; j < 4 && first_output + n + j < outputs; j++) {
                        uint output = first_output + n + j;
                        global float *target = out + (ulong)(token + t) * out_stride + output;
                        float before = bias_at >= 0 ? bias[bias_at + output] : 0.0f;
                        if (start)
                            before = *target;
                        *target = before + result[4 * t + j];
                    }
            }
        }
    }
}
