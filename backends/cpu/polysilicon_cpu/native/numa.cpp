#include "numa.h"

#ifdef __linux__
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace polysilicon {

#ifdef __linux__

Interleaving::Interleaving(std::uint64_t nodes) {
  int mode = MPOL_DEFAULT;
  if (nodes == 0 || syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return;
  if (mode != MPOL_DEFAULT) return;
  const unsigned long mask[] = {static_cast<unsigned long>(nodes), 0};
  set_ = syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, mask, 65) == 0;
}

Interleaving::~Interleaving() {
  if (set_) syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0);
}

#else

Interleaving::Interleaving(std::uint64_t) {}
Interleaving::~Interleaving() { static_cast<void>(set_); }

#endif

}  // namespace polysilicon
