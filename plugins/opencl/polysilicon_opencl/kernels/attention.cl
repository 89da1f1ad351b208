/* Attention through page tables, a chunk of the context at a time with a running softmax (arXiv
 * 2205.14135). A work-group takes QUERIES tokens of a sequence (or fewer) and HEADS of the query
 * heads that share a key head: ROWS rows in all, row r being token r / HEADS and head r % HEADS.
 * Lanes share the chunk's keys, then rows, then the columns of values.
 *
 * Where there are few work-groups for a long context, `splits` of them share it: each leaves what
 * it mixed, its largest score and its total for `merge_splits`. QUERIES is 1 then.
 */

#define ROWS (QUERIES * HEADS)

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void attention(global const float *restrict queries, global const int *restrict batch,
               uint table_at, uint table_width, uint blocks_at, uint positions_at,
               uint query_start_at, uint context_at, uint tree_at, uint tree_width,
               global const Stored *restrict keys, global const Stored *restrict values,
               global const float *restrict key_scales, global const float *restrict value_scales,
               uint heads, uint key_heads, uint page_size, int window, uint causal, float softcap,
               global const float *sinks, uint has_sinks, global float *restrict out,
               uint splits, global float *restrict partial)
{
    local float query[ROWS * KEY_DIM], mixed[ROWS * VALUE_DIM], weights[ROWS * CHUNK];
    local float largest[ROWS], total[ROWS], rescale[ROWS];
    local uint slots[CHUNK];
    const uint group = heads / key_heads, parts = (group + HEADS - 1) / HEADS;
    const uint split = get_group_id(1) % splits, part = get_group_id(1) / splits;
    const uint key_head = part / parts, first_head = part % parts * HEADS;
    global const int *block = batch + blocks_at + 3 * get_group_id(2);
    const int sequence = block[0], first_token = block[1], count = block[2];
    const int begin = batch[query_start_at + sequence];
    const int length = batch[query_start_at + sequence + 1] - begin;
    const int context = batch[context_at + sequence], before = context - length;
    global const int *positions = batch + positions_at, *table = batch + table_at;
    table += sequence * table_width;

    int low = 0, high = context;
    if (causal && !tree_at)
        high = before + first_token - begin + count;
    if (window > 0) {
        low = positions[first_token];
        for (int t = 1; t < count; t++)
            low = min(low, positions[first_token + t]);
        low = min(before, max(0, low - window + 1));
    }
    if (splits > 1) {
        const int share = ((high - low + CHUNK - 1) / CHUNK + splits - 1) / splits * CHUNK;
        low += split * share;
        high = min(high, low + share);
    }
    for (uint r = 0; r < ROWS; r++) {
        uint token = r / HEADS, head = first_head + r % HEADS;
        bool used = token < (uint)count && head < group;
        ulong from = ((ulong)(first_token + token) * heads + key_head * group + head) * KEY_DIM;
        for (uint i = LANE; i < KEY_DIM; i += LANES)
            query[r * KEY_DIM + i] = used ? queries[from + i] : 0.0f;
        for (uint i = LANE; i < VALUE_DIM; i += LANES)
            mixed[r * VALUE_DIM + i] = 0;
    }
    for (uint r = LANE; r < ROWS; r += LANES) {
        largest[r] = -INFINITY;
        total[r] = 0;
    }

    for (int start = low; start < high; start += CHUNK) {
        const uint number = min(CHUNK, high - start);
        SYNC();
        for (uint j = LANE; j < CHUNK; j += LANES) {
            if (j >= number) {
                for (uint r = 0; r < ROWS; r++)
                    weights[r * CHUNK + j] = -INFINITY;
                continue;
            }
            const int index = start + j;
            const uint slot = (uint)table[index / page_size] * page_size + index % page_size;
            slots[j] = slot;
            global const Stored *key = keys + ((ulong)slot * key_heads + key_head) * KEY_DIM;
            floatV sums[ROWS];
#pragma unroll
            for (uint r = 0; r < ROWS; r++)
                sums[r] = 0;
            for (uint i = 0; i < KEY_DIM / VECTOR; i++) {
                const floatV part = load_stored(i, key);
#pragma unroll
                for (uint r = 0; r < ROWS; r++)
                    sums[r] += part * LOAD(i, query + r * KEY_DIM);
            }
#if KV_QUANTISED
            const float key_scale = key_scales[(ulong)slot * key_heads + key_head];
#endif
            const int own = index - before;
            const int position = own < 0 ? index : positions[begin + own];
#pragma unroll
            for (uint r = 0; r < ROWS; r++) {
                float score = sumV(sums[r]);
#if KV_QUANTISED
                score *= key_scale;
#endif
                if (softcap > 0)
                    score = softcap * tanh(score / softcap);
                const int token = first_token + min((int)(r / HEADS), count - 1);
                bool seen = own < 0;
                if (!seen && tree_at)
                    seen = ((global const uchar *)(batch + tree_at))[token * tree_width + own];
                else if (!seen)
                    seen = !causal || own <= token - begin;
                if (window > 0 && position <= positions[token] - window)
                    seen = false;
                weights[r * CHUNK + j] = seen ? score : -INFINITY;
            }
        }
        SYNC();
        for (uint r = LANE; r < ROWS; r += LANES) {
            float most = largest[r];
            for (uint j = 0; j < number; j++)
                most = fmax(most, weights[r * CHUNK + j]);
            /* Where nothing was seen yet, any finite number makes all weights 0. */
            const float base = most == -INFINITY ? 0.0f : most;
            float16 sum = 0;
            for (uint j = 0; j < CHUNK / 16; j++) {
                float16 weight = exp(vload16(j, weights + r * CHUNK) - base);
                sum += weight;
                vstore16(weight, j, weights + r * CHUNK);
            }
            rescale[r] = exp(largest[r] - base);
            total[r] = total[r] * rescale[r] + sum16(sum);
            largest[r] = most;
        }
#if KV_QUANTISED
        SYNC();
        for (uint j = LANE; j < number; j += LANES) {
            const float scale = value_scales[(ulong)slots[j] * key_heads + key_head];
            for (uint r = 0; r < ROWS; r++)
                weights[r * CHUNK + j] *= scale;
        }
#endif
        SYNC();
        for (uint i = LANE; i < VALUE_DIM / VECTOR; i += LANES) {
            floatV sums[ROWS];
#pragma unroll
            for (uint r = 0; r < ROWS; r++)
                sums[r] = LOAD(i, mixed + r * VALUE_DIM) * rescale[r];
            for (uint j = 0; j < number; j++) {
                const ulong place = (ulong)slots[j] * key_heads + key_head;
                const floatV part = load_stored(i, values + place * VALUE_DIM);
#pragma unroll
                for (uint r = 0; r < ROWS; r++)
                    sums[r] += part * weights[r * CHUNK + j];
            }
#pragma unroll
            for (uint r = 0; r < ROWS; r++)
                STORE(sums[r], i, mixed + r * VALUE_DIM);
        }
    }
    SYNC();
#if KV_KIND == KV_INT8
    for (uint r = 0; r < ROWS; r++)
        turn(mixed + r * VALUE_DIM, VALUE_DIM);
#endif
    for (uint r = 0; r < ROWS; r++) {
        const uint token = r / HEADS, head = first_head + r % HEADS;
        if (token >= (uint)count || head >= group)
            continue;
        if (splits > 1) {
            const ulong row = (ulong)get_group_id(2) * heads + key_head * group + head;
            global float *target = partial + (row * splits + split) * (VALUE_DIM + 2);
            for (uint i = LANE; i < VALUE_DIM; i += LANES)
                target[i] = mixed[r * VALUE_DIM + i];
            if (LANE == 0) {
                target[VALUE_DIM] = largest[r];
                target[VALUE_DIM + 1] = total[r];
            }
            continue;
        }
        float factor = 0;
        if (largest[r] > -INFINITY) {
            float most = largest[r], sum = total[r];
            if (has_sinks) {
                const float sink = sinks[key_head * group + head];
                most = fmax(most, sink);
                sum = sum * exp(largest[r] - most) + exp(sink - most);
            }
            factor = exp(largest[r] - most) / sum;
        }
        const ulong place = (ulong)(first_token + token) * heads + key_head * group + head;
        global float *target = out + place * VALUE_DIM;
        for (uint i = LANE; i < VALUE_DIM; i += LANES)
            target[i] = mixed[r * VALUE_DIM + i] * factor;
    }
}

/* Puts together what the splits of a block's token and head left. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void merge_splits(global const float *partial, uint splits, uint heads, global const int *batch,
                  uint blocks_at, global const float *sinks, uint has_sinks, global float *out)
{
    local float row[VALUE_DIM];
    const uint head = get_group_id(1), block = get_group_id(2);
    const uint token = batch[blocks_at + 3 * block + 1];
    partial += ((ulong)block * heads + head) * splits * (VALUE_DIM + 2);
    out += ((ulong)token * heads + head) * VALUE_DIM;
    float seen = -INFINITY;
    for (uint s = 0; s < splits; s++)
        seen = fmax(seen, partial[s * (VALUE_DIM + 2) + VALUE_DIM]);
    const float most = has_sinks && seen > -INFINITY ? fmax(seen, sinks[head]) : seen;
    float sum = has_sinks ? exp(sinks[head] - most) : 0;
    for (uint i = LANE; i < VALUE_DIM; i += LANES)
        row[i] = 0;
    for (uint s = 0; s < splits && seen > -INFINITY; s++) {
        global const float *part = partial + s * (VALUE_DIM + 2);
        const float factor = exp(part[VALUE_DIM] - most);
        sum += part[VALUE_DIM + 1] * factor;
        for (uint i = LANE; i < VALUE_DIM; i += LANES)
            row[i] += part[i] * factor;
    }
    for (uint i = LANE; i < VALUE_DIM; i += LANES)
        out[i] = seen > -INFINITY ? row[i] / sum : 0.0f;
}
