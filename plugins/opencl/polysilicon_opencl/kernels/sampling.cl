/* Drawing tokens from logits, as `SamplingBatch` and `polysilicon.sampling.philox` specify. A row
 * of the vocabulary is cut into parts: a work-group takes a part, then one takes what they found.
 *
 * A row's settings are words, some of them the bits of a float. `cut` adds the least score that is
 * kept, and among those equal to it the first id that is not.
 */

enum { DRAW, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH, CHOICE, POSITION,
       LEAST, TIE_END, SETTINGS };

/* NaN counts as -inf, +inf as the largest finite number. */
static inline float16 cleaned16(float16 x)
{
    x = select(x, (float16)-INFINITY, isnan(x));
    return fmin(x, (float16)FLT_MAX);
}

static inline float cleaned(float x) { return isnan(x) ? -INFINITY : fmin(x, FLT_MAX); }

static inline float max16(float16 v)
{
    float8 a = fmax(v.lo, v.hi);
    float4 b = fmax(a.lo, a.hi);
    return fmax(fmax(b.x, b.y), fmax(b.z, b.w));
}

/* The larger of two candidates, the lower id among equals. */
static inline bool beats(float value, uint id, float other, uint other_id)
{
    return value > other || (value == other && id < other_id);
}

/* The best candidate of the lanes, for every lane. */
INLINED void lanes_best(float *value, uint *id, local float *values, local uint *ids)
{
#if LANES > 1
    SYNC();
    values[LANE] = *value;
    ids[LANE] = *id;
    SYNC();
    for (uint width = LANES / 2; width; width /= 2) {
        const uint other = LANE + width;
        if (LANE < width && beats(values[other], ids[other], values[LANE], ids[LANE])) {
            values[LANE] = values[other];
            ids[LANE] = ids[other];
        }
        SYNC();
    }
    *value = values[0];
    *id = ids[0];
    SYNC();
#endif
}

/* The largest logit of each part and where it first stands. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void part_largest(global const float *logits, uint vocabulary, global float *values,
                  global uint *ids)
{
    local float local_values[LANES];
    local uint local_ids[LANES];
    const uint part = get_group_id(1), row = get_group_id(2), begin = part * PART;
    const uint end = min(begin + PART, vocabulary);
    logits += (ulong)row * vocabulary;
    float16 most = -INFINITY;
    for (uint i = begin + 16 * LANE; i + 16 <= end; i += 16 * LANES)
        most = fmax(most, cleaned16(vload16(0, logits + i)));
    float best = max16(most);
    const uint rest = begin + (end - begin) / 16 * 16;
    for (uint i = rest + LANE; i < end; i += LANES)
        best = fmax(best, cleaned(logits[i]));
    best = lanes_max(best, local_values);
    uint id = end;
    for (uint i = begin + 16 * LANE; i < end && id == end; i += 16 * LANES)
        for (uint j = i; j < min(i + 16, end); j++)
            if (cleaned(logits[j]) == best) {
                id = j;
                break;
            }
    lanes_best(&best, &id, local_values, local_ids);
    if (LANE == 0) {
        values[row * get_num_groups(1) + part] = best;
        ids[row * get_num_groups(1) + part] = id;
    }
}

/* The best of a row's parts: its value into largest[row], its id into tokens[row]. A row without
 * any value gives id 0. */
kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void row_largest(global const float *values, global const uint *ids, uint parts,
                 global float *largest, global int *tokens)
{
    const uint row = get_group_id(1);
    values += row * parts;
    ids += row * parts;
    float best = values[0];
    uint id = ids[0];
    for (uint part = 1; part < parts; part++)
        if (values[part] > best) {
            best = values[part];
            id = ids[part];
        }
    largest[row] = best;
    tokens[row] = best == -INFINITY ? 0 : (int)id;
}

/* Numbers whose order as integers is that of the floats. */
static inline uint ordered(float x)
{
    uint bits = as_uint(x == 0 ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float unordered(uint key)
{
    return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* Scores of 16 ids from i on: how far their logits are below the largest, over the temperature. */
static inline float16 scores16(global const float *logits, uint i, uint vocabulary, float largest,
                        float temperature)
{
    float16 x = cleaned16(read16(logits, i, vocabulary));
    if (i + 16 > vocabulary)
        x = select((float16)-INFINITY, x, COUNTING < (int16)(int)(vocabulary - i));
    return (x - largest) / temperature;
}

/* One row's scores, of which only those from `floor` on count. */
typedef struct {
    global const float *logits;
    uint vocabulary;
    float largest, temperature, floor;
} Row;

static inline float score(const Row *row, uint id)
{
    return (cleaned(row->logits[id]) - row->largest) / row->temperature;
}

/* What the scores from `least` on come to: their number, or the sum of their exponentials. */
INLINED float above(const Row *row, float least, bool weighed, local float *scratch)
{
    float16 sum = 0;
    least = fmax(fmax(least, row->floor), -FLT_MAX);
    for (uint i = 16 * LANE; i < row->vocabulary; i += 16 * LANES) {
        float16 x = scores16(row->logits, i, row->vocabulary, row->largest, row->temperature);
        int16 counted = x >= least;
        if (any(counted))
            sum += select((float16)0, weighed ? exp(x) : (float16)1, counted);
    }
    return lanes_sum(sum16(sum), scratch);
}

/* Raises the row's floor so that the `amount` largest scores stay, or (weighed) the fewest that
 * weigh that share of all that are left. tie_end: of the ids at the floor, the first that is left
 * out. */
INLINED void narrow(Row *row, uint *tie_end, bool weighed, float amount,
                    local float *scratch)
{
    /* Weight of ids at the floor that are left out already. */
    float surplus = 0;
    for (uint i = *tie_end + LANE; i < row->vocabulary; i += LANES)
        surplus += score(row, i) == row->floor;
    surplus = lanes_sum(surplus, scratch) * (weighed ? exp(row->floor) : 1.0f);
    float wanted = amount;
    if (weighed)
        wanted *= above(row, row->floor, true, scratch) - surplus;
    /* The largest edge such that the scores from there on come to what is wanted. */
    uint low = ordered(-FLT_MAX), high = ordered(0.0f);
    while (low < high) {
        const uint middle = low + (high - low + 1) / 2;
        const float edge = unordered(middle);
        const float sum = above(row, edge, weighed, scratch) - (edge <= row->floor ? surplus : 0);
        if (sum >= wanted)
            low = middle;
        else
            high = middle - 1;
    }
    const float edge = unordered(low), next = unordered(low + 1);
    float missing = wanted - above(row, next, weighed, scratch);
    if (weighed)
        missing /= exp(edge);
    missing = fmax(ceil(missing), 1.0f);
    const float equal = above(row, edge, false, scratch) - above(row, next, false, scratch);
    const uint limit = edge == row->floor ? *tie_end : row->vocabulary;
    *tie_end = limit;
    if (missing < equal) {
        uint found = 0, id = 0;
        for (; id < limit && found < missing; id++)
            found += score(row, id) == edge;
        *tie_end = id;
    }
    row->floor = edge;
}

/* Where the scores of a row end that are kept: the least of them, and among equals the first id
 * left out. First the top_k largest stay, then of these the fewest that weigh top_p of them all. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void cut(global const float *logits, uint vocabulary, global const float *largests,
         global uint *settings)
{
    local float scratch[LANES];
    const uint number = get_group_id(1);
    settings += number * SETTINGS;
    const uint top_k = settings[TOP_K];
    const float top_p = as_float(settings[TOP_P]);
    Row row = {logits + (ulong)number * vocabulary, vocabulary, largests[number],
               as_float(settings[TEMPERATURE]), -INFINITY};
    const bool drawn = settings[DRAW] && row.temperature > 0 && row.largest > -INFINITY;
    uint tie_end = vocabulary;
    if (drawn && top_k > 0 && top_k < vocabulary)
        narrow(&row, &tie_end, false, top_k, scratch);
    if (drawn && top_p < 1)
        narrow(&row, &tie_end, true, top_p, scratch);
    if (LANE == 0) {
        settings[LEAST] = as_uint(row.floor);
        settings[TIE_END] = tie_end;
    }
}

/* Philox4x32-10 of four counters that differ in their first words. */
static inline void philox(uint4 c0, uint c1, uint c2, uint2 key, uint4 *words)
{
    uint4 a = c0, b = c1, c = c2, d = 0;
    for (uint round = 0; round < 10; round++) {
        const uint4 high0 = mul_hi(a, (uint4)0xD2511F53u), low0 = a * 0xD2511F53u;
        const uint4 high1 = mul_hi(c, (uint4)0xCD9E8D57u), low1 = c * 0xCD9E8D57u;
        a = high1 ^ b ^ key.x;
        b = low1;
        c = high0 ^ d ^ key.y;
        d = low0;
        key += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

/* The noise of 16 ids from `id` on, a multiple of 4. */
static inline float16 gumbel16(uint id, uint choice, uint position, uint2 key)
{
    uint4 w[4];
    philox(id / 4 + (uint4)(0, 1, 2, 3), choice, position, key, w);
    const uint16 words = (uint16)(w[0].x, w[1].x, w[2].x, w[3].x, w[0].y, w[1].y, w[2].y, w[3].y,
                                  w[0].z, w[1].z, w[2].z, w[3].z, w[0].w, w[1].w, w[2].w, w[3].w);
    const float16 half_steps = convert_float16_rte(words) + 0.5f;
    return -log(-log1p(-fmin(half_steps * 0x1p-32f, 1 - 0x1p-24f)));
}

/* The winner of each part: the largest of score and noise among what is kept. Greedy rows have
 * theirs already. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void part_race(global const float *logits, uint vocabulary, global const float *largests,
               global const uint *settings, global float *values, global uint *ids)
{
    local float local_values[LANES];
    local uint local_ids[LANES];
    const uint part = get_group_id(1), row = get_group_id(2), begin = part * PART;
    const uint end = min(begin + PART, vocabulary);
    logits += (ulong)row * vocabulary;
    settings += row * SETTINGS;
    const float temperature = as_float(settings[TEMPERATURE]), largest = largests[row];
    float best = -INFINITY;
    uint id = end;
    if (settings[DRAW] && temperature > 0 && largest > -INFINITY) {
        const uint2 key = (uint2)(settings[SEED_LOW], settings[SEED_HIGH]);
        const float least = as_float(settings[LEAST]), min_p = as_float(settings[MIN_P]);
        const int tie_end = settings[TIE_END];
        /* Below it no noise can win: noise lies between -2.82 and 22.88. */
        const float floor = fmax(-26.2f, min_p > 0 ? log(min_p) : -INFINITY);
        for (uint i = begin + 16 * LANE; i < end; i += 16 * LANES) {
            const float16 x = scores16(logits, i, vocabulary, largest, temperature);
            const int16 tied = (x == least) & (COUNTING < (int16)(tie_end - (int)i));
            const int16 kept = (x >= floor) & ((x > least) | tied);
            if (!any(kept))
                continue;
            const float16 noise = gumbel16(i, settings[CHOICE], settings[POSITION], key);
            const float16 sums = select((float16)-INFINITY, x + noise, kept);
            if (max16(sums) > best) {
                best = max16(sums);
                float values[16];
                vstore16(sums, 0, values);
                for (id = 0; values[id] != best;)
                    id++;
                id += i;
            }
        }
    }
    lanes_best(&best, &id, local_values, local_ids);
    if (LANE == 0) {
        values[row * get_num_groups(1) + part] = best;
        ids[row * get_num_groups(1) + part] = id;
    }
}

/* The winners of the parts' races, for rows that draw; the others keep the token they have. */
kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void row_winner(global const float *values, global const uint *ids, uint parts, global int *tokens)
{
    const uint row = get_group_id(1);
    values += row * parts;
    ids += row * parts;
    float best = -INFINITY;
    for (uint part = 0; part < parts; part++)
        if (values[part] > best) {
            best = values[part];
            tokens[row] = ids[part];
        }
}
