// The inner loops of attention, compiled once per level. No pointer needs an alignment.
//
// A part is up to 256 consecutive keys of a context that begin at a multiple of 256; a tile is up
// to `rows` queries that read the same keys. Every sum over a row runs in one order, whatever the
// tile and the other rows: a row's result does not depend, to the bit, on how work was split.
#pragma once

#include <cstdint>

namespace polysilicon {

enum class Storage : int { kF32, kF16, kBF16, kI8, kF8 };  // kF8: e4m3fn

// Whether a slot has codes of a byte, and a scale.
constexpr bool has_scale(Storage storage) {
  return storage == Storage::kI8 || storage == Storage::kF8;
}

constexpr int kUnit = 16;  // slots
constexpr int kPart = 256;  // keys
constexpr int kPartUnits = kPart / kUnit;

// Where the scales of a unit's slots stand, behind codes of keys of `columns` dimensions (rounded up
// to an even number) or of values of that width.
constexpr int scales_start(int columns) { return columns * kUnit; }

// A tile against a part. Places of keys are relative to the part's start.
struct TilePart {
  Storage key_storage, value_storage;
  int rows;
  int dim;    // of queries and keys, even
  int width;  // of values, a multiple of 16
  const void* queries;  // from pack_queries
  bool pairs;           // products of bf16 pairs, where packed so
  const std::uint8_t* const* keys;    // the part's units
  const std::uint8_t* const* values;
  // Where in a unit's keys and values 16 floats stand that they are to be multiplied by; 0 for none.
  int key_scales, value_scales;
  // To prefetch: bytes of a unit's keys and values, 0 where they are in the cache already, and the
  // keys that will be read after this part.
  int key_bytes, value_bytes;
  const std::uint8_t* const* next;
  int next_units;
  int first, last;                    // keys that any row sees lie in [first, last)
  const std::int32_t* low;            // [rows]: each row sees [low, high)
  const std::int32_t* high;
  const std::uint8_t* visible;        // [rows][256]: and of these, those that are not 0; or null
  float softcap;                      // 0 for none; scores come divided by it
  float* scores;                      // scratch, [padded rows][256]
  // Results by row: the largest score in units of log 2 (-inf where nothing is seen), the sum of
  // 2^(score - largest), and the mixed values [padded rows][width].
  float* largest;
  float* total;
  float* mixed;
};

struct AttentionKernels {
  int rows;          // of a full tile, at most kTileRows
  bool pairs;        // whether products of bf16 pairs are there
  // The least row count with a kernel of its own that holds `rows`.
  int (*padded_rows)(int rows);
  // Puts row `row` of a tile of `padded` rows in place: `query` is [dim], times `scale`.
  void (*pack_query)(const float* query, float scale, int dim, int row, int padded, bool pairs,
                     void* tile);
  void (*attend)(const TilePart& part);
  // Folds a part into a row's state; they start at largest -inf, total 0 and mixed 0.
  void (*fold)(float part_largest, float part_total, const float* part_mixed, int width,
               float* largest, float* total, float* mixed);
  // The row's result; sink: in units of log 2, -inf for none.
  void (*finish)(float largest, float total, const float* mixed, float sink, int dim, float* out);
  // Round a vector to the storage and put it at slot `offset` of a unit. calibrated: the scale of
  // its codes, or 0 for the vector's own.
  void (*store_key)(Storage storage, const float* key, int dim, float calibrated, int offset,
                    void* unit);
  void (*store_value)(Storage storage, const float* value, int dim, int width, float calibrated,
                      int offset, void* unit);
  // The Walsh-Hadamard transform of `polysilicon.backend.KV_DTYPES`; out may be x.
  void (*turn)(const float* x, int dim, float* out);
  // Codes [rows][columns], `rows` even, as bf16 [rows / 2][columns][2]: a unit's keys [dim][16] or
  // values [16][width] in the order for products of pairs. Null without these.
  void (*widen)(Storage storage, const std::uint8_t* codes, int rows, int columns, void* pairs);
  // Cosines and sines, times scale, of position * frequency.
  void (*angles)(const double* frequencies, int pairs, float scale, int position, float* cosine,
                 float* sine);
};

constexpr int kTileRows = 12;
constexpr int kMaxDim = 1024;  // of a head

}  // namespace polysilicon
