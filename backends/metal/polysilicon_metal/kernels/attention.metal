// Attention of blocks of queries through page tables, over one part of the context.
//
// One threadgroup takes ROWS queries (of one block, under one key head) and one part. Its SIMD
// groups take every SIMD_GROUPS-th key; a lane holds every 32nd element of a query, a key and a
// value, so that a score is a sum over the lanes. Softmax is online (arXiv 2307.08691); at the end
// the SIMD groups' sums are merged, and the caller merges the parts.
//
// Inputs
//   q            float [B, Q, H, DK]
//   k, v         [slots, HK, DK], [slots, HK, DV], read by `stored`; k_scale, v_scale: float
//                [slots, HK] if QUANTISED
//   table        int [S, width]: pages of a sequence
//   rows         int [B, Q]: tokens of the queries, T where there is none
//   sequences    int [B]
//   query_start, context_len, positions, tree: of the batch; tree [T, M] if TREE
//   sizes        int [4]: T, the table's width, M, and the keys of a part
//   numbers      float [2]: the scale of scores, and the soft cap if SOFTCAP
// Outputs, float
//   sums [PARTS, B, Q, H, DV], totals and tops [PARTS, B, Q, H]: the weighted values and the sum of
//   the weights, both times exp(-top), and the largest score, -infinity where nothing is seen.
//
// Grid: (B * CHUNKS, HK, PARTS) threadgroups of 32 * SIMD_GROUPS threads.

constexpr int GROUP = H / HK;
constexpr int CHUNKS = (Q * GROUP + ROWS - 1) / ROWS;
constexpr int KEY_ELEMENTS = (DK + 31) / 32;
constexpr int VALUE_ELEMENTS = (DV + 31) / 32;

const int block = int(threadgroup_position_in_grid.x) / CHUNKS;
const int first_row = int(threadgroup_position_in_grid.x) % CHUNKS * ROWS;
const int key_head = int(threadgroup_position_in_grid.y);
const int part = int(threadgroup_position_in_grid.z);
const int lane = int(thread_index_in_simdgroup);
const int simd_group = int(simdgroup_index_in_threadgroup);

const int tokens = sizes[0];
const int table_width = sizes[1];
const int tree_width = sizes[2];
const int part_keys = sizes[3];
const int sequence = sequences[block];
const int begin = query_start[sequence];
const int context = context_len[sequence];
const int before = context - (query_start[sequence + 1] - begin);

float query[ROWS][KEY_ELEMENTS];
float sum[ROWS][VALUE_ELEMENTS];
float total[ROWS];
float top[ROWS];
int token[ROWS];

// The keys that any of the rows may see.
int low = context;
int high = 0;
for (int r = 0; r < ROWS; ++r) {
  const int row = first_row + r;
  total[r] = 0.0f;
  top[r] = -INFINITY;
  for (int i = 0; i < VALUE_ELEMENTS; ++i) {
    sum[r][i] = 0.0f;
  }
  token[r] = row < Q * GROUP ? rows[block * Q + row / GROUP] : tokens;
  if (token[r] == tokens) {
    continue;
  }
  const int head = key_head * GROUP + row % GROUP;
  for (int i = 0; i < KEY_ELEMENTS; ++i) {
    const int d = lane + 32 * i;
    query[r][i] = d < DK ? q[((block * Q + row / GROUP) * H + head) * DK + d] * numbers[0] : 0.0f;
  }
  const int end = CAUSAL && !TREE ? before + token[r] - begin + 1 : context;
  high = metal::max(high, end);
  const int start = WINDOW > 0 ? metal::max(0, positions[token[r]] - WINDOW + 1) : 0;
  low = metal::min(low, metal::min(before, start));
}
low = metal::max(low, part * part_keys);
high = metal::min(high, (part + 1) * part_keys);

for (int key = low + simd_group; key < high; key += SIMD_GROUPS) {
  const long page = table[sequence * table_width + key / PAGE];
  const long at = (page * PAGE + key % PAGE) * HK + key_head;
  float key_values[KEY_ELEMENTS];
  for (int i = 0; i < KEY_ELEMENTS; ++i) {
    const int d = lane + 32 * i;
    key_values[i] = d < DK ? stored(k[at * DK + d]) : 0.0f;
  }
  float values[VALUE_ELEMENTS];
  for (int i = 0; i < VALUE_ELEMENTS; ++i) {
    const int d = lane + 32 * i;
    values[i] = d < DV ? stored(v[at * DV + d]) : 0.0f;
    if (QUANTISED) {
      values[i] *= v_scale[at];
    }
  }
  const int own = key - before;
  const int key_position = own < 0 ? key : positions[begin + own];
  for (int r = 0; r < ROWS; ++r) {
    if (token[r] == tokens) {
      continue;
    }
    if (own >= 0) {
      if (TREE ? !tree[token[r] * tree_width + own] : CAUSAL && own > token[r] - begin) {
        continue;
      }
    }
    if (WINDOW > 0 && key_position <= positions[token[r]] - WINDOW) {
      continue;
    }
    float score = 0.0f;
    for (int i = 0; i < KEY_ELEMENTS; ++i) {
      score += query[r][i] * key_values[i];
    }
    score = metal::simd_sum(score);
    if (QUANTISED) {
      score *= k_scale[at];
    }
    if (SOFTCAP) {
      score = numbers[1] * metal::precise::tanh(score / numbers[1]);
    }
    const float next = metal::max(top[r], score);
    const float kept = metal::precise::exp(top[r] - next);
    const float weight = metal::precise::exp(score - next);
    top[r] = next;
    total[r] = total[r] * kept + weight;
    for (int i = 0; i < VALUE_ELEMENTS; ++i) {
      sum[r][i] = sum[r][i] * kept + weight * values[i];
    }
  }
}

threadgroup float group_sums[SIMD_GROUPS * DV];
threadgroup float group_totals[SIMD_GROUPS];
threadgroup float group_tops[SIMD_GROUPS];
const int thread_index = simd_group * 32 + lane;
for (int r = 0; r < ROWS; ++r) {
  for (int i = 0; i < VALUE_ELEMENTS; ++i) {
    const int d = lane + 32 * i;
    if (d < DV) {
      group_sums[simd_group * DV + d] = sum[r][i];
    }
  }
  if (lane == 0) {
    group_totals[simd_group] = total[r];
    group_tops[simd_group] = top[r];
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int row = first_row + r;
  if (row < Q * GROUP) {
    float whole_top = -INFINITY;
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      whole_top = metal::max(whole_top, group_tops[g]);
    }
    float factors[SIMD_GROUPS];
    float whole_total = 0.0f;
    for (int g = 0; g < SIMD_GROUPS; ++g) {
      const bool empty = group_tops[g] == -INFINITY;
      factors[g] = empty ? 0.0f : metal::precise::exp(group_tops[g] - whole_top);
      whole_total += group_totals[g] * factors[g];
    }
    const int head = key_head * GROUP + row % GROUP;
    const int blocks = int(threadgroups_per_grid.x) / CHUNKS;
    const int target = ((part * blocks + block) * Q + row / GROUP) * H + head;
    for (int d = thread_index; d < DV; d += 32 * SIMD_GROUPS) {
      float whole = 0.0f;
      for (int g = 0; g < SIMD_GROUPS; ++g) {
        whole += group_sums[g * DV + d] * factors[g];
      }
      sums[target * DV + d] = whole;
    }
    if (thread_index == 0) {
      totals[target] = whole_total;
      tops[target] = whole_top;
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
