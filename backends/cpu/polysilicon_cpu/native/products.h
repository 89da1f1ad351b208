// Products with quantised and dense weights: the weights repacked once, the ops that read them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "context.h"
#include "levels/elementwise.h"
#include "view.h"

namespace polysilicon {

struct Weight;  // the fused parts of one product

enum class Number : int { kFloat32, kFloat16, kBfloat16 };

// What the inputs of products are rounded to. kAuto: int8 for affine weights, with a high byte
// where inputs are large, and what the weights' own precision asks for where they are dense or
// floats.
enum class Activations : int { kAuto, kFloat32, kBfloat16, kInt8 };

// Scales of groups: numbers [rows, groups] or, with codes, `number[g / super_group] * (code -
// offset)`, codes packed [rows, ceil(groups * bits / 8)] as `polysilicon.weights.pack_codes` does.
// All null: there are none.
struct ScaleDescription {
  const void* numbers;
  Number type;
  const std::uint8_t* codes;
  int bits;
  int offset;
  int super_group;
};

enum class Encoding : int { kDense, kAffine, kFloat };

// One part in a canonical encoding (`polysilicon.weights.encodings`), a stack of `experts` matrices
// [rows, columns] (1 for a matrix), and the window of each that is placed.
struct PartDescription {
  Encoding encoding;
  int experts;
  int rows, columns;
  int row_begin, row_end;        // window of the outputs
  int column_begin, column_end;  // window of the inputs

  const void* numbers;  // dense
  Number type;

  int bits, group, offset;  // affine and float
  const std::uint8_t* codes;
  ScaleDescription scale;
  ScaleDescription bias;
  const float* table;              // float: [2^bits]
  int block_rows, block_columns;   // float: of 2-D scale blocks, or 0
  const std::int32_t* input_order;  // [columns], or null
};

// Repacks the parts for the context's level, in parallel; the given arrays are not kept. Parts
// agree in experts and in the width of their windows. Throws Error and OutOfMemory.
Weight* weight_create(Context& context, const PartDescription* parts, int count,
                      Activations activations);
void weight_destroy(Weight* weight);
std::size_t weight_bytes(const Weight& weight);
int weight_inputs(const Weight& weight);
int weight_outputs(const Weight& weight);  // of all parts
int weight_experts(const Weight& weight);

// out[r] = W x[r] + bias. x: rows of K floats that begin `x_stride` floats apart; out: rows of
// weight_outputs() floats that begin `out_stride` apart; bias [weight_outputs()] or null.
// The result of a row does not depend on the other rows, bitwise, whatever their number.
void linear(Context& context, const Weight& weight, const float* x, std::ptrdiff_t x_stride,
            int rows, float* out, std::ptrdiff_t out_stride, const float* bias);

// What comes before and after a product and is done with its rows at hand.
struct Fused {
  struct Norm {
    const float* weight;  // null: there is none
    float eps;
  };

  // RMS norms of the inputs as `rms_norm`'s: the inner one of x, then the outer one of that and the
  // residual. The residual and where the sum goes, which may be the residual's place, may not be
  // there.
  Norm inner{}, outer{};
  View residual, hidden;
  // Of the two equal parts of the outputs: gated_act(first, second) is what is given back.
  bool gated = false;
  Activation activation{};
};

// `linear` with what is fused to it.
void fused_linear(Context& context, const Weight& weight, const View& x, const Fused& fused,
                  float* out, std::ptrdiff_t out_stride, const float* bias);

// Exact rows of the matrix by token: out [count, K]. Tokens must lie in [0, weight_outputs()).
void embed(Context& context, const Weight& weight, const std::int32_t* tokens, int count,
           float* out);

enum class Scoring : int { kSoftmax, kSoftmaxTopK, kSigmoid };

struct Routing {  // `polysilicon.ops.Routing`
  int top_k;
  Scoring scoring;
  const float* correction;  // [experts] or null
  int groups, top_groups;
  bool renormalize;
  float scale;
};

// `Ops.moe`: x [rows, D] contiguous, router_logits [rows, experts], biases [experts, 2 F] and
// [experts, D] or null, out [rows, D]. gate_up has two parts of F outputs.
void moe(Context& context, const float* x, const float* router_logits, int rows,
         const Weight& gate_up, const Weight& down, const Routing& routing, Activation activation,
         const float* gate_up_bias, const float* down_bias, float* out);

struct AdapterPart {  // of one slot and part; null: the part is left as it is
  const float* down;  // A [rank, inputs]
  const float* up;    // B [outputs, rank]
  int rank;
};

// `Ops.lora`, in place: out[t] of each part += B (A x[t]) by the adapter slot of token t's
// sequence. adapters [slots, parts]; outputs [parts]; x and out as in `linear`.
void lora(Context& context, const float* x, std::ptrdiff_t x_stride, int inputs,
          const AdapterPart* adapters, int slots, int parts, const int* outputs, int max_rank,
          const BatchView& batch, float* out, std::ptrdiff_t out_stride);

}  // namespace polysilicon
