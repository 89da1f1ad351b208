#include "levels.h"

#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace polysilicon {

namespace portable {
extern const Kernels kernels;
}

#ifdef __x86_64__
namespace avx2 {
extern const Kernels kernels;
}
namespace avxvnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kernels;
}
namespace neon_dotprod {
extern const Kernels kernels;
}
namespace neon_i8mm {
extern const Kernels kernels;
}
#endif

namespace {

bool always() { return true; }

#ifdef __x86_64__

// Registers of CPUID's leaf 7 and what the operating system saves of the vector registers.
struct Processor {
  unsigned leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_1_eax = 0;
  unsigned long long saved = 0;

  Processor() {
    unsigned eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
      leaf7_ebx = ebx;
      leaf7_ecx = ecx;
      leaf7_edx = edx;
      if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) leaf7_1_eax = eax;
    }
    if (leaf1_ecx & (1u << 27)) {
      unsigned low, high;
      asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      saved = (static_cast<unsigned long long>(high) << 32) | low;
    }
  }
};

bool all(unsigned bits, std::initializer_list<int> wanted) {
  for (int bit : wanted) {
    if (!(bits >> bit & 1)) return false;
  }
  return true;
}

bool has_avx2() {
  const Processor processor;
  return (processor.saved & 0x6) == 0x6 && all(processor.leaf1_ecx, {12, 28, 29}) &&
         all(processor.leaf7_ebx, {3, 5, 8});
}

bool has_avxvnni() { return has_avx2() && all(Processor().leaf7_1_eax, {4}); }

bool has_avx512() {
  const Processor processor;
  return has_avx2() && (processor.saved & 0xe6) == 0xe6 &&
         all(processor.leaf7_ebx, {16, 17, 30, 31}) && all(processor.leaf7_ecx, {1, 11}) &&
         all(processor.leaf7_1_eax, {5});
}

#ifdef PS_AMX_EMULATION

bool has_amx() { return has_avx512(); }

#else

// Linux gives a process the tiles' registers when it asks for them.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;     // XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  const Processor processor;
  return has_avx512() && (processor.saved & 0x60000) == 0x60000 &&
         all(processor.leaf7_edx, {22, 24}) && may_use_tiles();
}

#endif

#elif defined(__aarch64__)

#if defined(__linux__)

bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM); }

#elif defined(__APPLE__)

bool feature(const char* name) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value == 1;
}

bool has_dotprod() { return feature("hw.optional.arm.FEAT_DotProd"); }

bool has_i8mm() { return has_dotprod() && feature("hw.optional.arm.FEAT_I8MM"); }

#else

bool has_dotprod() { return false; }

bool has_i8mm() { return false; }

#endif
#endif

}  // namespace

const Level kLevels[] = {
#ifdef __x86_64__
    {&amx::kernels, has_amx},
    {&avx512::kernels, has_avx512},
    {&avxvnni::kernels, has_avxvnni},
    {&avx2::kernels, has_avx2},
#elif defined(__aarch64__)
    {&neon_i8mm::kernels, has_i8mm},
    {&neon_dotprod::kernels, has_dotprod},
    {&neon::kernels, always},
#endif
    {&portable::kernels, always},
};
const int kLevelCount = sizeof(kLevels) / sizeof(kLevels[0]);

const Kernels* find_level(std::string_view name) {
  for (const Level& level : kLevels) {
    if (name == level.kernels->name && level.supported()) return level.kernels;
  }
  return nullptr;
}

}  // namespace polysilicon
