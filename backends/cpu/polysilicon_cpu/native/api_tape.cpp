// Recording tapes and submitting steps.

#include <cmath>

#include "adapters.h"
#include "api.h"
#include "attention.h"
#include "elementwise.h"
#include "kv.h"
#include "products.h"
#include "tape.h"

namespace polysilicon {
namespace {

template <class Run>
class OpOf final : public Op {
 public:
  OpOf(const char* name, Run run) : Op(name), run_(std::move(run)) {}
  void run(Context& context, const Step& step) const override { run_(context, step); }

 private:
  Run run_;
};

// run(context, step)
template <class Run>
void record(Tape* tape, const char* name, Run run) {
  tape->add_op(std::make_unique<OpOf<Run>>(name, std::move(run)));
}

View optional(const Step& step, const Operand& operand) {
  return operand.buffer < 0 ? View{} : step.view(operand);
}

}  // namespace
}  // namespace polysilicon

using namespace polysilicon;

PS_API Tape* ps_tape_create(bool profiling) {
  Tape* tape = new Tape;
  tape->profiling = profiling;
  return tape;
}

// Nothing that was submitted may still use it.
PS_API void ps_tape_destroy(Tape* tape) { delete tape; }

PS_API std::size_t ps_tape_bytes(const Tape* tape) { return tape->bytes(); }

PS_API void ps_tape_profile(const Tape* tape, char* into, int size) {
  std::snprintf(into, static_cast<std::size_t>(size), "%s", tape->profile().c_str());
}

// rows: 0 for a row a token, 1 for a row of logits. output and memory as in Tape::add_buffer.
PS_API int ps_tape_buffer(Tape* tape, int width, int rows, int output, int memory) {
  return tape->add_buffer(width, static_cast<Tape::Rows>(rows), output, memory);
}

PS_API RopeTable* ps_tape_rope_table(Tape* tape, const double* frequencies, int pairs, float scale,
                                     bool interleaved) {
  return tape->add_rope(frequencies, pairs, scale, interleaved);
}

PS_API void ps_tape_embed(Tape* tape, const Weight* table, Operand out) {
  record(tape, "embed", [=](Context& context, const Step& step) {
    const BatchView& batch = step.batch;
    const int vocabulary = weight_outputs(*table);
    for (int i = 0; i < batch.token_count; ++i) {
      if (batch.tokens[i] < 0 || batch.tokens[i] >= vocabulary) {
        throw Error("token " + std::to_string(batch.tokens[i]) + " is outside the table of " +
                    std::to_string(vocabulary));
      }
    }
    embed(context, *table, batch.tokens, batch.token_count, step.view(out).data);
  });
}

// What is fused to a product; see Fused.
struct FusedArguments {
  Fused::Norm inner, outer;
  Operand residual, hidden;
  int activation;  // or -1
};

// fused: null where nothing is.
PS_API void ps_tape_linear(Tape* tape, Operand x, const FusedArguments* fused,
                           const Weight* weight, const float* bias, Operand out) {
  if (fused == nullptr) {
    record(tape, "linear", [=](Context& context, const Step& step) {
      const View input = step.view(x), output = step.view(out);
      linear(context, *weight, input.data, input.stride, input.rows, output.data, output.stride,
             bias);
    });
    return;
  }
  const bool gated = fused->activation >= 0, normed = fused->outer.weight != nullptr;
  const char* name = normed ? gated ? "normed gated" : "normed" : "gated";
  record(tape, name, [=, given = *fused](Context& context, const Step& step) {
    const View output = step.view(out);
    const Fused parts{given.inner, given.outer, optional(step, given.residual),
                      optional(step, given.hidden), gated,
                      static_cast<Activation>(given.activation)};
    fused_linear(context, *weight, step.view(x), parts, output.data, output.stride, bias);
  });
}

PS_API void ps_tape_lora(Tape* tape, Operand x, const AdapterPool* pool, int target, Operand out) {
  record(tape, "lora", [=](Context& context, const Step& step) {
    const View input = step.view(x), output = step.view(out);
    const AdapterTarget& shape = pool->target(target);
    for (int s = 0; s < step.batch.sequence_count; ++s) {
      const int slot = step.batch.adapter_slot[s];
      if (slot < 0 || slot >= pool->slots()) {
        throw Error("adapter slots must lie in 0.." + std::to_string(pool->slots() - 1) +
                    ", got " + std::to_string(slot));
      }
    }
    lora(context, input.data, input.stride, shape.inputs, pool->parts(target), pool->slots(),
         static_cast<int>(shape.outputs.size()), shape.outputs.data(), pool->max_rank(),
         step.batch, output.data, output.stride);
  });
}

PS_API void ps_tape_rms_norm(Tape* tape, Operand x, Operand residual, Fused::Norm norm,
                             Operand hidden, Operand out) {
  record(tape, "rms_norm", [=](Context& context, const Step& step) {
    rms_norm(context, step.view(x), optional(step, residual), norm.weight, norm.eps,
             optional(step, hidden), step.view(out));
  });
}

PS_API void ps_tape_layer_norm(Tape* tape, Operand x, Operand residual, const float* weight,
                               const float* bias, float eps, Operand hidden, Operand out) {
  record(tape, "layer_norm", [=](Context& context, const Step& step) {
    layer_norm(context, step.view(x), optional(step, residual), weight, bias, eps,
               optional(step, hidden), step.view(out));
  });
}

PS_API void ps_tape_add(Tape* tape, Operand a, Operand b, Operand out) {
  record(tape, "add", [=](Context& context, const Step& step) {
    add(context, step.view(a), step.view(b), step.view(out));
  });
}

PS_API void ps_tape_scale(Tape* tape, Operand x, float factor, Operand out) {
  record(tape, "scale", [=](Context& context, const Step& step) {
    scale(context, step.view(x), factor, step.view(out));
  });
}

PS_API void ps_tape_softcap(Tape* tape, Operand x, float cap, Operand out) {
  record(tape, "softcap", [=](Context& context, const Step& step) {
    softcap(context, step.view(x), cap, step.view(out));
  });
}

PS_API void ps_tape_rope(Tape* tape, Operand x, const RopeTable* rope, int heads, Operand out) {
  record(tape, "rope", [=](Context& context, const Step& step) {
    rotate(context, step.view(x), *rope, heads, step.view(out));
  });
}

PS_API void ps_tape_gated_act(Tape* tape, Operand gate, Operand up, int kind, Operand out) {
  record(tape, "gated_act", [=](Context& context, const Step& step) {
    gated_act(context, static_cast<Activation>(kind), step.view(gate), step.view(up),
              step.view(out));
  });
}

PS_API void ps_tape_copy(Tape* tape, Operand x, Operand out) {
  record(tape, "copy", [=](Context& context, const Step& step) {
    copy(context, step.view(x), step.view(out));
  });
}

PS_API void ps_tape_select(Tape* tape, Operand x, Operand out) {
  record(tape, "select", [=](Context& context, const Step& step) {
    select(context, step.view(x), step.batch.logit_rows, step.view(out));
  });
}

// Once before the attention of a pool's layers.
PS_API void ps_tape_check_batch(Tape* tape, const KVPool* pool) {
  record(tape, "check", [=](Context&, const Step& step) {
    if (pool->layout().group >= step.batch.group_count) {
      throw Error("the batch has no KV group " + std::to_string(pool->layout().group));
    }
    check_batch(*pool, step.batch);
  });
}

// k and v: both there, or neither. parameters are copied; what they point to must stay.
PS_API void ps_tape_attention(Tape* tape, Operand q, Operand k, Operand v, KVPool* pool, int layer,
                              const AttentionParameters* parameters, Operand out) {
  record(tape, "attention",
         [=, parameters = *parameters](Context& context, const Step& step) {
           attention(context, *pool, layer, step.view(q), optional(step, k), optional(step, v),
                     step.batch, parameters, step.view(out).data);
         });
}

PS_API void ps_tape_moe(Tape* tape, Operand x, Operand router_logits, const Weight* gate_up,
                        const Weight* down, const Routing* routing, int activation,
                        const float* gate_up_bias, const float* down_bias, Operand out) {
  record(tape, "moe", [=, routing = *routing](Context& context, const Step& step) {
    moe(context, step.packed(context, x, 0), step.packed(context, router_logits, 1),
        step.view(x).rows, *gate_up, *down, routing, static_cast<Activation>(activation),
        gate_up_bias, down_bias, step.view(out).data);
  });
}

// A step: the batch's arrays, and the tokens that the step before sampled.
struct StepArguments {
  BatchView batch;
  const std::int32_t* token_source;
  const std::int32_t* previous;  // or null
  int previous_count;
  float* const* outputs;
  int output_count;
  Queue::Ticket after;  // the call that samples `previous`, or 0
};

namespace {

void resolve_tokens(Device& device, const StepArguments& step, BatchView& batch) {
  const std::size_t count = static_cast<std::size_t>(batch.token_count);
  device.tokens.grow(count * sizeof(std::int32_t));
  std::int32_t* tokens = device.tokens.as<std::int32_t>();
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t source = step.token_source[i];
    if (source < 0) {
      tokens[i] = step.batch.tokens[i];
    } else if (step.previous != nullptr && source < step.previous_count) {
      tokens[i] = step.previous[source];
    } else {
      throw Error("token_source names row " + std::to_string(source) + " of a step with " +
                  std::to_string(step.previous == nullptr ? 0 : step.previous_count));
    }
  }
  batch.tokens = tokens;
}

}  // namespace

// The arrays that the arguments point to must stay until the call has ended; the arguments, the
// groups and the list of outputs need not.
PS_API Queue::Ticket ps_submit_step(Device* device, Tape* tape, const StepArguments* arguments) {
  const StepArguments& given = *arguments;
  std::vector<GroupView> groups(given.batch.groups, given.batch.groups + given.batch.group_count);
  std::vector<float*> outputs(given.outputs, given.outputs + given.output_count);
  const auto call = [device, tape, step = given, groups = std::move(groups),
                     outputs = std::move(outputs)] {
    BatchView batch = step.batch;
    batch.groups = groups.data();
    resolve_tokens(*device, step, batch);
    tape->run(device->context, batch, outputs.data());
  };
  return device->queue.submit(call, given.after);
}
