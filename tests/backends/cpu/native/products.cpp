// Products of random encodings against float64.

#include "products.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "checks.h"
#include "elementwise.h"
#include "numbers.h"

namespace polysilicon::checks {
namespace {

using Values = std::vector<double>;

// Numbers of a type, and what they are.
struct Numbers {
  Number type;
  std::vector<std::uint8_t> bytes;
  Values values;

  Numbers(Random& random, Number type, int count) : type(type) {
    const std::vector<float> drawn = random.normal(count);
    bytes.resize(drawn.size() * (type == Number::kFloat32 ? 4 : 2));
    for (std::size_t i = 0; i < drawn.size(); ++i) {
      if (type == Number::kFloat32) {
        std::memcpy(bytes.data() + i * 4, &drawn[i], 4);
        values.push_back(drawn[i]);
        continue;
      }
      // Any of sign, exponent from 2^-8 to 2^-1 and mantissa.
      const bool half = type == Number::kFloat16;
      const int sign = random.integer(0, 1) << 15;
      const int exponent = random.integer(-8, -1) + (half ? 15 : 127);
      const int width = half ? 10 : 7;
      const auto bits = static_cast<std::uint16_t>(sign | exponent << width |
                                                   random.integer(0, (1 << width) - 1));
      std::memcpy(bytes.data() + i * 2, &bits, 2);
      values.push_back(half ? float16_value(bits) : bfloat16_value(bits));
    }
  }
};

struct Matrix {
  PartDescription part{};
  std::vector<std::unique_ptr<Numbers>> numbers;
  std::vector<std::uint8_t> codes;
  std::vector<float> table;
  Values values;  // [rows, columns]
  double spread = 0;  // of what codes can stand for: sums of their products are rounded
};

ScaleDescription describe(Matrix& matrix, Random& random, int count) {
  const Number type = random.of({Number::kFloat32, Number::kFloat16, Number::kBfloat16});
  matrix.numbers.push_back(std::make_unique<Numbers>(random, type, count));
  return {matrix.numbers.back()->bytes.data(), type, nullptr, 0, 0, 0};
}

void fill_coded(Matrix& matrix, Random& random, bool affine) {
  PartDescription& part = matrix.part;
  part.encoding = affine ? Encoding::kAffine : Encoding::kFloat;
  part.bits = random.integer(affine ? 2 : 4, 8);
  const int rows = part.rows, columns = part.columns;
  part.group = columns;
  for (const int group : {16, 32, 48, 64, 128}) {
    if (columns % group == 0 && random.coin()) part.group = group;
  }
  const int groups = columns / part.group, row_bytes = (columns * part.bits + 7) / 8;
  part.offset = affine && random.coin() ? random.integer(0, (1 << part.bits) - 1) : 0;
  matrix.codes.resize(static_cast<std::size_t>(rows * row_bytes));
  for (std::uint8_t& byte : matrix.codes) byte = static_cast<std::uint8_t>(random.integer(0, 255));
  if (random.integer(0, 3) == 0) std::fill(matrix.codes.begin(), matrix.codes.end(), 255);
  part.codes = matrix.codes.data();
  part.scale = describe(matrix, random, rows * groups);
  for (const double scale : matrix.numbers[0]->values) {
    matrix.spread = std::max(matrix.spread, std::fabs(scale) * (1 << part.bits));
  }
  const bool biased = affine && random.coin();
  if (biased) part.bias = describe(matrix, random, rows * groups);
  if (!affine) {
    matrix.table = random.normal(1 << part.bits);
    part.table = matrix.table.data();
  }
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < columns; ++k) {
      unsigned code = 0;
      for (int bit = 0; bit < part.bits; ++bit) {
        const int at = k * part.bits + bit;
        code |= (matrix.codes[static_cast<std::size_t>(row * row_bytes + at / 8)] >> at % 8 & 1u)
                << bit;
      }
      const auto group = static_cast<std::size_t>(row * groups + k / part.group);
      const double value = affine ? static_cast<double>(code) - part.offset
                                  : static_cast<double>(matrix.table[code]);
      matrix.values.push_back(value * matrix.numbers[0]->values[group] +
                              (biased ? matrix.numbers[1]->values[group] : 0.0));
    }
  }
}

std::unique_ptr<Matrix> random_matrix(Random& random, int rows, int columns) {
  auto matrix = std::make_unique<Matrix>();
  PartDescription& part = matrix->part;
  part.experts = 1;
  part.rows = part.row_end = rows;
  part.columns = part.column_end = columns;
  const int kind = random.integer(0, 4);
  if (kind <= 3) {
    fill_coded(*matrix, random, kind <= 2);
    return matrix;
  }
  part.encoding = Encoding::kDense;
  part.type = random.of({Number::kFloat32, Number::kFloat16, Number::kBfloat16});
  matrix->numbers.push_back(std::make_unique<Numbers>(random, part.type, rows * columns));
  part.numbers = matrix->numbers[0]->bytes.data();
  matrix->values = matrix->numbers[0]->values;
  return matrix;
}

// What rounding may add up to; inputs: the rounding of inputs of this product.
double largest_error(Activations inputs, const float* x, const double* weights, int columns,
                     double spread) {
  double product = 0, sum = 0, most = 0, size = 0, weight = spread;
  for (int k = 0; k < columns; ++k) {
    product += std::fabs(x[k] * weights[k]);
    sum += std::fabs(x[k]);
    size += std::fabs(weights[k]);
    most = std::max(most, std::fabs(static_cast<double>(x[k])));
    weight = std::max(weight, std::fabs(weights[k]));
  }
  if (inputs == Activations::kFloat32) return 2e-5 * sum * weight + 1e-30;
  double allowed = 0x1p-7 * 1.01 * product + 1e-4 * sum * weight;
  if (inputs != Activations::kBfloat16) allowed += most / 254 * 1.02 * size;
  return allowed;
}

// What is fused to a product against the same ops one by one, which give the same bits.
void check_fused(Context& context, Random& random, const Weight& weight, bool halves, int rows,
                 const float* bias) {
  const int columns = weight_inputs(weight), outputs = weight_outputs(weight);
  const int inner_size = rows * columns, kept = halves ? outputs / 2 : outputs;
  const std::vector<float> x = random.normal(inner_size), residual = random.normal(inner_size);
  const std::vector<float> scales = random.normal(columns), others = random.normal(columns);
  const auto zeros = [](int count) { return std::vector<float>(static_cast<std::size_t>(count)); };
  const auto view = [&](const std::vector<float>& values, int width) {
    return View(values.data(), rows, width, width);
  };
  const bool normed = random.coin(), twice = normed && random.coin(), adds = random.coin();
  std::vector<float> input = x, sum = residual, products = zeros(rows * outputs);
  if (twice) {
    rms_norm(context, view(x, columns), {}, others.data(), 1e-5f, {}, view(input, columns));
  }
  if (normed) {
    const View hidden = view(sum, columns), nothing;
    rms_norm(context, view(input, columns), adds ? hidden : nothing, scales.data(), 1e-3f,
             adds ? hidden : nothing, view(input, columns));
  }
  linear(context, weight, input.data(), columns, rows, products.data(), outputs, bias);
  std::vector<float> expected = products;
  const Activation kind = random.of({Activation::kSilu, Activation::kGeluTanh, Activation::kRelu});
  if (halves) {
    expected = zeros(rows * kept);
    gated_act(context, kind, View(products.data(), rows, kept, outputs),
              View(products.data() + kept, rows, kept, outputs), view(expected, kept));
  }
  Fused fused;
  std::vector<float> hidden = residual, out = zeros(rows * kept);
  if (twice) fused.inner = {others.data(), 1e-5f};
  if (normed) fused.outer = {scales.data(), 1e-3f};
  if (normed && adds) fused.residual = fused.hidden = view(hidden, columns);
  fused.gated = halves;
  fused.activation = kind;
  fused_linear(context, weight, view(x, columns), fused, out.data(), kept, bias);
  if (out != expected || (normed && adds && hidden != sum)) {
    throw Wrong("a product of " + std::to_string(rows) + " rows differs from what is fused to it");
  }
}

}  // namespace

void check_product(Context& context, Random& random) {
  const int columns = random.coin() ? random.integer(1, 200) : 16 * random.integer(1, 24);
  std::vector<std::unique_ptr<Matrix>> parts;
  std::vector<PartDescription> descriptions;
  Values values;
  double spread = 0;
  const int part_count = random.integer(1, 2);
  for (int i = 0; i < part_count; ++i) {
    const int height = i == 0 || random.coin() ? random.integer(1, 90) : parts[0]->part.rows;
    parts.push_back(random_matrix(random, height, columns));
    descriptions.push_back(parts.back()->part);
    spread = std::max(spread, parts.back()->spread);
    values.insert(values.end(), parts.back()->values.begin(), parts.back()->values.end());
  }
  const Activations inputs = random.of({Activations::kFloat32, Activations::kBfloat16,
                                        Activations::kInt8, Activations::kAuto});
  context.deterministic = random.coin();
  const std::unique_ptr<Weight, void (*)(Weight*)> weight(
      weight_create(context, descriptions.data(), part_count, inputs), weight_destroy);
  const int rows = random.coin() ? random.integer(1, 8) : random.integer(9, 70);
  const int outputs = weight_outputs(*weight);
  const std::vector<float> x = random.normal(rows * columns), bias = random.normal(outputs);
  const float* added = random.coin() ? bias.data() : nullptr;
  std::vector<float> out(static_cast<std::size_t>(rows * outputs));
  linear(context, *weight, x.data(), columns, rows, out.data(), outputs, added);
  for (int row = 0; row < rows; ++row) {
    for (int n = 0; n < outputs; ++n) {
      const float* input = x.data() + row * columns;
      const double* weights = values.data() + n * columns;
      double expected = added == nullptr ? 0.0 : static_cast<double>(added[n]);
      for (int k = 0; k < columns; ++k) expected += input[k] * weights[k];
      const double allowed = largest_error(inputs, input, weights, columns, spread);
      expect_near(out[static_cast<std::size_t>(row * outputs + n)], expected,
                  allowed + 2e-6 * std::fabs(expected),
                  std::to_string(rows) + " rows of " + std::to_string(columns) + " inputs, " +
                      std::to_string(parts[0]->part.bits) + " bits");
    }
  }
  std::vector<float> alone(static_cast<std::size_t>(outputs));
  linear(context, *weight, x.data(), columns, 1, alone.data(), outputs, added);
  if (context.deterministic && !std::equal(alone.begin(), alone.end(), out.begin())) {
    throw Wrong("a row alone differs from the same row among " + std::to_string(rows));
  }
  const bool halves = part_count == 2 && parts[0]->part.rows == parts[1]->part.rows;
  check_fused(context, random, *weight, halves, rows, added);
}

}  // namespace polysilicon::checks
