#include "buffer.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace polysilicon {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

bool is_large(std::size_t bytes) { return bytes >= kHugePage; }

#ifdef __linux__

// Fresh pages of the system are zero, and cost nothing before they are used.
void* map_pages(std::size_t bytes) {
  const std::size_t rounded = round_up(bytes, kHugePage);
  void* mapped = mmap(nullptr, rounded + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const std::size_t place = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t before = round_up(place, kHugePage) - place;
  if (before > 0) munmap(begin, before);
  if (before < kHugePage) munmap(begin + before + rounded, kHugePage - before);
  madvise(begin + before, rounded, MADV_HUGEPAGE);
  return begin + before;
}

#endif

void* allocate(std::size_t bytes) {
#ifdef __linux__
  if (is_large(bytes)) return map_pages(bytes);
#endif
  const std::size_t rounded = round_up(bytes, kLine);
  void* memory = std::aligned_alloc(kLine, rounded);
  if (memory != nullptr) std::memset(memory, 0, rounded);
  return memory;
}

void release(void* memory, std::size_t size) {
  if (memory == nullptr) return;
#ifdef __linux__
  if (is_large(size + kLine)) {
    munmap(memory, round_up(size + kLine, kHugePage));
    return;
  }
#endif
  std::free(memory);
}

}  // namespace

Buffer::Buffer(std::size_t bytes) {
  if (bytes == 0) return;
  // A line beyond the end lets vector code read, not use, past the last element.
  data_ = allocate(bytes + kLine);
  if (data_ == nullptr) throw OutOfMemory(std::to_string(bytes) + " bytes cannot be allocated");
  size_ = bytes;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Buffer::~Buffer() { release(data_, size_); }

void Buffer::grow(std::size_t bytes) {
  if (bytes <= size_) return;
  // The old memory goes first: together they may not fit.
  *this = Buffer();
  *this = Buffer(bytes);
}

}  // namespace polysilicon
