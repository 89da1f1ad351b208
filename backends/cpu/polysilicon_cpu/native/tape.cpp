#include "tape.h"

#include <algorithm>
#include <cstdio>

#include "elementwise.h"

namespace polysilicon {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw Error(std::string("a batch's ") + what);
}

void check(const BatchView& batch) {
  require(batch.query_start[0] == 0, "query_start does not begin with 0");
  for (int i = 0; i < batch.sequence_count; ++i) {
    require(batch.query_start[i + 1] >= batch.query_start[i], "query_start falls");
  }
  require(batch.query_start[batch.sequence_count] <= batch.token_count,
          "query_start exceeds its tokens");
  for (int i = 0; i < batch.row_count; ++i) {
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.token_count,
            "logit_rows are not rows of its tokens");
  }
}

}  // namespace

View Step::view(const Operand& operand) const {
  const Tape::Shape& shape = tape.shapes_[static_cast<std::size_t>(operand.buffer)];
  float* base = shape.output >= 0
                    ? outputs[shape.output]
                    : tape.memory_[static_cast<std::size_t>(shape.memory)].as<float>();
  return {base + operand.offset, tape.row_count(shape, batch), operand.width, shape.width};
}

const float* Step::packed(Context& context, const Operand& operand, int place) const {
  const View source = view(operand);
  if (source.contiguous()) return source.data;
  Buffer& staging = tape.staging_[place];
  staging.grow(static_cast<std::size_t>(source.rows) * static_cast<std::size_t>(source.width) *
               sizeof(float));
  copy(context, source, {staging.as<float>(), source.rows, source.width, source.width});
  return staging.as<float>();
}

RopeTable* Tape::add_rope(const double* frequencies, int pairs, float scale, bool interleaved) {
  ropes_.push_back(std::make_unique<RopeTable>(frequencies, pairs, scale, interleaved));
  return ropes_.back().get();
}

int Tape::add_buffer(int width, Rows rows, int output, int memory) {
  shapes_.push_back({width, rows, output, memory});
  if (memory >= static_cast<int>(memory_.size())) {
    memory_.resize(static_cast<std::size_t>(memory) + 1);
  }
  return static_cast<int>(shapes_.size()) - 1;
}

int Tape::row_count(const Shape& shape, const BatchView& batch) const {
  return shape.rows == Rows::kTokens ? batch.token_count : batch.row_count;
}

void Tape::run(Context& context, const BatchView& batch, float* const* outputs) {
  check(batch);
  for (const Shape& shape : shapes_) {
    if (shape.output >= 0) continue;
    Buffer& memory = memory_[static_cast<std::size_t>(shape.memory)];
    const std::size_t needed = static_cast<std::size_t>(row_count(shape, batch)) *
                               static_cast<std::size_t>(shape.width) * sizeof(float);
    // Grown by half at least, so that a slowly growing batch does not allocate in every step.
    if (needed > memory.size()) memory.grow(std::max(needed, memory.size() + memory.size() / 2));
  }
  for (const std::unique_ptr<RopeTable>& rope : ropes_) {
    rope->prepare(context, batch.positions, batch.token_count);
  }
  const Step step{*this, batch, outputs};
  if (!profiling) {
    for (const std::unique_ptr<Op>& op : ops_) op->run(context, step);
    return;
  }
  Profile& profile = profiles_[batch.token_count <= profiles_[0].most_tokens ? 0 : 1];
  ++profile.steps;
  for (const std::unique_ptr<Op>& op : ops_) {
    const auto begin = std::chrono::steady_clock::now();
    op->run(context, step);
    const auto spent = std::chrono::steady_clock::now() - begin;
    auto& [time, calls] = profile.times[op->name];
    time += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
    ++calls;
  }
}

std::size_t Tape::bytes() const {
  std::size_t total = 0;
  for (const Buffer& buffer : memory_) total += buffer.size();
  for (const Buffer& buffer : staging_) total += buffer.size();
  return total;
}

std::string Tape::profile() const {
  std::string text;
  char line[160];
  for (const Profile& profile : profiles_) {
    if (profile.steps == 0) continue;
    const double steps = static_cast<double>(profile.steps);
    std::int64_t total = 0;
    for (const auto& [name, entry] : profile.times) total += entry.first;
    std::snprintf(line, sizeof(line), "%lld %s, %.3f ms each\n",
                  static_cast<long long>(profile.steps), profile.title,
                  static_cast<double>(total) * 1e-6 / steps);
    text += line;
    for (const auto& [name, entry] : profile.times) {
      const double time = static_cast<double>(entry.first);
      const double calls = static_cast<double>(entry.second);
      std::snprintf(line, sizeof(line), "  %-12s %9.3f ms, %8.2f us a call, %5.1f calls\n",
                    name.c_str(), time * 1e-6 / steps, time * 1e-3 / calls, calls / steps);
      text += line;
    }
  }
  return text;
}

}  // namespace polysilicon
