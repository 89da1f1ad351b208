/* What the device does at most, of nothing but reading and of nothing but multiplying. WIDTH: of
 * its vectors. What is computed is of no use, and written so that it is computed. */

#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)
#define WORDS JOIN(uint, WIDTH)
#define FLOATS JOIN(float, WIDTH)
#define LOAD JOIN(vload, WIDTH)
#define STORE JOIN(vstore, WIDTH)

/* Independent, to hide how long an operation takes. */
#define SUMS 12

/* A work-group reads `each` times as many words as its lanes' vectors have, one after another. */
kernel void read_words(global const uint *words, uint each, global uint *out)
{
    uint group = get_group_id(1);
    global const uint *from = words + (ulong)group * each * LANES * WIDTH;
    WORDS sum = 0;
    for (uint i = 0; i < each; i++)
        sum ^= LOAD((ulong)i * LANES + LANE, from);
    uint parts[WIDTH];
    STORE(sum, 0, parts);
    uint all = 0;
    for (uint i = 0; i < WIDTH; i++)
        all ^= parts[i];
    out[group * LANES + LANE] = all;
}

/* Each lane multiplies and adds `steps` times in each of its sums. */
kernel void multiply(uint steps, float factor, global float *out)
{
    FLOATS sums[SUMS], all = 0.0f;
#pragma unroll
    for (uint i = 0; i < SUMS; i++)
        sums[i] = (float)(LANE + i);
    for (uint step = 0; step < steps; step++) {
#pragma unroll
        for (uint i = 0; i < SUMS; i++)
            sums[i] = mad(sums[i], (FLOATS)factor, (FLOATS)factor);
    }
#pragma unroll
    for (uint i = 0; i < SUMS; i++)
        all += sums[i];
    float parts[WIDTH], total = 0.0f;
    STORE(all, 0, parts);
    for (uint i = 0; i < WIDTH; i++)
        total += parts[i];
    out[get_group_id(1) * LANES + LANE] = total;
}
