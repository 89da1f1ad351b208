// polysilicon_cpu_checks [CASES] [SEED] [LEVEL...]: random cases of every kind at every level that
// runs here, or at those named.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "checks.h"
#include "levels.h"

extern "C" int ps_self_test(const char* level);

using namespace polysilicon;
using namespace polysilicon::checks;

namespace {

struct Check {
  const char* name;
  void (*run)(Context&, Random&);
  int every;  // how many cases there are for one of it
};

constexpr Check kChecks[] = {
    {"products", check_product, 1},
    {"attention", check_attention, 10},
    {"rows", check_rows, 1},
    {"sampling", check_sampling, 1},
};

bool check_level(const Level& level, int cases, std::uint64_t seed) {
  if (const int status = ps_self_test(level.kernels->name)) {
    std::printf("%s: the self-test ended with %d\n", level.kernels->name, status);
    return false;
  }
  for (const Check& check : kChecks) {
    const auto begin = std::chrono::steady_clock::now();
    Context one(level.kernels, 1), two(level.kernels, 2);
    for (int index = 0; index < cases; index += check.every) {
      const std::uint64_t own = seed * 1'000'003 + static_cast<std::uint64_t>(index);
      Random random(own);
      try {
        check.run(random.integer(0, 7) == 0 ? two : one, random);
      } catch (const std::exception& error) {
        std::printf("%s, %s, seed %llu, case %d: %s\n", level.kernels->name, check.name,
                    static_cast<unsigned long long>(seed), index, error.what());
        return false;
      }
    }
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    std::printf("%s: %d cases of %s in %.1f s\n", level.kernels->name,
                (cases + check.every - 1) / check.every, check.name, passed.count());
    std::fflush(stdout);
  }
  return true;
}

bool chosen(const Level& level, int count, char** names) {
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(names[i], level.kernels->name) == 0) return level.supported();
  }
  return count <= 0 && level.supported();
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? std::atoi(arguments[1]) : 1000;
  const std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  int ran = 0;
  for (int i = 0; i < kLevelCount; ++i) {
    if (!chosen(kLevels[i], count - 3, arguments + 3)) continue;
    if (!check_level(kLevels[i], cases, seed)) return 1;
    ++ran;
  }
  if (ran == 0) std::puts("no level of these runs here");
  return ran == 0 ? 1 : 0;
}
