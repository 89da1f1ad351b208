// Memory of machines whose processors have memory of their own each.
#pragma once

#include <cstdint>

namespace polysilicon {

// Threads that are started while it lives spread what they touch first over these nodes (bit n for
// node n; none for the system's choice), so that weights come from all of them to whichever thread
// multiplies. A policy that the process was started with (numactl) stays.
class Interleaving {
 public:
  explicit Interleaving(std::uint64_t nodes);
  ~Interleaving();
  Interleaving(const Interleaving&) = delete;
  Interleaving& operator=(const Interleaving&) = delete;

 private:
  bool set_ = false;
};

}  // namespace polysilicon
