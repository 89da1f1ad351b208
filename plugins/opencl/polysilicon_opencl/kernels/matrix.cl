/* A placed matrix, read as it is stored. The buffer begins with a header of HEADER words that says
 * where its sections are (`packing.py` writes it); offsets are in words from the buffer's start.
 */

#define NUMBER_F32 0
#define NUMBER_F16 1
#define NUMBER_BF16 2
#define NUMBER_SUPER 4   /* added: codes of one byte under a super-scale of that type */
#define NUMBER_NONE 8

enum {
    ROWS, COLUMNS, BLOCKS, CODES, ROW_BYTES, GROUP_SHIFT, GROUPS, OFFSET, TABLE, ORDER,
    SCALE, BIAS = SCALE + 6, HEADER = BIAS + 6
};
enum { KIND, NUMBERS, SUPERS, SUPER_SHIFT, SUPER_COUNT, SUPER_OFFSET };

typedef global const uint *Matrix;

/* What is known of all numbers when a kernel is built need not be asked for every row.
 * NUMBER_KIND: the kind of scales, and of biases if there are any; super-scales then serve 8 groups
 * or more. */
#ifdef NUMBER_KIND
#define KIND_OF(matrix, which) ((uint)NUMBER_KIND)
#else
#define KIND_OF(matrix, which) ((matrix)[(which) + KIND])
#endif

static inline global const uchar *codes_row(Matrix matrix, ulong row)
{
    return (global const uchar *)(matrix + matrix[CODES]) + row * matrix[ROW_BYTES];
}

static inline float number_at(global const void *numbers, uint kind, ulong index)
{
    if (kind == NUMBER_F32)
        return ((global const float *)numbers)[index];
    if (kind == NUMBER_F16)
        return vload_half(index, (global const half *)numbers);
    return from_bf16(((global const ushort *)numbers)[index]);
}

/* Scale or bias (which: SCALE, BIAS) of half block `half_block` of a row. */
static inline float scale_at(Matrix matrix, uint which, ulong row, uint half_block)
{
    uint kind = matrix[which + KIND];
    uint group = half_block >> matrix[GROUP_SHIFT];
    ulong index = row * matrix[GROUPS] + group;
    global const uint *numbers = matrix + matrix[which + NUMBERS];
    if (kind < NUMBER_SUPER)
        return number_at(numbers, kind, index);
    ulong super = row * matrix[which + SUPER_COUNT] + (group >> matrix[which + SUPER_SHIFT]);
    float scale = number_at(matrix + matrix[which + SUPERS], kind - NUMBER_SUPER, super);
    int code = ((global const uchar *)numbers)[index];
    return scale * (float)(code - (int)matrix[which + SUPER_OFFSET]);
}

/* The numbers of 16 groups of a row, from group `first` on, a multiple of 16. What lies behind the
 * row's last group is not to be used. */
static inline float16 numbers16(global const void *numbers, uint kind, ulong index)
{
    if (kind == NUMBER_F32)
        return vload16(0, (global const float *)numbers + index);
    if (kind == NUMBER_F16)
        return vload_half16(0, (global const half *)numbers + index);
    return as_float16(convert_uint16(vload16(0, (global const ushort *)numbers + index)) << 16u);
}

static inline float16 scales16(Matrix matrix, uint which, ulong row, uint first)
{
    const uint kind = KIND_OF(matrix, which);
    const ulong index = row * matrix[GROUPS] + first;
    global const uint *numbers = matrix + matrix[which + NUMBERS];
    if (kind < NUMBER_SUPER)
        return numbers16(numbers, kind, index);
    global const uint *supers = matrix + matrix[which + SUPERS];
    const ulong base = row * matrix[which + SUPER_COUNT];
    const uint shift = matrix[which + SUPER_SHIFT];
    float scales[16];
#ifdef NUMBER_KIND
    const bool wide = true;
#else
    const bool wide = shift >= 3;
#endif
    if (wide) {
        const float low = number_at(supers, kind - NUMBER_SUPER, base + (first >> shift));
        const float high = number_at(supers, kind - NUMBER_SUPER, base + ((first + 8) >> shift));
        vstore8((float8)low, 0, scales);
        vstore8((float8)high, 1, scales);
    } else {
        for (uint i = 0; i < 16; i++)
            scales[i] = number_at(supers, kind - NUMBER_SUPER, base + ((first + i) >> shift));
    }
    const int16 codes = convert_int16(vload16(0, (global const uchar *)numbers + index));
    return vload16(0, scales) * convert_float16(codes - (int)matrix[which + SUPER_OFFSET]);
}
