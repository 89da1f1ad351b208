#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_scratch.h"
#include "levels/elementwise.h"

namespace polysilicon {
namespace {

// From so many queries of a key on, those of one token or all, products of bf16 pairs are worth it.
constexpr int kPairGroup = 8;
constexpr int kPairRows = 24;
constexpr int kPrefetchRows = 12;  // up to here reading may take longer than computing
constexpr int kStoredTokens = 8;   // of one task
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

float scale_of(const float* calibrated, int head) {
  return calibrated == nullptr ? 0.0f : calibrated[head];
}

int padded(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Keys of consecutive units.
struct Units {
  const std::uint8_t* const* keys = nullptr;
  int count = 0;
};

class Attention {
 public:
  Attention(Context& context, KVPool& pool, int layer, const View& q, const BatchView& batch,
            const AttentionParameters& parameters, float* out)
      : context_(context),
        kernels_(*context.kernels->attention),
        pool_(pool),
        layout_(pool.layout()),
        plan_(pool.plan),
        layer_(layer),
        q_(q),
        batch_(batch),
        parameters_(parameters),
        out_(out),
        group_(parameters.heads / layout_.heads),
        dim_(padded(layout_.key.dim, 2)),
        width_(padded(layout_.value.dim, 16)),
        result_floats_(width_ + 16),
        codes_(has_scale(layout_.key.storage) && has_scale(layout_.value.storage)) {}

  void store(const View& k, const View& v);
  void run();

 private:
  void prepare(const float* x, int token, const float* norm, float eps, float* out) const;
  void run_item(int number, int thread);
  void attend_part(const AttentionPlan::Item& item, int part, bool pairs, const Scratch& scratch,
                   const Units& next);
  bool mask(TilePart& tile, const AttentionPlan::Item& item, int row, int part,
            std::uint8_t* visible) const;
  void widen(const Units& units, const Scratch& scratch) const;
  Units resolve(const AttentionPlan::Item& item, int part, const Scratch& scratch,
                const std::uint8_t** keys, const std::uint8_t** values) const;
  void merge(int number, int thread);
  void finish_row(int token, int head, float largest, float total, const float* mixed) const;

  // Whether reading takes longer than computing.
  bool prefetches(const AttentionPlan::Item& item) const {
    return item.count * group_ <= kPrefetchRows && layout_.page_size >= kUnit;
  }
  const AttentionPlan::Token& token_of(const AttentionPlan::Item& item, int row) const {
    return plan_.tokens[plan_.order[item.first + row / group_]];
  }
  Scratch scratch_of(int thread) const {
    Cutter cutter(context_.scratch(thread));
    return scratch(cutter);
  }
  Scratch scratch(Cutter& cutter) const {
    const bool gathers = layout_.page_size < kUnit;
    return Scratch(cutter, plan_.item_tokens * group_, dim_, width_,
                   gathers ? kPartUnits * pool_.unit_bytes() : 0,
                   codes_ ? kPartUnits * (widened_bytes(dim_) + widened_bytes(width_)) : 0);
  }
  // Of a unit's keys or values as pairs of bf16, with their scales.
  static std::size_t widened_bytes(int columns) {
    return sizeof(std::uint16_t) * kUnit * columns + sizeof(float) * kUnit;
  }

  Context& context_;
  const AttentionKernels& kernels_;
  KVPool& pool_;
  const KVLayout& layout_;
  AttentionPlan& plan_;
  int layer_;
  const View& q_;
  const BatchView& batch_;
  const AttentionParameters& parameters_;
  float* out_;
  int group_, dim_, width_;
  std::size_t result_floats_;  // of a partial result: the mixed values, largest and total
  bool codes_;  // keys and values both
  float* partial_ = nullptr;
};

// Norm, rotation and, for int8 keys, the transform of one head.
void Attention::prepare(const float* x, int token, const float* norm, float eps,
                        float* out) const {
  const ElementwiseKernels& elementwise = *context_.kernels->elementwise;
  const int dim = layout_.key.dim;
  if (norm != nullptr) {
    elementwise.rms_norm(x, nullptr, norm, eps, dim, nullptr, out);
    x = out;
  }
  if (parameters_.rope != nullptr) {
    const RopeTable& rope = *parameters_.rope;
    elementwise.rope(x, rope.cosine(token), rope.sine(token), 1, dim, 2 * rope.pairs(),
                     rope.interleaved(), out);
  } else if (norm == nullptr) {
    std::memcpy(out, x, sizeof(float) * dim);
  }
  if (layout_.key.storage == Storage::kI8) kernels_.turn(out, dim, out);
}

void Attention::store(const View& k, const View& v) {
  const int tokens = batch_.query_start[batch_.sequence_count];
  const std::int32_t* slots = batch_.groups[layout_.group].slots;
  if (layer_ == 0) pool_.use(slots, tokens);
  context_.reserve(sizeof(float) * std::max(layout_.key.dim, layout_.value.dim));
  context_.parallel((tokens + kStoredTokens - 1) / kStoredTokens, [&](int task, int thread) {
    float* vector = context_.scratch<float>(thread);
    const int end = std::min(tokens, (task + 1) * kStoredTokens);
    for (int token = task * kStoredTokens; token < end; ++token) {
      for (int head = 0; head < layout_.heads; ++head) {
        int offset;
        std::uint8_t* unit = pool_.unit(layer_, slots[token], head, &offset);
        prepare(k.row(token) + head * layout_.key.dim, token, parameters_.k_norm,
                parameters_.k_eps, vector);
        kernels_.store_key(layout_.key.storage, vector, layout_.key.dim,
                           scale_of(parameters_.key_scales, head), offset, unit);
        const float* value = v.row(token) + head * layout_.value.dim;
        if (layout_.value.storage == Storage::kI8) {
          kernels_.turn(value, layout_.value.dim, vector);
          value = vector;
        }
        kernels_.store_value(layout_.value.storage, value, layout_.value.dim, width_,
                             scale_of(parameters_.value_scales, head), offset,
                             unit + pool_.key_bytes());
      }
    }
  });
}

void Attention::run() {
  plan_.make(layout_, batch_, group_, parameters_.causal, context_.threads);
  const std::size_t columns = static_cast<std::size_t>(parameters_.heads) * layout_.value.dim;
  const std::size_t owned = plan_.tokens.size();
  std::memset(out_ + owned * columns, 0, sizeof(float) * columns * (batch_.token_count - owned));
  Cutter cutter(nullptr);
  scratch(cutter);
  context_.reserve(cutter.used());
  if (plan_.partial_rows > 0) {
    partial_ = static_cast<float*>(context_.workspace(
        Workspace::kAttention, sizeof(float) * plan_.partial_rows * result_floats_));
  }
  context_.parallel(static_cast<int>(plan_.items.size()),
                    [&](int task, int thread) { run_item(task, thread); });
  if (!plan_.split.empty()) {
    context_.parallel(static_cast<int>(plan_.split.size()) * layout_.heads,
                      [&](int task, int thread) { merge(task, thread); });
  }
}

// Pointers to the units that an item needs of a part, at their places in it; the rest are left
// alone. values: null where only the keys are wanted.
Units Attention::resolve(const AttentionPlan::Item& item, int part, const Scratch& scratch,
                         const std::uint8_t** keys, const std::uint8_t** values) const {
  int low = kPart, high = 0;
  const int start = part * kPart;
  for (int row = 0; row < item.count * group_; row += group_) {
    const AttentionPlan::Token& token = token_of(item, row);
    low = std::min(low, std::max(token.low - start, 0));
    high = std::max(high, std::min(token.high - start, kPart));
  }
  const GroupView& tables = batch_.groups[layout_.group];
  const std::int32_t* table =
      tables.page_table + static_cast<std::size_t>(token_of(item, 0).sequence) * tables.width;
  for (int unit = low / kUnit; unit * kUnit < high; ++unit) {
    const int index = start + unit * kUnit;
    if (layout_.page_size >= kUnit) {
      keys[unit] = pool_.page(layer_, table[index / layout_.page_size], item.head) +
                   index % layout_.page_size / kUnit * pool_.unit_bytes();
    } else if (values != nullptr) {
      std::uint8_t* into = scratch.gathered + unit * pool_.unit_bytes();
      // Pages behind the window are not the sequence's own any more.
      const int begin = std::max(0, low - unit * kUnit) / layout_.page_size * layout_.page_size;
      const int end = std::min(kUnit, high - unit * kUnit);
      std::memset(into, 0, pool_.unit_bytes());
      for (int slot = begin; slot < end; slot += layout_.page_size) {
        pool_.gather(layer_, table[(index + slot) / layout_.page_size], item.head, slot, into);
      }
      keys[unit] = into;
    }
    if (values != nullptr) values[unit] = keys[unit] + pool_.key_bytes();
  }
  const int first = low / kUnit;
  return {keys + first, std::max(0, (high + kUnit - 1) / kUnit - first)};
}

// Replaces a part's units by their bf16.
void Attention::widen(const Units& units, const Scratch& scratch) const {
  const std::size_t unit_bytes = widened_bytes(dim_) + widened_bytes(width_);
  const std::size_t first = units.keys - scratch.pointers;
  for (std::size_t unit = first; unit < first + units.count; ++unit) {
    std::uint8_t* into = scratch.widened + unit * unit_bytes;
    const auto widen_plane = [&](Storage storage, const std::uint8_t*& codes, int rows,
                                 int columns) {
      const int all = rows * columns / kUnit;
      kernels_.widen(storage, codes, rows, columns, into);
      std::memcpy(into + widened_bytes(all) - sizeof(float) * kUnit, codes + scales_start(all),
                  sizeof(float) * kUnit);
      codes = into;
      into += widened_bytes(all);
    };
    widen_plane(layout_.key.storage, scratch.pointers[unit], dim_, kUnit);
    widen_plane(layout_.value.storage, scratch.pointers[kPartUnits + unit], kUnit, width_);
  }
}

// Fills in what a tile whose first row is `row` sees of a part; false where that is nothing.
bool Attention::mask(TilePart& tile, const AttentionPlan::Item& item, int row, int part,
                     std::uint8_t* visible) const {
  std::int32_t* low = const_cast<std::int32_t*>(tile.low);
  std::int32_t* high = const_cast<std::int32_t*>(tile.high);
  const int start = part * kPart;
  tile.first = kPart;
  tile.last = 0;
  tile.visible = nullptr;
  bool masked = false;
  for (int r = 0; r < tile.rows; ++r) {
    const AttentionPlan::Token& token = token_of(item, row + r);
    const AttentionPlan::Sequence& sequence = plan_.sequences[token.sequence];
    low[r] = std::clamp(token.low - start, 0, kPart);
    high[r] = std::clamp(token.high - start, 0, kPart);
    masked = masked || (sequence.masked && token.high - start > 0 &&
                        sequence.before < start + kPart);
    if (low[r] >= high[r]) continue;
    tile.first = std::min<int>(tile.first, low[r]);
    tile.last = std::max<int>(tile.last, high[r]);
  }
  if (tile.first >= tile.last) return false;
  if (!masked) return true;
  std::memset(visible, 1, static_cast<std::size_t>(tile.rows) * kPart);
  for (int r = 0; r < tile.rows; ++r) {
    const int index = plan_.order[item.first + (row + r) / group_];
    const AttentionPlan::Sequence& sequence = plan_.sequences[plan_.tokens[index].sequence];
    const int count = sequence.end - sequence.begin;
    for (int j = std::max(0, start - sequence.before); j < count; ++j) {
      const int place = sequence.before + j - start;
      if (place >= kPart) break;
      bool seen = batch_.tree_mask != nullptr
                      ? batch_.tree_mask[static_cast<std::size_t>(index) * batch_.tree_width + j]
                      : !parameters_.causal || j <= index - sequence.begin;
      if (layout_.window > 0) {
        seen = seen && batch_.positions[sequence.begin + j] >
                           batch_.positions[index] - layout_.window;
      }
      visible[r * kPart + place] = seen;
    }
  }
  tile.visible = visible;
  return true;
}

void Attention::attend_part(const AttentionPlan::Item& item, int part, bool pairs,
                            const Scratch& scratch, const Units& next) {
  const int rows = item.count * group_;
  const std::size_t tile_bytes = static_cast<std::size_t>(kernels_.rows) * dim_ * sizeof(float);
  std::int32_t low[kTileRows], high[kTileRows];
  float largest[kTileRows], total[kTileRows];
  TilePart tile = {};
  tile.key_storage = layout_.key.storage;
  tile.value_storage = layout_.value.storage;
  tile.dim = dim_;
  tile.width = width_;
  tile.pairs = pairs;
  tile.keys = scratch.pointers;
  tile.values = scratch.pointers + kPartUnits;
  tile.next = next.keys;
  tile.next_units = next.count;
  const int element = pairs ? sizeof(std::uint16_t) : 1;
  if (has_scale(layout_.key.storage)) tile.key_scales = scales_start(dim_) * element;
  if (has_scale(layout_.value.storage)) tile.value_scales = scales_start(width_) * element;
  if (prefetches(item)) {
    tile.key_bytes = static_cast<int>(pool_.key_bytes());
    tile.value_bytes = static_cast<int>(pool_.value_bytes());
  }
  tile.low = low;
  tile.high = high;
  tile.scores = scratch.scores;
  tile.largest = largest;
  tile.total = total;
  tile.mixed = scratch.part_mixed;
  tile.softcap = parameters_.softcap;
  for (int row = 0; row < rows; row += kernels_.rows) {
    tile.rows = std::min(kernels_.rows, rows - row);
    tile.queries = scratch.queries + row / kernels_.rows * tile_bytes;
    const bool seen = mask(tile, item, row, part, scratch.visible);
    if (seen) kernels_.attend(tile);
    for (int r = 0; r < tile.rows; ++r) {
      const AttentionPlan::Token& token = token_of(item, row + r);
      const float* mixed = scratch.part_mixed + static_cast<std::size_t>(r) * width_;
      if (token.partial < 0) {
        if (!seen) continue;
        kernels_.fold(largest[r], total[r], mixed, width_, &scratch.largest[row + r],
                      &scratch.total[row + r],
                      scratch.mixed + static_cast<std::size_t>(row + r) * width_);
      } else {
        float* result = partial_ + result_floats_ * AttentionPlan::partial_row(
                                                        token, group_, item.head, part,
                                                        (row + r) % group_);
        result[width_] = seen ? largest[r] : kNothing;
        if (result[width_] == kNothing) continue;
        result[width_ + 1] = total[r];
        std::memcpy(result, mixed, sizeof(float) * width_);
      }
    }
  }
}

void Attention::run_item(int number, int thread) {
  const AttentionPlan::Item& item = plan_.items[number];
  const Scratch scratch = scratch_of(thread);
  const int rows = item.count * group_;
  const bool bf16 = layout_.key.storage == Storage::kBF16 &&
                    layout_.value.storage == Storage::kBF16;
  const bool pairs = kernels_.pairs && !parameters_.exact &&
                     ((bf16 && group_ >= kPairGroup) || ((bf16 || codes_) && rows >= kPairRows));
  const bool whole = token_of(item, 0).partial < 0;
  const float softcap = parameters_.softcap;
  const float factor = softcap != 0 ? parameters_.scale / softcap : parameters_.scale * kLog2E;
  const std::size_t tile_bytes = static_cast<std::size_t>(kernels_.rows) * dim_ * sizeof(float);

  for (int row = 0; row < rows; row += kernels_.rows) {
    std::uint8_t* tile = scratch.queries + row / kernels_.rows * tile_bytes;
    const int count = std::min(kernels_.rows, rows - row);
    const int tile_rows = kernels_.padded_rows(count);
    // Rows and dimensions that only pad have to be finite.
    if (tile_rows != count || dim_ != layout_.key.dim) std::memset(tile, 0, tile_bytes);
    for (int r = 0; r < count; ++r) {
      const int token = plan_.order[item.first + (row + r) / group_];
      const int head = item.head * group_ + (row + r) % group_;
      prepare(q_.row(token) + head * layout_.key.dim, token, parameters_.q_norm, parameters_.q_eps,
              scratch.query);
      kernels_.pack_query(scratch.query, factor, layout_.key.dim, r, tile_rows, pairs, tile);
    }
  }
  if (whole) {
    for (int row = 0; row < rows; ++row) {
      scratch.largest[row] = kNothing;
      scratch.total[row] = 0;
    }
    std::memset(scratch.mixed, 0, sizeof(float) * rows * width_);
  }
  for (int part = item.first_part; part < item.last_part; ++part) {
    const Units units =
        resolve(item, part, scratch, scratch.pointers, scratch.pointers + kPartUnits);
    if (pairs && codes_) widen(units, scratch);
    Units next;
    if (prefetches(item)) {
      const std::uint8_t** keys = scratch.pointers + 2 * kPartUnits;
      // This thread's next item is likely the one after those that the others are at.
      const std::size_t other = static_cast<std::size_t>(number) + context_.threads;
      if (part + 1 < item.last_part) {
        next = resolve(item, part + 1, scratch, keys, nullptr);
      } else if (other < plan_.items.size()) {
        const AttentionPlan::Item& following = plan_.items[other];
        if (following.first_part < following.last_part) {
          next = resolve(following, following.first_part, scratch, keys, nullptr);
        }
      }
    }
    attend_part(item, part, pairs, scratch, next);
  }
  if (!whole) return;
  for (int row = 0; row < rows; ++row) {
    finish_row(plan_.order[item.first + row / group_], item.head * group_ + row % group_,
               scratch.largest[row], scratch.total[row],
               scratch.mixed + static_cast<std::size_t>(row) * width_);
  }
}

// Folds the partial results of one token and key head, in the order of the parts.
void Attention::merge(int number, int thread) {
  const Scratch scratch = scratch_of(thread);
  const int index = plan_.split[number / layout_.heads];
  const int head = number % layout_.heads;
  const AttentionPlan::Token& token = plan_.tokens[index];
  for (int query = 0; query < group_; ++query) {
    float largest = kNothing, total = 0;
    std::memset(scratch.mixed, 0, sizeof(float) * width_);
    for (int part = token.first_part; part < token.last_part; ++part) {
      const float* result = partial_ + result_floats_ * AttentionPlan::partial_row(
                                                            token, group_, head, part, query);
      kernels_.fold(result[width_], result[width_ + 1], result, width_, &largest, &total,
                    scratch.mixed);
    }
    finish_row(index, head * group_ + query, largest, total, scratch.mixed);
  }
}

void Attention::finish_row(int token, int head, float largest, float total,
                           const float* mixed) const {
  const float sink = parameters_.sinks == nullptr ? kNothing : parameters_.sinks[head] * kLog2E;
  const std::size_t index = static_cast<std::size_t>(token) * parameters_.heads + head;
  float* out = out_ + index * layout_.value.dim;
  kernels_.finish(largest, total, mixed, sink, layout_.value.dim, out);
  if (layout_.value.storage == Storage::kI8) kernels_.turn(out, layout_.value.dim, out);
}

}  // namespace

void attention(Context& context, KVPool& pool, int layer, const View& q, const View& k,
               const View& v, const BatchView& batch, const AttentionParameters& parameters,
               float* out) {
  Attention work(context, pool, layer, q, batch, parameters, out);
  if (k.data != nullptr) work.store(k, v);
  work.run();
}

}  // namespace polysilicon
