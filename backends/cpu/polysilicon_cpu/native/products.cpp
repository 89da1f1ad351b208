#include "products.h"

#include <algorithm>
#include <cstring>

#include "products_weight.h"

namespace polysilicon {

namespace {

// Up to so many rows, each thread prepares the inputs for itself, which saves a barrier.
constexpr int kOwnRows = 4;

// Records of rows that are multiplied with one block after another stay in the second-level cache.
constexpr std::ptrdiff_t kRecordBytes = 192 << 10;

// Rows that a kernel takes at once divide this.
constexpr int kRowStep = 12;

constexpr int kTasksPerThread = 8;

int divide_up(std::ptrdiff_t a, std::ptrdiff_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

void prepare_row(const Kernels& kernels, const Weight& weight, const float* x, std::uint8_t* record,
                 std::ptrdiff_t set_bytes) {
  for (const std::vector<std::int32_t>& order : weight.orders) {
    kernels.products->prepare(weight.layout, x, order.empty() ? nullptr : order.data(), record);
    record += set_bytes;
  }
}

void multiply_blocks(const Kernels& kernels, const Weight& weight, int expert,
                     const std::uint8_t* records, std::ptrdiff_t set_bytes, int rows, int first,
                     int last, float* out, std::ptrdiff_t out_stride, const float* bias,
                     std::uint8_t* scratch) {
  int begin = 0;
  for (const Segment& segment : weight.segments) {
    const int from = std::max(first - begin, 0);
    const int to = std::min(last - begin, segment.blocks);
    if (from < to) {
      kernels.products->multiply(segment, weight.expert(expert) + segment.data_at, weight.layout,
                                 records + segment.order * set_bytes, rows, from, to,
                                 out + segment.first, out_stride,
                                 bias == nullptr ? nullptr : bias + segment.first, scratch);
    }
    begin += segment.blocks;
  }
}

namespace {

// Outputs of each of two parts that are computed side by side, in blocks.
constexpr int kGatedBlocks = 4;

// What multiplies prepared rows with blocks [first, last): of all outputs or, with an activation,
// of the first of two parts, together with those of the second.
class Multiplier {
 public:
  Multiplier(const Kernels& kernels, const Weight& weight, const Activation* gated,
             std::ptrdiff_t set_bytes, const float* bias)
      : kernels_(kernels), weight_(weight), gated_(gated), set_bytes_(set_bytes), bias_(bias) {}

  int blocks() const { return gated_ == nullptr ? weight_.blocks : weight_.segments[0].blocks; }

  // Of each thread.
  std::size_t scratch_bytes(int rows) const {
    return products_bytes() + (gated_ == nullptr ? 0 : rows * kSpace * sizeof(float));
  }

  void run(const std::uint8_t* records, int rows, int first, int last, float* out,
           std::ptrdiff_t out_stride, std::uint8_t* scratch) const {
    if (gated_ == nullptr) {
      multiply_blocks(kernels_, weight_, 0, records, set_bytes_, rows, first, last, out,
                      out_stride, bias_, scratch);
      return;
    }
    auto* space = reinterpret_cast<float*>(scratch + products_bytes());
    for (int block = first; block < last; block += kGatedBlocks) {
      const int end = std::min(block + kGatedBlocks, last), begin = block * kLanes;
      for (int part = 0; part < 2; ++part) {
        const int before = part * weight_.segments[0].blocks;
        float* const target = space + part * kSpace / 2;
        multiply_blocks(kernels_, weight_, 0, records, set_bytes_, rows, before + block,
                        before + end, target - (weight_.segments[part].first + begin), kSpace,
                        bias_, scratch);
      }
      const int count = std::min(end * kLanes, weight_.segments[0].rows) - begin;
      for (int row = 0; row < rows; ++row) {
        const float* gate = space + row * kSpace;
        kernels_.elementwise->gated_act(*gated_, gate, gate + kSpace / 2, count,
                                        out + row * out_stride + begin);
      }
    }
  }

 private:
  static constexpr std::ptrdiff_t kSpace = 2 * kGatedBlocks * kLanes;  // floats a row

  std::size_t products_bytes() const {
    return (kernels_.products->scratch_bytes(weight_.layout.tiles) + 63) / 64 * 64;
  }

  const Kernels& kernels_;
  const Weight& weight_;
  const Activation* gated_;
  std::ptrdiff_t set_bytes_;
  const float* bias_;
};

// Products of the rows that row_of(row, space) gives: it may compute them in `space`, of as many
// floats.
template <class RowOf>
void multiply_rows(Context& context, const Weight& weight, int rows, const RowOf& row_of,
                   const Activation* gated, float* out, std::ptrdiff_t out_stride,
                   const float* bias) {
  if (rows <= 0) return;
  const std::ptrdiff_t record = weight.layout.bytes;
  const int sets = static_cast<int>(weight.orders.size());
  const std::ptrdiff_t set_bytes = rows * record;
  const Multiplier multiplier(*context.kernels, weight, gated, set_bytes, bias);
  const int blocks = multiplier.blocks();
  const std::size_t space = static_cast<std::size_t>(weight.layout.tiles) * kTile * sizeof(float);
  const auto prepare = [&](int begin, int end, std::uint8_t* records, std::uint8_t* own) {
    for (int row = begin; row < end; ++row) {
      const float* x = row_of(row, reinterpret_cast<float*>(own));
      prepare_row(*context.kernels, weight, x, records + row * record, set_bytes);
    }
  };
  if (rows <= kOwnRows) {
    const std::size_t scratch = multiplier.scratch_bytes(rows);
    context.reserve(scratch + space + static_cast<std::size_t>(sets * set_bytes));
    const int tasks = std::min(context.threads, blocks);
    context.parallel(tasks, [&](int task, int thread) {
      std::uint8_t* own = context.scratch(thread);
      std::uint8_t* records = own + scratch + space;
      prepare(0, rows, records, own + scratch);
      const auto border = [&](int index) {
        return static_cast<int>(static_cast<std::int64_t>(blocks) * index / tasks);
      };
      multiplier.run(records, rows, border(task), border(task + 1), out, out_stride, own);
    });
    return;
  }
  const int most_rows =
      std::max(static_cast<int>(kRecordBytes / record) / kRowStep, 4) * kRowStep;
  const int row_chunks = divide_up(rows, most_rows);
  const int chunk_rows = divide_up(divide_up(rows, row_chunks), kRowStep) * kRowStep;
  const int block_chunks =
      std::min(divide_up(blocks, 2), divide_up(context.threads * kTasksPerThread, row_chunks));
  // An even number, since kernels take two blocks at a time.
  const int chunk_blocks = divide_up(divide_up(blocks, block_chunks), 2) * 2;
  auto* records = static_cast<std::uint8_t*>(
      context.workspace(Workspace::kProducts, static_cast<std::size_t>(sets * set_bytes)));
  context.reserve(std::max(multiplier.scratch_bytes(chunk_rows), space));
  const int prepare_tasks = std::min(context.threads, rows);
  context.parallel(prepare_tasks, [&](int task, int thread) {
    const auto border = [&](int index) {
      return static_cast<int>(static_cast<std::int64_t>(rows) * index / prepare_tasks);
    };
    prepare(border(task), border(task + 1), records, context.scratch(thread));
  });
  context.parallel(row_chunks * block_chunks, [&](int task, int thread) {
    const int row = task / block_chunks * chunk_rows;
    const int first = task % block_chunks * chunk_blocks;
    const int count = std::min(rows - row, chunk_rows);
    const int last = std::min(first + chunk_blocks, blocks);
    if (count <= 0 || first >= last) return;
    multiplier.run(records + row * record, count, first, last, out + row * out_stride, out_stride,
                   context.scratch(thread));
  });
}

}  // namespace

void linear(Context& context, const Weight& weight, const float* x, std::ptrdiff_t x_stride,
            int rows, float* out, std::ptrdiff_t out_stride, const float* bias) {
  const auto row_of = [=](int row, float*) { return x + row * x_stride; };
  multiply_rows(context, weight, rows, row_of, nullptr, out, out_stride, bias);
}

void fused_linear(Context& context, const Weight& weight, const View& x, const Fused& fused,
                  float* out, std::ptrdiff_t out_stride, const float* bias) {
  const auto normed = [&](int row, float* space) {
    const auto kernel = context.kernels->elementwise->rms_norm;
    const float* input = x.row(row);
    if (fused.outer.weight == nullptr) return input;
    if (fused.inner.weight != nullptr) {
      kernel(input, nullptr, fused.inner.weight, fused.inner.eps, x.width, nullptr, space);
      input = space;
    }
    kernel(input, fused.residual.data ? fused.residual.row(row) : nullptr, fused.outer.weight,
           fused.outer.eps, x.width, fused.hidden.data ? fused.hidden.row(row) : nullptr, space);
    return static_cast<const float*>(space);
  };
  const Activation* gated = fused.gated ? &fused.activation : nullptr;
  if (x.rows > kOwnRows) {
    multiply_rows(context, weight, x.rows, normed, gated, out, out_stride, bias);
    return;
  }
  // Threads that prepare the inputs for themselves would each add the residual.
  auto* ready = static_cast<float*>(context.workspace(
      Workspace::kProducts, static_cast<std::size_t>(x.rows) * x.width * sizeof(float)));
  const float* inputs[kOwnRows];
  for (int row = 0; row < x.rows; ++row) inputs[row] = normed(row, ready + row * x.width);
  const auto row_of = [&](int row, float*) { return inputs[row]; };
  multiply_rows(context, weight, x.rows, row_of, gated, out, out_stride, bias);
}

}  // namespace polysilicon
