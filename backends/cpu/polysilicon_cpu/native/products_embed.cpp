// Exact rows of repacked matrices.

#include <cstring>

#include "numbers.h"
#include "products_weight.h"

// The product and the sum of a code's value are rounded one after the other.
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace polysilicon {

namespace {

float number(Form form, const std::uint8_t* from, int index) {
  if (form == Form::kFloat32) {
    float value;
    std::memcpy(&value, from + index * 4, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from + index * 2, sizeof bits);
  if (form == Form::kFloat16) return float16_value(bits);
  return bfloat16_value(bits);
}

// The scale of a lane's run of 16 inputs.
float scale_of(const ScaleLayout& layout, const std::uint8_t* block, int run, int lane) {
  const int entry = run / layout.period;
  if (!layout.coded) return number(layout.form, block + layout.at, entry * kLanes + lane);
  const float super = number(layout.form, block + layout.super_at,
                             entry / layout.super_period * kLanes + lane);
  const int code = block[layout.at + entry * kLanes + lane];
  return super * static_cast<float>(code - layout.offset);
}

// Four codes of a lane, one a byte.
std::uint32_t codes_of(const std::uint8_t* tile, int bits, int r, int lane) {
  std::uint32_t word;
  if (bits == 8) {
    std::memcpy(&word, tile + r * 64 + lane * 4, sizeof word);
    return word;
  }
  std::uint32_t codes = 0;
  int low = 0;
  for (int width = 4; width; width >>= 1) {
    if (!(bits & width)) continue;
    std::memcpy(&word, tile + r % width * 64 + lane * 4, sizeof word);
    codes |= (word >> r / width * width & ((1u << width) - 1) * 0x01010101u) << low;
    tile += width * 64;
    low += width;
  }
  return codes;
}

void dense_row(const Segment& segment, const std::uint8_t* tiles, int lane, int inputs,
               float* out) {
  for (int k = 0; k < inputs; ++k) {
    const std::uint8_t* tile = tiles + k / kTile * segment.tile_bytes;
    const int at = k % kTile;
    if (segment.codes == Codes::kFloat32) {
      out[k] = number(Form::kFloat32, tile, at * kLanes + lane);
    } else {
      const Form form = segment.codes == Codes::kFloat16 ? Form::kFloat16 : Form::kBfloat16;
      out[k] = number(form, tile, (at / 2 * kLanes + lane) * 2 + at % 2);
    }
  }
}

void coded_row(const Segment& segment, const std::uint8_t* block, int lane, int inputs,
               const std::vector<std::int32_t>& order, float* out) {
  float scale = 0, bias = 0;
  std::uint32_t codes = 0;
  for (int k = 0; k < inputs; ++k) {
    if (k % 16 == 0) {
      scale = scale_of(segment.scale, block, k / 16, lane);
      if (segment.bias.form != Form::kNone) bias = scale_of(segment.bias, block, k / 16, lane);
    }
    if (k % 4 == 0) {
      const std::uint8_t* tile = block + segment.codes_at + k / kTile * segment.tile_bytes;
      codes = codes_of(tile, segment.bits, k % kTile / 4, lane);
    }
    const int code = static_cast<int>(codes >> k % 4 * 8 & 255);
    float value;
    if (segment.codes == Codes::kTable) {
      value = scale * segment.table[code];
    } else {
      value = scale * static_cast<float>(code - segment.offset);
      if (segment.bias.form != Form::kNone) value += bias;
    }
    out[order.empty() ? k : order[static_cast<std::size_t>(k)]] = value;
  }
}

void row_values(const Weight& weight, int row, float* out) {
  for (const Segment& segment : weight.segments) {
    const int own = row - segment.first;
    if (own < 0 || own >= segment.rows) continue;
    const std::uint8_t* block =
        weight.expert(0) + segment.data_at + own / kLanes * segment.block_bytes;
    const auto& order = weight.orders[static_cast<std::size_t>(segment.order)];
    if (segment.codes == Codes::kAffine || segment.codes == Codes::kTable) {
      coded_row(segment, block, own % kLanes, weight.inputs, order, out);
    } else {
      dense_row(segment, block + segment.codes_at, own % kLanes, weight.inputs, out);
    }
  }
}

}  // namespace

void embed(Context& context, const Weight& weight, const std::int32_t* tokens, int count,
           float* out) {
  const int tasks = count < 2 * context.threads ? 1 : context.threads;
  context.parallel(tasks, [&](int task, int) {
    const int end = static_cast<int>(static_cast<std::int64_t>(count) * (task + 1) / tasks);
    int index = static_cast<int>(static_cast<std::int64_t>(count) * task / tasks);
    for (; index < end; ++index) {
      row_values(weight, tokens[index], out + static_cast<std::ptrdiff_t>(index) * weight.inputs);
    }
  });
}

}  // namespace polysilicon
