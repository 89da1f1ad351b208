/* Rows of a placed matrix, decoded in blocks of 32 columns.
 *
 * DENSE: 32 numbers. CODE_BITS: planes of 4, 2 and 1 bits as the width needs them, the highest bits
 * first; the plane of p bits is 4 * p bytes, whose byte j holds the codes j, j + 4 * p, j + 8 * p
 * and so on, from its lowest bits up. 8 bits: one byte a code. CODE_TABLE: codes stand for numbers
 * of a table.
 */

#define DENSE_F32 1
#define DENSE_F16 2
#define DENSE_BF16 3

#ifdef CODE_BITS
static inline void read_codes(global const uchar *block, uchar16 *first, uchar16 *second)
{
#if CODE_BITS == 8
    *first = vload16(0, block);
    *second = vload16(1, block);
#else
    uchar16 a = 0, b = 0;
#if CODE_BITS & 4
    uchar16 nibbles = vload16(0, block);
    a = nibbles & (uchar16)15;
    b = nibbles >> (uchar16)4;
    block += 16;
#endif
#if CODE_BITS & 2
    uchar8 pairs = vload8(0, block);
    a = a << (uchar16)2 | (uchar16)(pairs & (uchar8)3, pairs >> (uchar8)2 & (uchar8)3);
    b = b << (uchar16)2 | (uchar16)(pairs >> (uchar8)4 & (uchar8)3, pairs >> (uchar8)6);
    block += 8;
#endif
#if CODE_BITS & 1
    uchar4 bits = vload4(0, block);
    uchar16 four = (uchar16)(bits, bits >> (uchar4)1, bits >> (uchar4)2, bits >> (uchar4)3);
    a = a << (uchar16)1 | four & (uchar16)1;
    b = b << (uchar16)1 | four >> (uchar16)4 & (uchar16)1;
#endif
    *first = a;
    *second = b;
#endif
}
#endif

#ifdef CODE_TABLE
static inline float16 looked_up(global const float *table, uchar16 c)
{
    return (float16)(table[c.s0], table[c.s1], table[c.s2], table[c.s3], table[c.s4], table[c.s5],
                     table[c.s6], table[c.s7], table[c.s8], table[c.s9], table[c.sa], table[c.sb],
                     table[c.sc], table[c.sd], table[c.se], table[c.sf]);
}
#endif

/* 32 values of a row as its codes say: block `block` of what `codes_row` gave. */
static inline void read_block(Matrix matrix, global const uchar *codes, uint block, float16 *first,
                       float16 *second)
{
#if DENSE == DENSE_F32
    *first = vload16(2 * block, (global const float *)codes);
    *second = vload16(2 * block + 1, (global const float *)codes);
#elif DENSE == DENSE_F16
    *first = vload_half16(2 * block, (global const half *)codes);
    *second = vload_half16(2 * block + 1, (global const half *)codes);
#elif DENSE == DENSE_BF16
    global const ushort *bits = (global const ushort *)codes + 32 * block;
    *first = as_float16(convert_uint16(vload16(0, bits)) << 16u);
    *second = as_float16(convert_uint16(vload16(1, bits)) << 16u);
#else
    uchar16 a, b;
    read_codes(codes + block * (4 * CODE_BITS), &a, &b);
#ifdef CODE_TABLE
    global const float *table = (global const float *)(matrix + matrix[TABLE]);
    *first = looked_up(table, a);
    *second = looked_up(table, b);
#else
    *first = convert_float16(a);
    *second = convert_float16(b);
#endif
#endif
}

/* The 32 values themselves, in the order of operations that their encoding states. */
static inline void decode_block(Matrix matrix, ulong row, uint block, float16 *first,
                                float16 *second)
{
    read_block(matrix, codes_row(matrix, row), block, first, second);
#ifndef DENSE
    const float16 offset = (float)(int)matrix[OFFSET];
    *first = (*first - offset) * scale_at(matrix, SCALE, row, 2 * block);
    *second = (*second - offset) * scale_at(matrix, SCALE, row, 2 * block + 1);
    if (matrix[BIAS + KIND] != NUMBER_NONE) {
        *first += scale_at(matrix, BIAS, row, 2 * block);
        *second += scale_at(matrix, BIAS, row, 2 * block + 1);
    }
#endif
}

/* Scales and biases of 32 groups, as a work-item that walks along a row keeps them. A value is
 * `scale * code + shift`: the offset of codes is in the shift. */
typedef struct {
    float scales[32], shifts[32];
} Groups;

/* Blocks whose groups are held at a time, and the number of the first group of those from a block
 * on. */
static inline uint held_blocks(Matrix matrix) { return 16u << min(matrix[GROUP_SHIFT], 20u); }

static inline void hold_groups(Matrix matrix, ulong row, uint block, Groups *groups)
{
#ifndef DENSE
    const uint first = (2 * block) >> matrix[GROUP_SHIFT];
    for (uint i = 0; i < 2 && first + 16 * i < matrix[GROUPS]; i++) {
        const float16 scales = scales16(matrix, SCALE, row, first + 16 * i);
        float16 shifts = scales * -(float)(int)matrix[OFFSET];
        if (matrix[BIAS + KIND] != NUMBER_NONE)
            shifts += scales16(matrix, BIAS, row, first + 16 * i);
        vstore16(scales, i, groups->scales);
        vstore16(shifts, i, groups->shifts);
    }
#endif
}

/* The 32 values of a block; groups: those held from `held_from` on. */
static inline void decode_held(Matrix matrix, global const uchar *codes, uint block, uint held_from,
                        const Groups *groups, float16 *first, float16 *second)
{
    read_block(matrix, codes, block, first, second);
#ifndef DENSE
    const uint low = (2 * (block - held_from)) >> matrix[GROUP_SHIFT];
    const uint high = (2 * (block - held_from) + 1) >> matrix[GROUP_SHIFT];
    *first = *first * groups->scales[low] + groups->shifts[low];
    *second = *second * groups->scales[high] + groups->shifts[high];
#endif
}
