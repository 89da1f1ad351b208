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

// out[r] = W x[r] + bias for the rows that row_of(row, space) gives: it may compute them in
// `space`, of as many floats.
template <class RowOf>
void multiply_rows(Context& context, const Weight& weight, int rows, const RowOf& row_of,
                   float* out, std::ptrdiff_t out_stride, const float* bias) {
  if (rows <= 0) return;
  const Kernels& kernels = *context.kernels;
  const std::ptrdiff_t record = weight.layout.bytes;
  const int sets = static_cast<int>(weight.orders.size());
  const std::ptrdiff_t set_bytes = rows * record;
  const std::size_t scratch = kernels.products->scratch_bytes(weight.layout.tiles);
  const std::size_t space = static_cast<std::size_t>(weight.layout.tiles) * kTile * sizeof(float);
  const auto prepare = [&](int begin, int end, std::uint8_t* records, std::uint8_t* own) {
    for (int row = begin; row < end; ++row) {
      const float* x = row_of(row, reinterpret_cast<float*>(own));
      prepare_row(kernels, weight, x, records + row * record, set_bytes);
    }
  };
  if (rows <= kOwnRows) {
    context.reserve(scratch + space + static_cast<std::size_t>(sets * set_bytes));
    const int tasks = std::min(context.threads, weight.blocks);
    context.parallel(tasks, [&](int task, int thread) {
      std::uint8_t* own = context.scratch(thread);
      std::uint8_t* records = own + scratch + space;
      prepare(0, rows, records, own + scratch);
      const auto border = [&](int index) {
        return static_cast<int>(static_cast<std::int64_t>(weight.blocks) * index / tasks);
      };
      multiply_blocks(kernels, weight, 0, records, set_bytes, rows, border(task), border(task + 1),
                      out, out_stride, bias, own);
    });
    return;
  }
  auto* records = static_cast<std::uint8_t*>(
      context.workspace(Workspace::kProducts, static_cast<std::size_t>(sets * set_bytes)));
  context.reserve(std::max(scratch, space));
  const int prepare_tasks = std::min(context.threads, rows);
  context.parallel(prepare_tasks, [&](int task, int thread) {
    const auto border = [&](int index) {
      return static_cast<int>(static_cast<std::int64_t>(rows) * index / prepare_tasks);
    };
    prepare(border(task), border(task + 1), records, context.scratch(thread));
  });
  const int most_rows =
      std::max(static_cast<int>(kRecordBytes / record) / kRowStep, 4) * kRowStep;
  const int row_chunks = divide_up(rows, most_rows);
  const int chunk_rows = divide_up(divide_up(rows, row_chunks), kRowStep) * kRowStep;
  const int block_chunks = std::min(
      divide_up(weight.blocks, 2), divide_up(context.threads * kTasksPerThread, row_chunks));
  // An even number, since kernels take two blocks at a time.
  const int chunk_blocks = divide_up(divide_up(weight.blocks, block_chunks), 2) * 2;
  context.parallel(row_chunks * block_chunks, [&](int task, int thread) {
    const int row = task / block_chunks * chunk_rows;
    const int first = task % block_chunks * chunk_blocks;
    const int count = std::min(rows - row, chunk_rows);
    const int last = std::min(first + chunk_blocks, weight.blocks);
    if (count <= 0 || first >= last) return;
    multiply_blocks(kernels, weight, 0, records + row * record, set_bytes, count, first, last,
                    out + row * out_stride, out_stride, bias, context.scratch(thread));
  });
}

}  // namespace

void linear(Context& context, const Weight& weight, const float* x, std::ptrdiff_t x_stride,
            int rows, float* out, std::ptrdiff_t out_stride, const float* bias) {
  const auto row_of = [=](int row, float*) { return x + row * x_stride; };
  multiply_rows(context, weight, rows, row_of, out, out_stride, bias);
}

void gated_linear(Context& context, const Weight& weight, Activation kind, const View& gate,
                  const View& up, float* out, std::ptrdiff_t out_stride, const float* bias) {
  const auto kernel = context.kernels->elementwise->gated_act;
  const auto row_of = [&](int row, float* space) {
    kernel(kind, gate.row(row), up.row(row), gate.width, space);
    return space;
  };
  multiply_rows(context, weight, gate.rows, row_of, out, out_stride, bias);
}

}  // namespace polysilicon
