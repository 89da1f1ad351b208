/* Vectors of keys and values as a KV plane holds them. KV_KIND: 0 f32, 1 f16, 2 bf16, 3 int8.
 * VECTOR: a power of 2, at most 16, that divides the dims. */

#define KV_INT8 3

#if KV_KIND == 0
typedef float Stored;
#elif KV_KIND == 1
typedef half Stored;
#elif KV_KIND == 2
typedef ushort Stored;
#else
typedef char Stored;
#endif

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#if VECTOR == 1
typedef float floatV;
#define LOAD(i, p) ((p)[i])
#define STORE(v, i, p) ((p)[i] = (v))
#else
typedef JOIN(float, VECTOR) floatV;
#define LOAD(i, p) JOIN(vload, VECTOR)(i, p)
#define STORE(v, i, p) JOIN(vstore, VECTOR)(v, i, p)
#endif

static inline float sumV(floatV v)
{
#if VECTOR == 16
    return sum16(v);
#elif VECTOR == 8
    float4 b = v.lo + v.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
#elif VECTOR == 4
    float2 c = v.lo + v.hi;
    return c.x + c.y;
#elif VECTOR == 2
    return v.x + v.y;
#else
    return v;
#endif
}

/* Codes of int8 come without their scale. */
static inline floatV load_stored(uint i, global const Stored *p)
{
#if KV_KIND == 0
    return LOAD(i, p);
#elif KV_KIND == 1 && VECTOR == 1
    return vload_half(i, p);
#elif KV_KIND == 1
    return JOIN(vload_half, VECTOR)(i, p);
#elif VECTOR == 1
#if KV_KIND == 2
    return from_bf16(p[i]);
#else
    return p[i];
#endif
#elif KV_KIND == 2
    return JOIN(as_float, VECTOR)(JOIN(convert_uint, VECTOR)(LOAD(i, p)) << 16u);
#else
    return JOIN(convert_float, VECTOR)(LOAD(i, p));
#endif
}

static inline void store_number(float value, uint i, global Stored *p)
{
#if KV_KIND == 0
    p[i] = value;
#elif KV_KIND == 1
    vstore_half_rte(value, i, p);
#elif KV_KIND == 2
    p[i] = to_bf16(value);
#endif
}

/* The Walsh-Hadamard transform of `KV_DTYPES` over `dim` numbers of local memory, all lanes. */
INLINED void turn(local float *row, uint dim)
{
    const uint block = dim & (~dim + 1);
    SYNC();
    for (uint size = 1; size < block; size *= 2) {
        for (uint i = LANE; i < dim / 2; i += LANES) {
            uint first = i / size * 2 * size + i % size;
            float a = row[first], b = row[first + size];
            row[first] = a + b;
            row[first + size] = a - b;
        }
        SYNC();
    }
    const float factor = 1.0f / sqrt((float)block);
    for (uint i = LANE; i < dim; i += LANES)
        row[i] *= factor;
    SYNC();
}
