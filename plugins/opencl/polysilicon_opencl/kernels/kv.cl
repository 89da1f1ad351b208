/* Vectors of keys and values as a KV plane holds them. KV_KIND: 0 f32, 1 f16, 2 bf16, 3 int8,
 * 4 fp8_e4m3. VECTOR: a power of 2, at most 16, that divides the dims. */

#define KV_INT8 3
#define KV_FP8 4
/* Whether codes stand there, which scales belong to. */
#define KV_QUANTISED (KV_KIND >= KV_INT8)

#if KV_KIND == 0
typedef float Stored;
#elif KV_KIND == 1
typedef half Stored;
#elif KV_KIND == 2
typedef ushort Stored;
#elif KV_KIND == KV_INT8
typedef char Stored;
#else
typedef uchar Stored;
#endif

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#if VECTOR == 1
#define OF_WIDTH(name) name
typedef float floatV;
#define LOAD(i, p) ((p)[i])
#define STORE(v, i, p) ((p)[i] = (v))
#else
#define OF_WIDTH(name) JOIN(name, VECTOR)
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

#if KV_KIND == KV_FP8
typedef OF_WIDTH(uint) uintV;

/* What codes of e4m3fn stand for, NaN aside. A device may take float's subnormals for zeros, so
 * those of e4m3 are made of normal numbers: 2^-7 (1 + m / 8), doubled, less 2^-6. */
static inline floatV from_e4m3(uintV codes)
{
    const uintV size = codes & 0x7fu;
    const floatV normal = OF_WIDTH(as_float)((size << 20u) + (120u << 23u));
    const floatV subnormal = 2.0f * normal - 0x1p-6f;
    const uintV magnitude = OF_WIDTH(as_uint)(size < 8u ? subnormal : normal);
    return OF_WIDTH(as_float)(magnitude | (codes & 0x80u) << 24u);
}
#endif

/* Codes come without their scale. */
static inline floatV load_stored(uint i, global const Stored *p)
{
#if KV_KIND == 0
    return LOAD(i, p);
#elif KV_KIND == 1
    return OF_WIDTH(vload_half)(i, p);
#elif KV_KIND == 2
    return OF_WIDTH(as_float)(OF_WIDTH(convert_uint)(LOAD(i, p)) << 16u);
#elif KV_KIND == KV_INT8
    return OF_WIDTH(convert_float)(LOAD(i, p));
#else
    return from_e4m3(OF_WIDTH(convert_uint)(LOAD(i, p)));
#endif
}

#if KV_KIND == KV_INT8
#define LARGEST_CODE 127.0f
static inline Stored to_code(float value) { return convert_char_sat_rte(value); }
#elif KV_KIND == KV_FP8
#define LARGEST_CODE 448.0f
/* e4m3fn of a number, at most 448 and at least -448, rounded to nearest even. */
static inline Stored to_code(float value)
{
    const uint sign = as_uint(value) >> 24 & 0x80;
    const uint bits = min(as_uint(value) & 0x7fffffff, as_uint(LARGEST_CODE));
    const uint normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const uint subnormal = convert_uint_rte(as_float(bits) * 512.0f);
    return (uchar)(sign | (bits < as_uint(0x1p-6f) ? subnormal : normal));
}
#endif

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
