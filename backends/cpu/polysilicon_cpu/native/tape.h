// A model's forward as a list of ops over numbered buffers, recorded once and replayed every step.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "context.h"
#include "rope.h"
#include "view.h"

namespace polysilicon {

// Columns [offset, offset + width) of a buffer. buffer -1: there is none.
struct Operand {
  std::int32_t buffer;
  std::int32_t offset;
  std::int32_t width;
};

class Tape;

// The tape's buffers and the batch of the step that is being run.
struct Step {
  const Tape& tape;
  const BatchView& batch;
  float* const* outputs;

  View view(const Operand& operand) const;

  // The operand's rows without gaps: itself, or a copy in the tape's staging memory `place`.
  const float* packed(Context& context, const Operand& operand, int place) const;
};

class Op {
 public:
  explicit Op(const char* name) : name(name) {}
  virtual ~Op() = default;
  virtual void run(Context& context, const Step& step) const = 0;

  const char* const name;
};

class Tape {
 public:
  static constexpr int kStaging = 2;

  enum class Rows : std::int32_t { kTokens, kLogits };

  // A buffer of `width` columns and a row for every token or every row of logits. It is one of the
  // step's outputs, or stands in memory that buffers of other times use too: one index is -1.
  int add_buffer(int width, Rows rows, int output, int memory);
  void add_op(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  // A table that is prepared before the ops of every step.
  RopeTable* add_rope(const double* frequencies, int pairs, float scale, bool interleaved);

  // Runs the ops in order. outputs: where output buffers are.
  void run(Context& context, const BatchView& batch, float* const* outputs);

  std::size_t bytes() const;

  // Time spent by kind of op, in steps of few tokens and of many, as lines of text; empty unless
  // profiling is on.
  bool profiling = false;
  std::string profile() const;

 private:
  friend struct Step;

  struct Shape {
    int width;
    Rows rows;
    int output;
    int memory;
  };

  int row_count(const Shape& shape, const BatchView& batch) const;

  std::vector<Shape> shapes_;
  std::vector<Buffer> memory_;
  mutable Buffer staging_[kStaging];
  std::vector<std::unique_ptr<RopeTable>> ropes_;
  std::vector<std::unique_ptr<Op>> ops_;
  struct Profile {
    const char* title;
    int most_tokens;  // of a step that it is for
    std::int64_t steps = 0;
    std::map<std::string, std::pair<std::int64_t, std::int64_t>> times = {};  // ns and calls
  };

  Profile profiles_[2] = {{"steps of up to 64 tokens", 64}, {"steps of more tokens", INT32_MAX}};
};

}  // namespace polysilicon
