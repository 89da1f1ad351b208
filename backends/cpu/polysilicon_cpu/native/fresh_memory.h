// Memory that the system hands out page by page as it is first written, kept a little ahead of
// its use: taking and clearing fresh pages costs a prefill on the order of a tenth of its time.
#pragma once

#include <cstddef>

#include "buffer.h"
#include "queue.h"

namespace polysilicon {

// Slabs of equal size that are used from their beginnings on, side by side: the layers of a pool.
// Used by the thread of one queue.
class FreshMemory : public IdleWork {
 public:
  // Throws OutOfMemory.
  FreshMemory(std::size_t slabs, std::size_t slab_bytes);

  const Buffer& buffer() const { return buffer_; }

  // The first `bytes` of every slab are in use.
  void use(std::size_t bytes);

  // Has the system provide a piece of what comes next.
  bool run() override;

 private:
  Buffer buffer_;
  std::size_t slabs_, slab_bytes_;
  std::size_t wanted_;          // of every slab
  std::size_t provided_ = 0;    // of every slab
  std::size_t next_slab_ = 0;   // those before it have a piece more
};

}  // namespace polysilicon
