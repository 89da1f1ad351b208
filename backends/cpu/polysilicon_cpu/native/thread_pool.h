// Threads that run one loop at a time together with their caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace polysilicon {

class ThreadPool {
 public:
  using Function = void (*)(const void* body, int task, int thread);

  // threads: the caller included. cpus: where each is pinned, the caller's first, or empty.
  ThreadPool(int threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls function(body, task, thread) for every task in [0, tasks). One caller at a time. Workers
  // that have not come when the last task is taken are not waited for: where something else has
  // their core, the others do their share.
  void run(int tasks, Function function, const void* body);

 private:
  void work(int thread);
  void take_tasks(int thread);
  bool enter();

  static constexpr std::uint32_t kOpen = 1u << 31;

  int tasks_ = 0;
  Function function_ = nullptr;
  const void* body_ = nullptr;

  // Apart, so that waiting for one does not slow the other.
  alignas(64) std::atomic<std::uint32_t> round_{0};
  alignas(64) std::atomic<int> next_{0};
  // Whether the loop may still be entered, and how many workers are inside.
  alignas(64) std::atomic<std::uint32_t> open_{0};
  alignas(64) std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// Waits until the value is no longer `old`: spins for a bound, then sleeps until notified.
void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t old);

// Pins the calling thread; does nothing where the system does not allow it.
void pin_this_thread(int cpu);

}  // namespace polysilicon
