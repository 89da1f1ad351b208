#include "context.h"

#include <algorithm>

#include "thread_pool.h"

namespace polysilicon {

Context::Context(const Kernels* kernels, int threads, const std::vector<int>& cpus)
    : kernels(kernels),
      threads(std::max(1, threads)),
      pool_(std::make_unique<ThreadPool>(std::max(1, threads), cpus)),
      scratch_(static_cast<std::size_t>(std::max(1, threads))) {}

Context::~Context() = default;

void Context::reserve(std::size_t bytes_per_thread) {
  for (Buffer& buffer : scratch_) buffer.grow(bytes_per_thread);
}

void* Context::workspace(Workspace purpose, std::size_t bytes) {
  Buffer& buffer = workspace_[static_cast<int>(purpose)];
  buffer.grow(bytes);
  return buffer.data();
}

std::size_t Context::workspace_bytes() const {
  std::size_t total = 0;
  for (const Buffer& buffer : scratch_) total += buffer.size();
  for (const Buffer& buffer : workspace_) total += buffer.size();
  return total;
}

void Context::run(int tasks, Function function, const void* body) {
  pool_->run(tasks, function, body);
}

}  // namespace polysilicon
