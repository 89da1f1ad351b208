// Products of few rows with codes in groups of 16 inputs, two of which make 32.
//
// One SIMD group takes one output; a lane takes every 32nd run of 32 codes, which fill BITS words.
//
// Inputs
//   x      [TOKENS, 32 * runs]
//   codes  uint [outputs, runs * BITS]: codes of a run in a stream of bits, the lowest bit first
//   scale_even, scale_odd, bias_even, bias_odd: [outputs, runs], of the first and the last 16
//   sizes  int [2]: outputs, runs
// Output
//   y      float [TOKENS, outputs]
//
// Grid: (32, outputs) threads, 32 of a row in one SIMD group.

const int lane = int(thread_position_in_threadgroup.x);
const int output = int(thread_position_in_grid.y);
const int outputs = sizes[0];
const int runs = sizes[1];
constexpr uint MASK = (1u << BITS) - 1u;

float sum[TOKENS];
for (int t = 0; t < TOKENS; ++t) {
  sum[t] = 0.0f;
}
for (int run = lane; run < runs; run += 32) {
  const int at = output * runs + run;
  for (int i = 0; i < 32; ++i) {
    const int word = at * BITS + i * BITS / 32;
    const int shift = i * BITS % 32;
    uint code = codes[word] >> shift;
    if (shift + BITS > 32) {
      code |= codes[word + 1] << (32 - shift);
    }
    const float scale = float(i < 16 ? scale_even[at] : scale_odd[at]);
    const float bias = float(i < 16 ? bias_even[at] : bias_odd[at]);
    const float value = scale * float(code & MASK) + bias;
    for (int t = 0; t < TOKENS; ++t) {
      sum[t] += value * float(x[(t * runs + run) * 32 + i]);
    }
  }
}
for (int t = 0; t < TOKENS; ++t) {
  const float total = metal::simd_sum(sum[t]);
  if (lane == 0) {
    y[t * outputs + output] = total;
  }
}
