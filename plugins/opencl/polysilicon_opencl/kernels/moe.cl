/* Mixtures of experts: which experts a token goes to, and the sum of what they gave. */

enum { SOFTMAX, SOFTMAX_TOP_K, SIGMOID };

/* One work-item takes one token. merit: scratch, `[T, E]`. Chosen experts' merit becomes NaN, which
 * no comparison finds. */
kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void route(global const float *logits, uint logits_at, uint logits_stride, uint experts,
           uint top_k, uint scoring, global const float *correction, uint corrected, uint groups,
           uint top_groups, uint renormalize, float scale, global float *merit,
           global int *chosen, global float *weights)
{
    const uint token = get_group_id(1);
    logits += logits_at + (ulong)token * logits_stride;
    merit += (ulong)token * experts;
    chosen += (ulong)token * top_k;
    weights += (ulong)token * top_k;
    float largest = -INFINITY, total = 0;
    for (uint e = 0; e < experts; e++)
        largest = fmax(largest, logits[e]);
    for (uint e = 0; e < experts; e++)
        total += exp(logits[e] - largest);
#define SCORE(e)                                                                                  \
    (scoring == SOFTMAX         ? exp(logits[e] - largest) / total                                \
     : scoring == SOFTMAX_TOP_K ? logits[e]                                                       \
                                : 1.0f / (1.0f + exp(-logits[e])))
    for (uint e = 0; e < experts; e++)
        merit[e] = SCORE(e) + (corrected ? correction[e] : 0.0f);
    const uint size = experts / groups;
    for (uint left = groups; left > top_groups; left--) {
        /* The worst group that is left goes; among equals the last. */
        uint worst = 0;
        float least = INFINITY;
        for (uint g = 0; g < groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            if (isnan(merit[g * size]))
                continue;
            for (uint e = g * size; e < (g + 1) * size; e++) {
                second = fmax(second, fmin(first, merit[e]));
                first = fmax(first, merit[e]);
            }
            float value = corrected ? first + second : first;
            if (value <= least) {
                least = value;
                worst = g;
            }
        }
        for (uint e = worst * size; e < (worst + 1) * size; e++)
            merit[e] = NAN;
    }
    float sum = 0;
    for (uint k = 0; k < top_k; k++) {
        uint best = 0;
        float most = -INFINITY;
        for (uint e = 0; e < experts; e++)
            if (merit[e] > most) {
                most = merit[e];
                best = e;
            }
        chosen[k] = best;
        weights[k] = SCORE(best);
        merit[best] = NAN;
    }
    if (scoring == SOFTMAX_TOP_K) {
        largest = -INFINITY;
        for (uint k = 0; k < top_k; k++)
            largest = fmax(largest, weights[k]);
        for (uint k = 0; k < top_k; k++) {
            weights[k] = exp(weights[k] - largest);
            sum += weights[k];
        }
        for (uint k = 0; k < top_k; k++)
            weights[k] /= sum;
        sum = 0;
    }
    for (uint k = 0; k < top_k; k++)
        sum += weights[k];
    /* The smallest normal number keeps vanished sigmoids from dividing zero by zero. */
    const float factor = renormalize ? scale / fmax(sum, FLT_MIN) : scale;
    for (uint k = 0; k < top_k; k++)
        weights[k] *= factor;
}

/* out[t] = sum over k of weights[t][k] * results[t * top_k + k]. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void mix_experts(global const float *results, uint results_at, uint results_stride,
                 global const float *weights, uint top_k, uint columns, global float *out)
{
    const uint token = get_global_id(1);
    results += results_at + (ulong)token * top_k * results_stride;
    weights += (ulong)token * top_k;
    for (uint c = 16 * LANE; c < columns; c += 16 * LANES) {
        float16 sum = 0;
        for (uint k = 0; k < top_k; k++)
            sum += read16(results + (ulong)k * results_stride, c, columns) * weights[k];
        write16(sum, out + (ulong)token * columns, c, columns);
    }
}
