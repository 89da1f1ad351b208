// Repacking of canonical encodings into the layout of levels/products.h.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"
#include "products_weight.h"

namespace polysilicon {

namespace {

// Inputs of more than so many times the root mean square of their row get a high byte: with kAuto,
// which is the more precise, and with kInt8.
constexpr float kLargeAuto = 3.2f, kLargeInt8 = 6.4f;

int divide_up(int a, int b) { return (a + b - 1) / b; }
int align(int bytes, int border) { return divide_up(bytes, border) * border; }

int number_bytes(Number type) { return type == Number::kFloat32 ? 4 : 2; }

Form form_of(Number type) {
  if (type == Number::kFloat16) return Form::kFloat16;
  return type == Number::kBfloat16 ? Form::kBfloat16 : Form::kFloat32;
}

float number(const void* from, Number type, std::int64_t index) {
  if (type == Number::kFloat32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(from) + index * 4, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(from) + index * 2, sizeof bits);
  if (type == Number::kFloat16) return float16_value(bits);
  return bfloat16_value(bits);
}

std::int64_t row_bytes(std::int64_t count, int bits) { return (count * bits + 7) / 8; }

unsigned code_at(const std::uint8_t* row, int bits, std::int64_t index) {
  const std::int64_t bit = index * bits;
  unsigned word = row[bit / 8];
  if (bit % 8 + bits > 8) word |= static_cast<unsigned>(row[bit / 8 + 1]) << 8;
  return word >> bit % 8 & ((1u << bits) - 1);
}

template <int bits>
void unpack_eights(const std::uint8_t* from, int eights, std::uint8_t* out) {
  for (int i = 0; i < eights; ++i, from += bits, out += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, bits);
    for (int code = 0; code < 8; ++code) {
      out[code] = static_cast<std::uint8_t>(word >> code * bits & ((1u << bits) - 1));
    }
  }
}

// Codes [begin, end) of a packed row, one a byte.
void unpack(const std::uint8_t* row, int bits, int begin, int end, std::uint8_t* out) {
  int index = begin;
  if (static_cast<std::int64_t>(begin) * bits % 8 == 0) {
    const std::uint8_t* from = row + static_cast<std::int64_t>(begin) * bits / 8;
    const int eights = (end - begin) / 8;
    switch (bits) {
      case 1: unpack_eights<1>(from, eights, out); break;
      case 2: unpack_eights<2>(from, eights, out); break;
      case 3: unpack_eights<3>(from, eights, out); break;
      case 4: unpack_eights<4>(from, eights, out); break;
      case 5: unpack_eights<5>(from, eights, out); break;
      case 6: unpack_eights<6>(from, eights, out); break;
      case 7: unpack_eights<7>(from, eights, out); break;
      default: std::memcpy(out, from, static_cast<std::size_t>(eights) * 8); break;
    }
    index += eights * 8;
  }
  for (; index < end; ++index) {
    out[index - begin] = static_cast<std::uint8_t>(code_at(row, bits, index));
  }
}

// Inputs that share a scale, in the file.
int group_of(const PartDescription& part) {
  return part.block_columns > 0 ? std::min(part.block_columns, part.columns) : part.group;
}

struct ScaleSource {
  const ScaleDescription& scales;
  int block_rows;
  std::int64_t rows;     // of scales, in an expert
  std::int64_t columns;  // groups of a row
  int super_columns;

  ScaleSource(const PartDescription& part, const ScaleDescription& scales) : scales(scales) {
    block_rows = part.block_columns > 0 ? part.block_rows : 1;
    rows = divide_up(part.rows, block_rows);
    columns = divide_up(part.columns, group_of(part));
    super_columns =
        scales.codes == nullptr ? 0 : divide_up(static_cast<int>(columns), scales.super_group);
  }

  std::int64_t row(int expert, int output) const { return expert * rows + output / block_rows; }
  const std::uint8_t* codes(std::int64_t row) const {
    return scales.codes + row * row_bytes(columns, scales.bits);
  }
  std::int64_t number_index(std::int64_t row, int group) const {
    if (scales.codes == nullptr) return row * columns + group;
    return row * super_columns + group / scales.super_group;
  }
  float value(std::int64_t row, int group) const {
    const float factor = number(scales.numbers, scales.type, number_index(row, group));
    if (scales.codes == nullptr) return factor;
    const int code = static_cast<int>(code_at(codes(row), scales.bits, group));
    return factor * static_cast<float>(code - scales.offset);
  }
};

bool has_whole_order(const PartDescription& part) {
  return part.input_order == nullptr ||
         (part.column_begin == 0 && part.column_end == part.columns);
}

// Whether runs of 16 inputs never straddle a border of groups.
bool keeps_groups(const PartDescription& part) {
  const int group = group_of(part);
  if (group >= part.columns) return true;
  return group % 16 == 0 && part.column_begin % group == 0;
}

bool keeps_super_groups(const PartDescription& part, const ScaleDescription& scales) {
  if (scales.codes == nullptr) return true;
  return part.column_begin / group_of(part) % scales.super_group == 0;
}

// Whether a part keeps its codes; else its values are kept as float32.
bool keeps_codes(const PartDescription& part) {
  return part.encoding != Encoding::kDense && has_whole_order(part) && keeps_groups(part) &&
         keeps_super_groups(part, part.scale) && keeps_super_groups(part, part.bias);
}

// Values of a row's window in the canonical order of evaluation, input order undone.
void row_values(const PartDescription& part, int expert, int row, float* out) {
  const int begin = part.column_begin, end = part.column_end;
  const std::int64_t index = static_cast<std::int64_t>(expert) * part.rows + row;
  if (part.encoding == Encoding::kDense) {
    for (int k = begin; k < end; ++k) {
      out[k - begin] = number(part.numbers, part.type, index * part.columns + k);
    }
    return;
  }
  const std::uint8_t* codes = part.codes + index * row_bytes(part.columns, part.bits);
  const ScaleSource scale(part, part.scale), bias(part, part.bias);
  const int group = group_of(part);
  for (int k = 0; k < part.columns; ++k) {
    const int column = part.input_order == nullptr ? k : part.input_order[k];
    if (column < begin || column >= end) continue;
    const int code = static_cast<int>(code_at(codes, part.bits, k));
    float value = part.encoding == Encoding::kFloat ? part.table[code]
                                                    : static_cast<float>(code - part.offset);
    value *= scale.value(scale.row(expert, row), k / group);
    if (part.bias.numbers != nullptr) value += bias.value(bias.row(expert, row), k / group);
    out[column - begin] = value;
  }
}

// Plans the scales of a block from byte `at` on and returns where they end.
int plan_scales(const PartDescription& part, const ScaleDescription& scales, int tiles, int at,
                ScaleLayout& layout) {
  if (scales.numbers == nullptr) return at;
  const int width = part.column_end - part.column_begin;
  const int group = group_of(part);
  layout.form = form_of(scales.type);
  layout.period = group >= part.columns ? 2 * tiles : group / 16;
  layout.count = group >= part.columns ? 1 : divide_up(width, group);
  layout.at = at;
  if (scales.codes == nullptr) {
    return at + layout.count * kLanes * number_bytes(scales.type);
  }
  layout.coded = true;
  layout.offset = scales.offset;
  layout.super_period = scales.super_group;
  layout.super_count = divide_up(layout.count, scales.super_group);
  layout.super_at = align(at + layout.count * kLanes, 4);
  return layout.super_at + layout.super_count * kLanes * number_bytes(scales.type);
}

Product product_of(const Segment& segment, Activations activations, const ProductKernels& kernels) {
  if (segment.codes == Codes::kFloat32 || activations == Activations::kFloat32) {
    return Product::kFloat32;
  }
  const bool integer = activations == Activations::kAuto || activations == Activations::kInt8;
  if (segment.codes == Codes::kAffine && integer && kernels.int8) return Product::kInt8;
  return kernels.bfloat16 ? Product::kBfloat16 : Product::kFloat32;
}

int index_of(std::vector<float>& values, float value) {
  const auto found = std::find(values.begin(), values.end(), value);
  if (found != values.end()) return static_cast<int>(found - values.begin());
  values.push_back(value);
  return static_cast<int>(values.size()) - 1;
}

Segment plan_segment(Weight& weight, const PartDescription& part, Activations activations,
                     const ProductKernels& kernels, bool by_row_count) {
  Segment segment{};
  segment.rows = part.row_end - part.row_begin;
  segment.blocks = divide_up(segment.rows, kLanes);
  segment.tiles = divide_up(weight.inputs, kTile);
  segment.first = weight.outputs;
  if (keeps_codes(part)) {
    const bool affine = part.encoding == Encoding::kAffine;
    segment.codes = affine ? Codes::kAffine : Codes::kTable;
    segment.bits = part.bits;
    segment.offset = part.offset;
    const int end = plan_scales(part, part.scale, segment.tiles, 0, segment.scale);
    segment.codes_at = align(plan_scales(part, part.bias, segment.tiles, end, segment.bias), 64);
    segment.halves = segment.scale.period % 2 == 1;
    segment.tile_bytes = part.bits * 64;
    if (part.input_order != nullptr) {
      const std::vector<std::int32_t> order(part.input_order, part.input_order + part.columns);
      const auto found = std::find(weight.orders.begin(), weight.orders.end(), order);
      segment.order = static_cast<int>(found - weight.orders.begin());
      if (found == weight.orders.end()) weight.orders.push_back(order);
    }
    if (!affine) {
      weight.tables.push_back(std::make_unique<float[]>(256));
      std::copy(part.table, part.table + (1 << part.bits), weight.tables.back().get());
      segment.table = weight.tables.back().get();
    }
  } else if (part.encoding == Encoding::kDense && part.type != Number::kFloat32) {
    segment.codes = part.type == Number::kFloat16 ? Codes::kFloat16 : Codes::kBfloat16;
    segment.tile_bytes = 16 * 64;
  } else {
    segment.codes = Codes::kFloat32;
    segment.tile_bytes = 32 * 64;
  }
  segment.product = product_of(segment, activations, kernels);
  segment.by_row_count =
      by_row_count && (segment.product == Product::kBfloat16 ||
                       (segment.product == Product::kInt8 && activations == Activations::kAuto));
  if (segment.product == Product::kInt8) {
    segment.correction =
        index_of(weight.int8_corrections, static_cast<float>(-segment.offset));
  } else if (segment.product == Product::kBfloat16) {
    const int raised = segment.offset + kernels.bfloat16_raise(segment.codes, segment.bits);
    segment.correction = index_of(weight.bfloat16_corrections, static_cast<float>(-raised));
  }
  segment.block_bytes = segment.codes_at + static_cast<std::ptrdiff_t>(segment.tiles) *
                                               segment.tile_bytes;
  return segment;
}

// Places the high bytes of integer inputs from byte `at` on and returns where they end.
int plan_high_bytes(int tiles, float large, int at, RecordPart& part) {
  part.large = large;
  part.high_at = at;
  part.high_runs_at = at + tiles * kTile;
  return align(part.high_runs_at + align(tiles, 8), 64);
}

// Where a row of activations is laid out; returns where the part ends.
int plan_record_part(const Weight& weight, Product product, int value_bytes,
                     const std::vector<float>& corrections, int at, RecordPart& part) {
  for (const Segment& segment : weight.segments) {
    const bool too = product == Product::kBfloat16 && segment.by_row_count;
    if (segment.product != product && !too) continue;
    part.used = true;
    (segment.halves ? part.halves : part.whole) = true;
  }
  if (!part.used) return at;
  const int tiles = weight.layout.tiles;
  part.values_at = at;
  at = align(at + tiles * kTile * value_bytes, 64);
  if (product == Product::kFloat32) return at;
  part.corrections = corrections.data();
  part.correction_count = static_cast<int>(corrections.size());
  part.step_at = at;
  at += 4;
  if (part.whole) {
    part.sum_at = at;
    part.correction_at = at + tiles * 4;
    at += tiles * 4 * (1 + part.correction_count);
  }
  if (part.halves) {
    part.half_sum_at = at;
    part.half_correction_at = at + tiles * 8;
    at += tiles * 8 * (1 + part.correction_count);
  }
  return align(at, 64);
}

void plan_record(Weight& weight, Activations activations) {
  RecordLayout& layout = weight.layout;
  layout.inputs = weight.inputs;
  layout.tiles = divide_up(weight.inputs, kTile);
  int at = plan_record_part(weight, Product::kInt8, 1, weight.int8_corrections, 0, layout.int8);
  if (layout.int8.used) {
    const float large = activations == Activations::kAuto ? kLargeAuto : kLargeInt8;
    at = plan_high_bytes(layout.tiles, large, at, layout.int8);
  }
  at = plan_record_part(weight, Product::kBfloat16, 2, weight.bfloat16_corrections, at,
                        layout.bfloat16);
  at = plan_record_part(weight, Product::kFloat32, 4, {}, at, layout.float32);
  // An odd number of cache lines, so that rows do not compete for the same sets.
  layout.bytes = at / 64 % 2 == 0 ? at + 64 : at;
}

void pack_scales(const PartDescription& part, const ScaleDescription& scales,
                 const ScaleLayout& layout, int expert, int lane, int row, std::uint8_t* block) {
  if (layout.form == Form::kNone) return;
  const ScaleSource source(part, scales);
  const std::int64_t from = source.row(expert, row);
  const int group = group_of(part);
  const int first = group >= part.columns ? 0 : part.column_begin / group;
  const int size = number_bytes(scales.type);
  const auto* numbers = static_cast<const std::uint8_t*>(scales.numbers);
  const int count = layout.coded ? layout.super_count : layout.count;
  const int step = layout.coded ? layout.super_period : 1;
  std::uint8_t* target = block + (layout.coded ? layout.super_at : layout.at) + lane * size;
  for (int i = 0; i < count; ++i) {
    std::memcpy(target + i * kLanes * size,
                numbers + source.number_index(from, first + i * step) * size,
                static_cast<std::size_t>(size));
  }
  if (!layout.coded) return;
  const std::uint8_t* codes = source.codes(from);
  for (int i = 0; i < layout.count; ++i) {
    block[layout.at + i * kLanes + lane] =
        static_cast<std::uint8_t>(code_at(codes, scales.bits, first + i));
  }
}

// Splits a tile's codes, a byte each as [8][16 lanes][4], into planes.
void pack_planes(const std::uint8_t* bytes, int bits, std::uint8_t* tile) {
  if (bits == 8) {
    std::memcpy(tile, bytes, 512);
    return;
  }
  int low = 0;
  for (int width = 4; width; width >>= 1) {
    if (!(bits & width)) continue;
    const unsigned mask = (1u << width) - 1;
    for (int j = 0; j < width; ++j, tile += 64) {
      std::memset(tile, 0, 64);
      for (int r = j; r < 8; r += width) {
        const std::uint8_t* from = bytes + r * 64;
        const int shift = r / width * width;
        for (int i = 0; i < 64; ++i) {
          tile[i] = static_cast<std::uint8_t>(tile[i] | (from[i] >> low & mask) << shift);
        }
      }
    }
    low += width;
  }
}

std::size_t pack_scratch_bytes(int tiles) {
  return static_cast<std::size_t>(tiles) * kTile * (kLanes + 4);
}

// Codes of 16 rows: scratch holds [tiles][8][16][4] bytes and a row.
void pack_codes(const PartDescription& part, const Segment& segment, int expert, int first_row,
                int count, std::uint8_t* out, std::uint8_t* scratch) {
  const int width = part.column_end - part.column_begin;
  const std::size_t padded = static_cast<std::size_t>(segment.tiles) * kTile;
  std::uint8_t* row_codes = scratch + padded * kLanes;
  std::memset(scratch, 0, padded * kLanes);
  std::memset(row_codes, 0, padded);
  for (int lane = 0; lane < count; ++lane) {
    const std::int64_t row = static_cast<std::int64_t>(expert) * part.rows + first_row + lane;
    unpack(part.codes + row * row_bytes(part.columns, part.bits), part.bits, part.column_begin,
           part.column_begin + width, row_codes);
    for (std::size_t four = 0; four < padded / 4; ++four) {
      std::memcpy(scratch + four * 64 + lane * 4, row_codes + four * 4, 4);
    }
  }
  for (int tile = 0; tile < segment.tiles; ++tile) {
    pack_planes(scratch + tile * 512, segment.bits, out + tile * segment.tile_bytes);
  }
}

void pack_halves(const PartDescription& part, int expert, int row, int lane, std::uint8_t* out) {
  const std::int64_t index =
      (static_cast<std::int64_t>(expert) * part.rows + row) * part.columns + part.column_begin;
  const std::uint8_t* from = static_cast<const std::uint8_t*>(part.numbers) + index * 2;
  const int width = part.column_end - part.column_begin;
  for (int k = 0; k < width; ++k) {
    std::memcpy(out + k / 2 * 64 + lane * 4 + k % 2 * 2, from + k * 2, 2);
  }
}

void pack_floats(const PartDescription& part, int expert, int row, int lane, int width,
                 float* values, std::uint8_t* out) {
  row_values(part, expert, row, values);
  for (int k = 0; k < width; ++k) {
    std::memcpy(out + k * 64 + lane * 4, values + k, sizeof(float));
  }
}

void pack_block(const Weight& weight, const PartDescription& part, const Segment& segment,
                int expert, int block, std::uint8_t* out, std::uint8_t* scratch) {
  const int begin = part.row_begin + block * kLanes;
  const int count = std::min(kLanes, part.row_end - begin);
  for (int lane = 0; lane < count; ++lane) {
    const int row = begin + lane;
    if (segment.codes == Codes::kFloat32) {
      pack_floats(part, expert, row, lane, weight.inputs, reinterpret_cast<float*>(scratch), out);
    } else if (segment.codes == Codes::kFloat16 || segment.codes == Codes::kBfloat16) {
      pack_halves(part, expert, row, lane, out);
    } else {
      pack_scales(part, part.scale, segment.scale, expert, lane, row, out);
      pack_scales(part, part.bias, segment.bias, expert, lane, row, out);
    }
  }
  if (segment.codes == Codes::kAffine || segment.codes == Codes::kTable) {
    pack_codes(part, segment, expert, begin, count, out + segment.codes_at, scratch);
  }
}

void check_parts(const PartDescription* parts, int count) {
  if (count < 1) throw Error("a weight has at least one part");
  for (int i = 0; i < count; ++i) {
    const PartDescription& part = parts[i];
    if (part.experts != parts[0].experts ||
        part.column_end - part.column_begin != parts[0].column_end - parts[0].column_begin) {
      throw Error("parts of one product differ in their outputs only");
    }
    if (part.row_begin < 0 || part.row_end > part.rows || part.row_begin > part.row_end ||
        part.column_begin < 0 || part.column_end > part.columns ||
        part.column_begin >= part.column_end || part.experts < 1) {
      throw Error("a part's window lies outside of it, or has no columns");
    }
  }
}

}  // namespace

Weight* weight_create(Context& context, const PartDescription* parts, int count,
                      Activations activations) {
  check_parts(parts, count);
  auto weight = std::make_unique<Weight>();
  weight->inputs = parts[0].column_end - parts[0].column_begin;
  weight->experts = parts[0].experts;
  weight->orders.emplace_back();
  for (int i = 0; i < count; ++i) {
    const ProductKernels& kernels = *context.kernels->products;
    Segment segment = plan_segment(*weight, parts[i], activations, kernels,
                                   kernels.by_row_count && !context.deterministic);
    segment.data_at = weight->expert_bytes;
    weight->expert_bytes += segment.blocks * segment.block_bytes;
    weight->outputs += segment.rows;
    weight->blocks += segment.blocks;
    weight->segments.push_back(segment);
  }
  plan_record(*weight, activations);
  weight->data = Buffer(static_cast<std::size_t>(weight->expert_bytes * weight->experts));
  context.reserve(pack_scratch_bytes(weight->layout.tiles));
  const int chunk = 16;
  const int chunks = divide_up(weight->blocks, chunk);
  context.parallel(chunks * weight->experts, [&](int task, int thread) {
    const int expert = task / chunks;
    const int first = task % chunks * chunk;
    int begin = 0;
    for (std::size_t i = 0; i < weight->segments.size(); ++i) {
      const Segment& segment = weight->segments[i];
      const int from = std::max(first - begin, 0);
      const int to = std::min(first + chunk - begin, segment.blocks);
      for (int block = from; block < to; ++block) {
        std::uint8_t* out = weight->data.as<std::uint8_t>() + expert * weight->expert_bytes +
                            segment.data_at + block * segment.block_bytes;
        pack_block(*weight, parts[i], segment, expert, block, out, context.scratch(thread));
      }
      begin += segment.blocks;
    }
  });
  return weight.release();
}

void weight_destroy(Weight* weight) { delete weight; }

std::size_t weight_bytes(const Weight& weight) {
  return static_cast<std::size_t>(weight.expert_bytes * weight.experts);
}

int weight_inputs(const Weight& weight) { return weight.inputs; }
int weight_outputs(const Weight& weight) { return weight.outputs; }
int weight_experts(const Weight& weight) { return weight.experts; }

}  // namespace polysilicon
