/* What every kernel may use. LANES: work-items of a work-group that share one result (2^n). */

#if LANES > 1
#define LANE ((uint)get_local_id(0))
#define SYNC() barrier(CLK_LOCAL_MEM_FENCE)
#else
#define LANE 0u
#define SYNC()
#endif

/* For functions that are given local memory. PoCL makes local memory of each thread that runs
 * work-groups in the kernel's body alone: where the compiler puts a variable's address into a
 * function of its own, all threads share one. */
#define INLINED static inline __attribute__((always_inline))

#define COUNTING (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

/* The sum of one value a lane, for every lane. scratch: LANES floats of local memory. */
INLINED float lanes_sum(float value, local float *scratch)
{
#if LANES > 1
    SYNC();
    scratch[LANE] = value;
    SYNC();
    for (uint width = LANES / 2; width; width /= 2) {
        if (LANE < width)
            scratch[LANE] += scratch[LANE + width];
        SYNC();
    }
    return scratch[0];
#else
    return value;
#endif
}

INLINED float lanes_max(float value, local float *scratch)
{
#if LANES > 1
    SYNC();
    scratch[LANE] = value;
    SYNC();
    for (uint width = LANES / 2; width; width /= 2) {
        if (LANE < width)
            scratch[LANE] = fmax(scratch[LANE], scratch[LANE + width]);
        SYNC();
    }
    return scratch[0];
#else
    return value;
#endif
}

static inline float sum16(float16 v)
{
    float8 a = v.lo + v.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}

/* The sums of 16 vectors, in their order. */
static inline float16 sums16(const float16 *v)
{
    float16 a[8], b[4], c[2];
#pragma unroll
    for (uint i = 0; i < 8; i++) {
        float16 x = v[2 * i], y = v[2 * i + 1];
        a[i] = (float16)(x.lo, y.lo) + (float16)(x.hi, y.hi);
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        float16 x = a[2 * i], y = a[2 * i + 1];
        b[i] = (float16)(x.s0123, x.s89ab, y.s0123, y.s89ab) +
               (float16)(x.s4567, x.scdef, y.s4567, y.scdef);
    }
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        float16 x = b[2 * i], y = b[2 * i + 1];
        c[i] = (float16)(x.s01, x.s45, x.s89, x.scd, y.s01, y.s45, y.s89, y.scd) +
               (float16)(x.s23, x.s67, x.sab, x.sef, y.s23, y.s67, y.sab, y.sef);
    }
    return (float16)(c[0].even, c[1].even) + (float16)(c[0].odd, c[1].odd);
}

/* 16 numbers from `column` on, zeros past the last of `columns`. */
static inline float16 read16(global const float *x, uint column, uint columns)
{
    if (column + 16 <= columns)
        return vload16(0, x + column);
    float values[16];
    for (uint i = 0; i < 16; i++)
        values[i] = column + i < columns ? x[column + i] : 0.0f;
    return vload16(0, values);
}

static inline void write16(float16 v, global float *out, uint column, uint columns)
{
    if (column + 16 <= columns) {
        vstore16(v, 0, out + column);
        return;
    }
    float values[16];
    vstore16(v, 0, values);
    for (uint i = 0; column + i < columns; i++)
        out[column + i] = values[i];
}

/* bfloat16 is the upper half of a float; rounded to nearest even, NaN stays NaN. */
static inline float from_bf16(ushort bits) { return as_float((uint)bits << 16); }

static inline ushort to_bf16(float value)
{
    uint bits = as_uint(value);
    if (isnan(value))
        return (ushort)(bits >> 16 | 0x40);
    return (ushort)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
