#include <algorithm>
#include <cstring>

#include "products_routing.h"
#include "products_weight.h"

namespace polysilicon {

namespace {

constexpr int kTasksPerThread = 4;

// Takes pieces of one workspace, each at a cache line.
class Pieces {
 public:
  explicit Pieces(std::uint8_t* memory) : memory_(memory) {}

  template <class T>
  T* take(std::ptrdiff_t count) {
    std::uint8_t* piece = memory_ + used_;
    used_ += (count * static_cast<std::ptrdiff_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  std::uint8_t* memory_;
  std::ptrdiff_t used_ = 0;
};

// Rows are pairs of a token and one of its experts, sorted by expert.
struct Plan {
  std::int32_t* chosen;   // [tokens, top_k]
  float* weights;         // [tokens, top_k]
  std::int32_t* row_of;   // [tokens, top_k]
  std::int32_t* start;    // [experts + 1]
  std::int32_t* expert;   // [rows]
  float* scores;          // [threads]
  std::uint8_t* records;  // of x, then of the activated rows
  std::uint8_t* inner_records;
  float* inner;  // [rows, 2 F]
  float* outer;  // [rows, D]
  std::size_t bytes;

  Plan(std::uint8_t* memory, const Context& context, int tokens, int top_k, const Weight& gate_up,
       const Weight& down) {
    Pieces pieces(memory);
    const std::ptrdiff_t rows = static_cast<std::ptrdiff_t>(tokens) * top_k;
    chosen = pieces.take<std::int32_t>(rows);
    weights = pieces.take<float>(rows);
    row_of = pieces.take<std::int32_t>(rows);
    start = pieces.take<std::int32_t>(gate_up.experts + 1);
    expert = pieces.take<std::int32_t>(rows);
    scores = pieces.take<float>(static_cast<std::ptrdiff_t>(context.threads) *
                                route_scratch(gate_up.experts));
    records = pieces.take<std::uint8_t>(set_bytes(gate_up, rows) * sets(gate_up));
    inner_records = pieces.take<std::uint8_t>(set_bytes(down, rows) * sets(down));
    inner = pieces.take<float>(rows * gate_up.outputs);
    outer = pieces.take<float>(rows * down.outputs);
    bytes = pieces.used();
  }

  static std::ptrdiff_t sets(const Weight& weight) {
    return static_cast<std::ptrdiff_t>(weight.orders.size());
  }
  static std::ptrdiff_t set_bytes(const Weight& weight, std::ptrdiff_t rows) {
    return rows * weight.layout.bytes;
  }
};

// Numbers the rows by expert.
void sort_rows(const Plan& plan, int rows, int experts) {
  std::fill_n(plan.start, experts + 1, 0);
  for (int i = 0; i < rows; ++i) ++plan.start[plan.chosen[i] + 1];
  for (int e = 0; e < experts; ++e) plan.start[e + 1] += plan.start[e];
  for (int i = 0; i < rows; ++i) {
    const int row = plan.start[plan.chosen[i]]++;
    plan.row_of[i] = row;
    plan.expert[row] = plan.chosen[i];
  }
  for (int e = experts; e > 0; --e) plan.start[e] = plan.start[e - 1];
  plan.start[0] = 0;
}

// Products of every expert's rows with its matrix.
void grouped_product(Context& context, const Weight& weight, const Plan& plan,
                     const std::uint8_t* records, int rows, const float* bias, float* out) {
  const int chunks = std::min((weight.blocks + 1) / 2, context.threads * kTasksPerThread);
  const int blocks = (weight.blocks + 2 * chunks - 1) / (2 * chunks) * 2;
  const std::ptrdiff_t set_bytes = Plan::set_bytes(weight, rows);
  context.parallel(weight.experts * chunks, [&](int task, int thread) {
    const int expert = task / chunks;
    const int begin = plan.start[expert], count = plan.start[expert + 1] - begin;
    const int first = task % chunks * blocks;
    const int last = std::min(first + blocks, weight.blocks);
    if (count == 0 || first >= last) return;
    multiply_blocks(*context.kernels, weight, expert, records + begin * weight.layout.bytes,
                    set_bytes, count, first, last,
                    out + static_cast<std::ptrdiff_t>(begin) * weight.outputs, weight.outputs,
                    bias == nullptr ? nullptr
                                    : bias + static_cast<std::ptrdiff_t>(expert) * weight.outputs,
                    context.scratch(thread));
  });
}

template <class Body>
void each_row(Context& context, int rows, const Body& body) {
  const int tasks = std::min(context.threads, rows);
  context.parallel(tasks, [&](int task, int thread) {
    const int end = static_cast<int>(static_cast<std::int64_t>(rows) * (task + 1) / tasks);
    for (int row = static_cast<int>(static_cast<std::int64_t>(rows) * task / tasks); row < end;
         ++row) {
      body(row, thread);
    }
  });
}

}  // namespace

void moe(Context& context, const float* x, const float* router_logits, int rows,
         const Weight& gate_up, const Weight& down, const Routing& routing, Activation activation,
         const float* gate_up_bias, const float* down_bias, float* out) {
  if (rows <= 0) return;
  const int top_k = routing.top_k, experts = gate_up.experts, pairs = rows * top_k;
  const Kernels& kernels = *context.kernels;
  const std::size_t bytes = Plan(nullptr, context, rows, top_k, gate_up, down).bytes;
  const Plan plan(static_cast<std::uint8_t*>(context.workspace(Workspace::kMoe, bytes)), context,
                  rows, top_k, gate_up, down);
  const int width = down.inputs;
  context.reserve(std::max(kernels.products->scratch_bytes(gate_up.layout.tiles),
                           kernels.products->scratch_bytes(down.layout.tiles)) +
                  static_cast<std::size_t>(width) * sizeof(float));
  each_row(context, rows, [&](int token, int thread) {
    route(router_logits + static_cast<std::ptrdiff_t>(token) * experts, experts, routing,
          plan.scores + thread * route_scratch(experts), plan.chosen + token * top_k,
          plan.weights + token * top_k);
  });
  sort_rows(plan, pairs, experts);
  const std::ptrdiff_t record = gate_up.layout.bytes;
  const std::ptrdiff_t set_bytes = Plan::set_bytes(gate_up, pairs);
  each_row(context, rows, [&](int token, int) {
    const std::int32_t* own = plan.row_of + token * top_k;
    prepare_row(kernels, gate_up, x + static_cast<std::ptrdiff_t>(token) * gate_up.inputs,
                plan.records + own[0] * record, set_bytes);
    for (int choice = 1; choice < top_k; ++choice) {
      for (std::ptrdiff_t set = 0; set < Plan::sets(gate_up); ++set) {
        std::uint8_t* records = plan.records + set * set_bytes;
        std::memcpy(records + own[choice] * record, records + own[0] * record,
                    static_cast<std::size_t>(record));
      }
    }
  });
  grouped_product(context, gate_up, plan, plan.records, pairs, gate_up_bias, plan.inner);
  each_row(context, pairs, [&](int row, int thread) {
    const float* gate = plan.inner + static_cast<std::ptrdiff_t>(row) * gate_up.outputs;
    float* active = context.scratch<float>(thread);
    kernels.elementwise->gated_act(activation, gate, gate + width, width, active);
    prepare_row(kernels, down, active, plan.inner_records + row * down.layout.bytes,
                Plan::set_bytes(down, pairs));
  });
  grouped_product(context, down, plan, plan.inner_records, pairs, down_bias, plan.outer);
  each_row(context, rows, [&](int token, int) {
    float* target = out + static_cast<std::ptrdiff_t>(token) * down.outputs;
    std::fill_n(target, down.outputs, 0.0f);
    for (int choice = 0; choice < top_k; ++choice) {
      const float weight = plan.weights[token * top_k + choice];
      const float* part = plan.outer + static_cast<std::ptrdiff_t>(
                                           plan.row_of[token * top_k + choice]) * down.outputs;
      for (int n = 0; n < down.outputs; ++n) target[n] += weight * part[n];
    }
  });
}

}  // namespace polysilicon
