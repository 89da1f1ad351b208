#include "thread_pool.h"

#include <chrono>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace polysilicon {
namespace {

// Longer than the gaps between the ops of a step, shorter than what an idle server should burn.
constexpr std::chrono::microseconds kSpin{60};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < 64; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  while (value.load(std::memory_order_acquire) == old) {
    value.wait(old, std::memory_order_acquire);
  }
}

void pin_this_thread(int cpu) {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#else
  static_cast<void>(cpu);
#endif
}

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpus) {
  for (int thread = 1; thread < threads; ++thread) {
    const int cpu = cpus.empty() ? -1 : cpus[static_cast<std::size_t>(thread) % cpus.size()];
    workers_.emplace_back([this, thread, cpu] {
      if (cpu >= 0) pin_this_thread(cpu);
      work(thread);
    });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int tasks, Function function, const void* body) {
  tasks_ = tasks;
  function_ = function;
  body_ = body;
  next_.store(0, std::memory_order_relaxed);
  open_.store(kOpen, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  take_tasks(0);
  // All tasks are taken: who has not come yet is not waited for.
  std::uint32_t inside = open_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  while (inside != 0) {
    wait_while_equal(open_, inside);
    inside = open_.load(std::memory_order_acquire);
  }
}

void ThreadPool::take_tasks(int thread) {
  for (;;) {
    const int task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    function_(body_, task, thread);
  }
}

bool ThreadPool::enter() {
  std::uint32_t open = open_.load(std::memory_order_relaxed);
  while (open & kOpen) {
    if (open_.compare_exchange_weak(open, open + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void ThreadPool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    wait_while_equal(round_, seen);
    seen = round_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;
    take_tasks(thread);
    if (open_.fetch_sub(1, std::memory_order_acq_rel) == 1) open_.notify_one();
  }
}

}  // namespace polysilicon
