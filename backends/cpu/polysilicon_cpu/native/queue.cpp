#include "queue.h"

#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "buffer.h"
#include "thread_pool.h"

namespace polysilicon {
namespace {

// Failures that nobody asked about are forgotten after so many further calls.
constexpr Queue::Ticket kRemembered = 4096;

// So long nothing must have been submitted for the queue to be idle: longer than the core takes
// between two steps.
constexpr std::chrono::milliseconds kIdle{20};

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    return {Status::kOutOfMemory, error.what()};
  } catch (const std::bad_alloc&) {
    return {Status::kOutOfMemory, "memory is exhausted"};
  } catch (const std::exception& error) {
    return {Status::kError, error.what()};
  } catch (...) {
    return {Status::kError, "an unknown exception"};
  }
}

Queue::Queue(int cpu) {
  thread_ = std::thread([this, cpu] {
    if (cpu >= 0) pin_this_thread(cpu);
    work();
  });
}

Queue::~Queue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  submitted_.notify_one();
  thread_.join();
}

void Queue::when_idle(std::weak_ptr<IdleWork> work) {
  {
    const std::lock_guard lock(mutex_);
    idle_work_.push_back(std::move(work));
  }
  submitted_.notify_one();
}

Queue::Ticket Queue::submit(std::function<void()> call, Ticket after) {
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back({std::move(call), after});
    ticket = ++last_submitted_;
  }
  submitted_.notify_one();
  return ticket;
}

bool Queue::done(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  return last_completed_ >= ticket;
}

Failure Queue::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  completed_.wait(lock, [&] { return last_completed_ >= ticket || stopping_; });
  if (last_completed_ < ticket) return {Status::kError, "the device is closed"};
  return failure_of(ticket);
}

Failure Queue::failure_of(Ticket ticket) const {
  const auto found = failures_.find(ticket);
  return found == failures_.end() ? Failure{} : found->second;
}

void Queue::wait_for_call(std::unique_lock<std::mutex>& lock) {
  const auto called = [&] { return stopping_ || !calls_.empty(); };
  // Work that appears during the wait is for the next pause.
  if (!submitted_.wait_for(lock, kIdle, called)) {
    while (!called() && run_idle_work(lock)) {
    }
    submitted_.wait(lock, called);
  }
}

// A piece of each; whether any has more.
bool Queue::run_idle_work(std::unique_lock<std::mutex>& lock) {
  std::erase_if(idle_work_, [](const auto& work) { return work.expired(); });
  std::vector<std::shared_ptr<IdleWork>> held;
  for (const auto& work : idle_work_) held.push_back(work.lock());
  lock.unlock();
  bool more = false;
  for (const auto& work : held) more |= work != nullptr && work->run();
  held.clear();
  lock.lock();
  return more;
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait_for_call(lock);
    if (stopping_) {
      completed_.notify_all();
      return;
    }
    const Call call = std::move(calls_.front());
    calls_.pop_front();
    Failure failure = call.after == 0 ? Failure{} : failure_of(call.after);
    if (failure.status == Status::kOk) {
      lock.unlock();
      try {
        call.run();
      } catch (...) {
        failure = current_failure();
      }
      lock.lock();
    }
    ++last_completed_;
    if (failure.status != Status::kOk) failures_.emplace(last_completed_, std::move(failure));
    while (!failures_.empty() && failures_.begin()->first + kRemembered < last_completed_) {
      failures_.erase(failures_.begin());
    }
    completed_.notify_all();
  }
}

}  // namespace polysilicon
