// What our kernels need of the Metal Shading Language, for a C++ compiler.
//
// Every thread of a threadgroup is a fibre of its own; they run in turn, each until it has to wait
// for others: at a barrier, or in an operation over its SIMD group. Threadgroups run one after the
// other. Reads and writes outside of an array, and waiting for threads that never come (which is
// undefined on a GPU), end the launch with a message.

#ifndef POLYSILICON_METAL_SHIM_H
#define POLYSILICON_METAL_SHIM_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define threadgroup static

struct uint3 {
  uint32_t x, y, z;
};

struct half {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const int exponent = bits >> 10 & 31;
    const float fraction = float(bits & 1023) / 1024.0f;
    float size = exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0f + fraction, exponent - 15);
    if (exponent == 31) {
      size = fraction == 0.0f ? INFINITY : NAN;
    }
    return sign ? -size : size;
  }
};

struct bfloat {
  uint16_t bits;
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

namespace shim {

constexpr uint32_t SIMD_WIDTH = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

template <typename T>
class Array {
 public:
  Array(void* data, long size, const char* name)
      : data_(static_cast<T*>(data)), size_(size), name_(name) {}
  T& operator[](long index) const {
    if (index < 0 || index >= size_) {
      throw std::out_of_range(std::string(name_) + "[" + std::to_string(index) + "] of " +
                              std::to_string(size_));
    }
    return data_[index];
  }

 private:
  T* data_;
  long size_;
  const char* name_;
};

struct Gathering {
  uint32_t members = 0;
  uint32_t arrived = 0;
  uint64_t round = 0;
  float values[SIMD_WIDTH];
};

struct Thread {
  ucontext_t start;
  jmp_buf place;  // where it waits: jumping there takes no call of the system, as a context does
  std::vector<char> stack;
  uint3 position;  // in its threadgroup
  uint32_t index;  // in its threadgroup
  bool started = false;
  bool ended = false;
};

struct Group {
  uint3 position;
  uint3 groups;
  uint3 full_size;
  std::vector<Thread> threads;
  Gathering all;
  std::vector<Gathering> simd_groups;
  jmp_buf scheduler;
  uint32_t running = 0;
  uint64_t progress = 0;
  std::string error;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;

  Thread& thread() { return threads[running]; }
  Gathering& simd_group() { return simd_groups[thread().index / SIMD_WIDTH]; }

  void meet(Gathering& gathering) {
    const uint64_t round = gathering.round;
    ++progress;
    if (++gathering.arrived == gathering.members) {
      gathering.arrived = 0;
      ++gathering.round;
      return;
    }
    while (gathering.round == round) {
      if (_setjmp(thread().place) == 0) {
        _longjmp(scheduler, 1);
      }
    }
  }
};

inline Group* current = nullptr;

inline void enter() {
  try {
    current->body(current->arguments);
  } catch (const std::exception& error) {
    current->error = error.what();
  }
  ++current->progress;
  current->thread().ended = true;
  _longjmp(current->scheduler, 1);
}

// Runs the thread until it ends or waits.
__attribute__((noinline)) inline void resume(Group& group) {
  if (_setjmp(group.scheduler) != 0) {
    return;
  }
  Thread& thread = group.thread();
  if (thread.started) {
    _longjmp(thread.place, 1);
  }
  thread.started = true;
  setcontext(&thread.start);
}

inline void run_group(Group& group) {
  current = &group;
  for (Thread& thread : group.threads) {
    thread.stack.resize(STACK_BYTES);
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.data();
    thread.start.uc_stack.ss_size = thread.stack.size();
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, enter, 0);
  }
  for (bool open = true; open && group.error.empty();) {
    const uint64_t progress = group.progress;
    open = false;
    for (group.running = 0; group.running < group.threads.size(); ++group.running) {
      if (!group.thread().ended) {
        resume(group);
        open = open || !group.thread().ended;
      }
    }
    if (open && progress == group.progress) {
      group.error = "threads wait for others that have ended or wait elsewhere";
    }
  }
  current = nullptr;
}

// Runs `body(arguments)` for every thread of a grid; gives back what went wrong, or nothing.
inline std::string run(uint3 grid, uint3 size, void (*body)(void*), void* arguments) {
  const auto count = [](uint32_t whole, uint32_t part) { return (whole + part - 1) / part; };
  const uint3 groups{count(grid.x, size.x), count(grid.y, size.y), count(grid.z, size.z)};
  for (uint32_t z = 0; z < groups.z; ++z)
    for (uint32_t y = 0; y < groups.y; ++y)
      for (uint32_t x = 0; x < groups.x; ++x) {
        Group group;
        group.position = {x, y, z};
        group.groups = groups;
        group.full_size = size;
        group.body = body;
        group.arguments = arguments;
        for (uint32_t k = 0; k < size.z && z * size.z + k < grid.z; ++k)
          for (uint32_t j = 0; j < size.y && y * size.y + j < grid.y; ++j)
            for (uint32_t i = 0; i < size.x && x * size.x + i < grid.x; ++i) {
              group.threads.emplace_back();
              group.threads.back().position = {i, j, k};
              group.threads.back().index = uint32_t(group.threads.size()) - 1;
            }
        group.all.members = uint32_t(group.threads.size());
        group.simd_groups.resize(count(group.all.members, SIMD_WIDTH));
        for (const Thread& thread : group.threads) {
          ++group.simd_groups[thread.index / SIMD_WIDTH].members;
        }
        run_group(group);
        if (!group.error.empty()) {
          return group.error;
        }
      }
  return "";
}

inline uint3 thread_position_in_threadgroup() { return current->thread().position; }
inline uint3 threadgroup_position_in_grid() { return current->position; }
inline uint3 threadgroups_per_grid() { return current->groups; }
inline uint3 thread_position_in_grid() {
  const uint3 p = current->thread().position;
  return {current->position.x * current->full_size.x + p.x,
          current->position.y * current->full_size.y + p.y,
          current->position.z * current->full_size.z + p.z};
}
inline uint32_t thread_index_in_simdgroup() { return current->thread().index % SIMD_WIDTH; }
inline uint32_t simdgroup_index_in_threadgroup() { return current->thread().index / SIMD_WIDTH; }

}  // namespace shim

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

inline void threadgroup_barrier(mem_flags) { shim::current->meet(shim::current->all); }

inline float simd_sum(float value) {
  shim::Gathering& group = shim::current->simd_group();
  group.values[shim::thread_index_in_simdgroup()] = value;
  shim::current->meet(group);
  float sum = 0.0f;
  for (uint32_t lane = 0; lane < group.members; ++lane) {
    sum += group.values[lane];
  }
  shim::current->meet(group);
  return sum;
}

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float max(float a, float b) { return std::fmax(a, b); }

namespace precise {
inline float exp(float x) { return std::exp(x); }
inline float tanh(float x) { return std::tanh(x); }
}  // namespace precise

}  // namespace metal

#endif  // POLYSILICON_METAL_SHIM_H
