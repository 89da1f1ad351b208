// What the functions of the C ABI share. They are called through ctypes; names begin with ps_.
//
// A function that can fail returns false (or null) and fills `error`. Handles are plain pointers;
// the caller keeps a device open as long as anything of it is used.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "context.h"
#include "queue.h"

#define PS_API extern "C" __attribute__((visibility("default")))

namespace polysilicon {

struct ErrorText {
  int status;  // Status
  char message[508];
};

inline void set_error(ErrorText* error, const Failure& failure) {
  error->status = static_cast<int>(failure.status);
  std::snprintf(error->message, sizeof(error->message), "%s", failure.message.c_str());
}

// Runs the body; what it throws goes to `error` and `otherwise` is returned.
template <class Result, class Body>
Result guarded(ErrorText* error, Result otherwise, const Body& body) {
  error->status = static_cast<int>(Status::kOk);
  try {
    return body();
  } catch (...) {
    set_error(error, current_failure());
    return otherwise;
  }
}

// One opened device.
struct Device {
  Context context;
  Buffer tokens;  // of the step, token_source resolved
  Queue queue;    // last, so that it stops before what its calls use goes away

  Device(const Kernels* kernels, int threads, const std::vector<int>& cpus, bool deterministic)
      : context(kernels, threads, cpus), queue(cpus.empty() ? -1 : cpus.front()) {
    context.deterministic = deterministic;
  }

  // Runs the call after everything submitted before, waits for it, and throws what it threw.
  template <class Body>
  void run(const Body& body) {
    const Failure failure = queue.wait(queue.submit([&body] { body(); }));
    if (failure.status == Status::kOutOfMemory) throw OutOfMemory(failure.message);
    if (failure.status != Status::kOk) throw Error(failure.message);
  }
};

}  // namespace polysilicon
