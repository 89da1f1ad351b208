// Layout of repacked weights and prepared activations, and the kernels over them.
//
// A segment is one part of a weight: blocks of 16 outputs, each the scales of all its groups, then
// the codes, in tiles of 32 inputs. One lane is one output. A tile's codes are planes: for every
// set bit w of the width (8, 4, 2, 1), w vectors of 64 bytes in which vector j, field f (f * w bits
// up) holds the bits of the codes of inputs 4 r + b, r = f * w + j, at byte 4 * lane + b. Planes of
// higher bits come last; an 8-bit code is one plane. Dense 16-bit tiles are 16 vectors of pairs of
// inputs, float32 tiles 32 vectors of one input.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polysilicon {

constexpr int kLanes = 16;
constexpr int kTile = 32;

enum class Codes : int { kAffine, kTable, kFloat16, kBfloat16, kFloat32 };
enum class Form : int { kNone, kFloat32, kFloat16, kBfloat16 };
enum class Product : int { kInt8, kBfloat16, kFloat32 };

// Scales of one block: `count` entries of 16 lanes, an entry for every `period` runs of 16 inputs.
// With codes, an entry is a byte, and its value is `super * (byte - offset)`.
struct ScaleLayout {
  Form form = Form::kNone;
  bool coded = false;
  int period = 0, count = 0, at = 0;
  int offset = 0, super_period = 0, super_count = 0, super_at = 0;
};

struct Segment {
  Codes codes;
  Product product;
  int bits;
  int offset;
  bool halves;  // whether the two halves of a tile differ in scale
  // Whether many rows may be multiplied from bfloat16 inputs in an order of their own, so that a
  // row's result depends on the number of rows.
  bool by_row_count;
  int tiles;    // ceil(inputs / 32)
  int rows;     // outputs
  int blocks;   // ceil(rows / 16)
  int first;    // the first of the weight's outputs
  int order;    // which of the weight's input orders
  int correction;  // index into the corrections of its product
  ScaleLayout scale, bias;
  int codes_at;    // bytes, within a block
  int tile_bytes;
  std::ptrdiff_t block_bytes;
  const float* table;  // 256 values, or null
  std::ptrdiff_t data_at;  // where the blocks begin, within an expert
};

// Where things stand in the record of one row of activations, in bytes. For integer and bfloat16
// products, `corrections` are factors on the sums of the rounded inputs, by which their products
// with codes begin: minus the offset of the codes.
//
// An input of an integer product is `step * (value + 256 * high)`, with one step a row. It follows
// the row's largest input only up to `large` times their root mean square (`int8_step`); what is
// larger has a high byte, so that it does not make the step of the other inputs coarse. Bit r of a
// tile's byte of `high_runs_at` says whether any of inputs 4 r .. 4 r + 3 has one. Sums are those of
// the whole numbers.
struct RecordPart {
  int values_at = 0, step_at = 0;
  int sum_at = 0, half_sum_at = 0;                // float, by tile and by half
  int correction_at = 0, half_correction_at = 0;  // int32 or float, by correction and tile or half
  float large = 0;
  int high_at = 0, high_runs_at = 0;
  int correction_count = 0;
  const float* corrections = nullptr;
  bool used = false;
  bool whole = false, halves = false;  // which of the sums and corrections are there
};

struct RecordLayout {
  int inputs, tiles;
  std::ptrdiff_t bytes;
  RecordPart int8, bfloat16, float32;
};

struct ProductKernels {
  bool int8, bfloat16;  // whether there are kernels for these; else float32 ones serve
  bool by_row_count;    // whether there are kernels for many rows of such segments
  // How far codes are raised in bfloat16 products: their corrections start from this offset.
  int (*bfloat16_raise)(Codes codes, int bits);
  // Rounds a row of inputs; order: where each stored column's input stands, or null.
  void (*prepare)(const RecordLayout& layout, const float* x, const std::int32_t* order,
                  std::uint8_t* record);
  // Bytes of scratch that multiply needs.
  std::size_t (*scratch_bytes)(int tiles);
  // Products of the records' rows with blocks [first, last): out[row * stride + n] for the
  // segment's outputs n, plus bias[n] where there is one.
  void (*multiply)(const Segment& segment, const std::uint8_t* data, const RecordLayout& layout,
                   const std::uint8_t* records, int rows, int first, int last, float* out,
                   std::ptrdiff_t stride, const float* bias, std::uint8_t* scratch);
  // sums[r] = a[r] . x for r < rows, rows of `width` floats.
  void (*dots)(const float* a, const float* x, int rows, int width, float* sums);
};

}  // namespace polysilicon
