// Aligned memory that knows its size. Not for files compiled once per level.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace polysilicon {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct OutOfMemory : Error {
  using Error::Error;
};

// Zeroed bytes at a 64-byte border; from 2 MiB on whole pages, huge ones where the system allows.
// Throws OutOfMemory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  // Makes room for at least `bytes`; what was there is lost when it has to grow.
  void grow(std::size_t bytes);

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace polysilicon
