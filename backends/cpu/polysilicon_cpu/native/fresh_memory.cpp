#include "fresh_memory.h"

#include <algorithm>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#endif

namespace polysilicon {
namespace {

// Of a slab, in bytes: a huge page.
constexpr std::size_t kAhead = std::size_t{2} << 20;
// Small enough that a call which arrives meanwhile does not wait for long.
constexpr std::size_t kPiece = std::size_t{512} << 10;

// Maps what is not yet, and leaves what was written as it is. Not in Linux before 5.14.
bool provide(char* begin, std::size_t bytes) {
#ifdef __linux__
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t before = reinterpret_cast<std::uintptr_t>(begin) % page;
  return madvise(begin - before, bytes + before, MADV_POPULATE_WRITE) == 0;
#else
  (void)begin, (void)bytes;
  return false;
#endif
}

}  // namespace

FreshMemory::FreshMemory(std::size_t slabs, std::size_t slab_bytes)
    : buffer_(slabs * slab_bytes), slabs_(slabs), slab_bytes_(slab_bytes),
      wanted_(std::min(kAhead, slab_bytes)) {}

void FreshMemory::use(std::size_t bytes) {
  wanted_ = std::max(wanted_, std::min(bytes + kAhead, slab_bytes_));
}

bool FreshMemory::run() {
  if (provided_ >= wanted_) return false;
  const std::size_t bytes = std::min(kPiece, wanted_ - provided_);
  if (!provide(buffer_.as<char>() + next_slab_ * slab_bytes_ + provided_, bytes)) {
    provided_ = slab_bytes_;
    return false;
  }
  if (++next_slab_ == slabs_) {
    next_slab_ = 0;
    provided_ += bytes;
  }
  return provided_ < wanted_;
}

}  // namespace polysilicon
