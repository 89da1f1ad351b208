/* x W^T for many rows of x on a GPU: SIDE x SIDE work-items make 4 * SIDE tokens by 4 * SIDE
 * outputs, 4 by 4 each, from tiles of 32 columns in local memory.
 */

#define TILE (4 * SIDE)
#define PITCH 36   /* a tile's row in floats: 32, and 4 so that rows start in other banks */

kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1)))
void product_tiled(global const float *restrict x, uint x_at, uint x_stride, Matrix matrix,
                   global const float *restrict bias, int bias_at, global float *restrict out,
                   uint tokens, uint outputs, uint out_stride)
{
    local float inputs[TILE * PITCH], weights[TILE * PITCH];
    const uint columns = matrix[COLUMNS], blocks = matrix[BLOCKS];
    const uint lx = get_local_id(0), ly = get_local_id(1), item = ly * SIDE + lx;
    const uint first_output = get_group_id(0) * TILE, first_token = get_group_id(1) * TILE;
    float4 sums[4][4];
#pragma unroll
    for (uint t = 0; t < 4; t++) {
#pragma unroll
        for (uint n = 0; n < 4; n++)
            sums[t][n] = 0;
    }
    for (uint block = 0; block < blocks; block++) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint n = item; n < TILE; n += SIDE * SIDE) {
            float16 a, b;
            decode_block(matrix, min(first_output + n, outputs - 1), block, &a, &b);
            vstore16(a, 0, weights + n * PITCH);
            vstore16(b, 0, weights + n * PITCH + 16);
        }
        for (uint half_row = item; half_row < 2 * TILE; half_row += SIDE * SIDE) {
            uint token = min(first_token + half_row / 2, tokens - 1), side = half_row % 2 * 16;
            float16 a = read16(x + x_at + (ulong)token * x_stride, 32 * block + side, columns);
            vstore16(a, 0, inputs + half_row / 2 * PITCH + side);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint column = 0; column < 32; column += 4) {
            float4 a[4], b[4];
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                a[i] = vload4(0, inputs + (ly + i * SIDE) * PITCH + column);
                b[i] = vload4(0, weights + (lx + i * SIDE) * PITCH + column);
            }
#pragma unroll
            for (uint t = 0; t < 4; t++) {
#pragma unroll
                for (uint n = 0; n < 4; n++)
                    sums[t][n] += a[t] * b[n];
            }
        }
    }
    for (uint t = 0; t < 4; t++)
        for (uint n = 0; n < 4; n++) {
            uint token = first_token + ly + t * SIDE, output = first_output + lx + n * SIDE;
            if (token < tokens && output < outputs) {
                float2 pair = sums[t][n].lo + sums[t][n].hi;
                float sum = pair.x + pair.y;
                out[(ulong)token * out_stride + output] =
                    bias_at >= 0 ? sum + bias[bias_at + output] : sum;
            }
        }
}
