#include "elementwise.h"

#include <algorithm>
#include <cstring>

namespace polysilicon {
namespace {

// Below so many elements the other threads would take longer to come than the work lasts.
constexpr int kLeast = 8192;

// body(first_row, last_row) over all rows.
template <class Body>
void by_rows(Context& context, int rows, int width, const Body& body) {
  const int per_task = std::max(1, kLeast / 2 / std::max(1, width));
  if (rows <= per_task || static_cast<long long>(rows) * width < kLeast) {
    body(0, rows);
    return;
  }
  const int tasks = (rows + per_task - 1) / per_task;
  context.parallel(tasks, [&](int task, int) {
    body(task * per_task, std::min(rows, (task + 1) * per_task));
  });
}

// body(row, first_column, count) over all elements; long rows are cut.
template <class Body>
void by_elements(Context& context, int rows, int width, const Body& body) {
  if (static_cast<long long>(rows) * width < kLeast) {
    for (int row = 0; row < rows; ++row) body(row, 0, width);
    return;
  }
  const int columns = std::min(width, kLeast / 2);
  const int cuts = (width + columns - 1) / columns;
  const int rows_per_task = std::max(1, kLeast / 2 / columns);
  const int groups = (rows + rows_per_task - 1) / rows_per_task;
  context.parallel(groups * cuts, [&](int task, int) {
    const int column = task % cuts * columns;
    const int first = task / cuts * rows_per_task;
    const int last = std::min(rows, first + rows_per_task);
    for (int row = first; row < last; ++row) {
      body(row, column, std::min(columns, width - column));
    }
  });
}

}  // namespace

void rms_norm(Context& context, const View& x, const View& residual, const float* weight, float eps,
              const View& hidden, const View& out) {
  const auto kernel = context.kernels->elementwise->rms_norm;
  by_rows(context, x.rows, x.width, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      kernel(x.row(row), residual.data ? residual.row(row) : nullptr, weight, eps, x.width,
             hidden.data ? hidden.row(row) : nullptr, out.row(row));
    }
  });
}

void layer_norm(Context& context, const View& x, const View& residual, const float* weight,
                const float* bias, float eps, const View& hidden, const View& out) {
  const auto kernel = context.kernels->elementwise->layer_norm;
  by_rows(context, x.rows, x.width, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      kernel(x.row(row), residual.data ? residual.row(row) : nullptr, weight, bias, eps, x.width,
             hidden.data ? hidden.row(row) : nullptr, out.row(row));
    }
  });
}

void add(Context& context, const View& a, const View& b, const View& out) {
  const auto kernel = context.kernels->elementwise->add;
  by_elements(context, a.rows, a.width, [&](int row, int column, int count) {
    kernel(a.row(row) + column, b.row(row) + column, count, out.row(row) + column);
  });
}

void scale(Context& context, const View& x, float factor, const View& out) {
  const auto kernel = context.kernels->elementwise->scale;
  by_elements(context, x.rows, x.width, [&](int row, int column, int count) {
    kernel(x.row(row) + column, factor, count, out.row(row) + column);
  });
}

void softcap(Context& context, const View& x, float cap, const View& out) {
  const auto kernel = context.kernels->elementwise->softcap;
  by_elements(context, x.rows, x.width, [&](int row, int column, int count) {
    kernel(x.row(row) + column, cap, count, out.row(row) + column);
  });
}

void gated_act(Context& context, Activation kind, const View& gate, const View& up,
               const View& out) {
  const auto kernel = context.kernels->elementwise->gated_act;
  by_elements(context, gate.rows, gate.width, [&](int row, int column, int count) {
    kernel(kind, gate.row(row) + column, up.row(row) + column, count, out.row(row) + column);
  });
}

void rotate(Context& context, const View& x, const RopeTable& rope, int heads, const View& out) {
  const auto kernel = context.kernels->elementwise->rope;
  by_rows(context, x.rows, x.width, [&](int first, int last) {
    for (int row = first; row < last; ++row) {
      kernel(x.row(row), rope.cosine(row), rope.sine(row), heads, x.width / heads,
             2 * rope.pairs(), rope.interleaved(), out.row(row));
    }
  });
}

void copy(Context& context, const View& x, const View& out) {
  by_elements(context, x.rows, x.width, [&](int row, int column, int count) {
    std::memcpy(out.row(row) + column, x.row(row) + column,
                static_cast<std::size_t>(count) * sizeof(float));
  });
}

void select(Context& context, const View& x, const std::int32_t* rows, const View& out) {
  by_elements(context, out.rows, out.width, [&](int row, int column, int count) {
    std::memcpy(out.row(row) + column, x.row(rows[row]) + column,
                static_cast<std::size_t>(count) * sizeof(float));
  });
}

}  // namespace polysilicon
