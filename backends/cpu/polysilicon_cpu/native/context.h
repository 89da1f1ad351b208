// What an op gets to run with: the kernels of the level, the threads, scratch memory, the batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "kernels.h"

namespace polysilicon {

class ThreadPool;

// Memory that all threads of an op share, one region for each purpose.
enum class Workspace { kProducts, kMoe, kLora, kAttention, kSampling, kCount };

// One opened device. Ops are called by one thread at a time.
struct Context {
  const Kernels* kernels = nullptr;
  int threads = 1;
  bool deterministic = true;  // results do not depend on what else is in the batch

  // cpus: where each thread is pinned, the caller's first; empty where none is. The caller pins
  // itself.
  Context(const Kernels* kernels, int threads, const std::vector<int>& cpus = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Runs body(task, thread) for every task in [0, tasks) and returns when all have ended. Each thread
  // takes the next task; the caller is thread 0. The body must not throw, allocate, or call parallel
  // itself.
  template <class Body>
  void parallel(int tasks, const Body& body) {
    if (tasks <= 1 || threads == 1) {
      for (int task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    run(tasks, &call<Body>, &body);
  }

  // Scratch memory of each thread, 64-byte aligned. reserve() grows it and loses its contents: call
  // it before parallel(), not inside. It allocates only when more is asked for than ever before.
  void reserve(std::size_t bytes_per_thread);
  template <class T = std::uint8_t>
  T* scratch(int thread) const {
    return scratch_[static_cast<std::size_t>(thread)].as<T>();
  }

  // Memory shared by the threads of one op, kept by purpose; grown under the same rule.
  void* workspace(Workspace purpose, std::size_t bytes);

  std::size_t workspace_bytes() const;

 private:
  using Function = void (*)(const void* body, int task, int thread);

  template <class Body>
  static void call(const void* body, int task, int thread) {
    (*static_cast<const Body*>(body))(task, thread);
  }

  void run(int tasks, Function function, const void* body);

  std::unique_ptr<ThreadPool> pool_;
  std::vector<Buffer> scratch_;
  Buffer workspace_[static_cast<int>(Workspace::kCount)];
};

// `polysilicon.batch.Batch` as pointers; all arrays are int32 unless said otherwise.
struct GroupView {
  const std::int32_t* page_table;  // [sequences, width]
  int width;
  const std::int32_t* slots;  // [tokens]
};

struct BatchView {
  int token_count;     // T
  int sequence_count;  // S
  int row_count;       // L
  int group_count;
  const std::int32_t* tokens;         // [T], token_source already resolved
  const std::int32_t* positions;      // [T]
  const std::int32_t* query_start;    // [S + 1]
  const std::int32_t* context_len;    // [S]
  const std::int32_t* logit_rows;     // [L]
  const std::int32_t* sequence_slot;  // [S]
  const std::int32_t* adapter_slot;   // [S]
  const GroupView* groups;            // [group_count]
  const std::uint8_t* tree_mask;      // bool [T, tree_width], or null
  int tree_width;                     // M
};

}  // namespace polysilicon
