// The calls of one device: run in the order of submission by a thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace polysilicon {

enum class Status : int { kOk = 0, kError = 1, kOutOfMemory = 2, kInvalid = 3 };

struct Failure {
  Status status = Status::kOk;
  std::string message;
};

// The failure that an exception in flight stands for. Call it in a catch block.
Failure current_failure();

// What can be done where there is nothing else to do.
class IdleWork {
 public:
  virtual ~IdleWork() = default;
  // Does a piece, of a millisecond or so; whether more is left. Must not throw.
  virtual bool run() = 0;
};

class Queue {
 public:
  using Ticket = std::uint64_t;  // from 1, rising in the order of submission

  // cpu: where the thread is pinned, or -1.
  explicit Queue(int cpu);
  // Calls that have not begun are dropped.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // after: a call whose failure is this one's too, or 0.
  // Runs between calls, in the queue's thread, as long as it exists.
  void when_idle(std::weak_ptr<IdleWork> work);

  Ticket submit(std::function<void()> call, Ticket after = 0);
  bool done(Ticket ticket);
  Failure wait(Ticket ticket);

 private:
  struct Call {
    std::function<void()> run;
    Ticket after;
  };

  void work();
  void wait_for_call(std::unique_lock<std::mutex>& lock);
  bool run_idle_work(std::unique_lock<std::mutex>& lock);
  Failure failure_of(Ticket ticket) const;

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable completed_;
  std::deque<Call> calls_;
  std::vector<std::weak_ptr<IdleWork>> idle_work_;
  std::map<Ticket, Failure> failures_;
  Ticket last_submitted_ = 0;
  Ticket last_completed_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace polysilicon
