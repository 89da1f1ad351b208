// What the machine itself can do: rates of reading, copying and multiplying, without any op around.

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "api.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

using namespace polysilicon;

namespace {

enum Kind : int { kRead, kCopy, kFloat32, kBfloat16, kInt8 };

constexpr int kSums = 12;  // independent, to hide the latency of an instruction
constexpr int kSteps = 1 << 19;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::uint64_t read_all(const std::uint8_t* from, std::size_t bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(from + i + 4096);
    std::uint64_t words[8];
    std::memcpy(words, from + i, sizeof words);
    for (std::uint64_t word : words) sum ^= word;
  }
  return sum;
}

#ifdef __x86_64__

// The sums pass through an empty asm, so that no step can be left out.
#define PS_KEEP(index) asm volatile("" : "+v"(sums[index]));
#define PS_EACH(what) \
  what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7) what(8) what(9) what(10) what(11)

__attribute__((target("avx512f"), noinline)) void float32_512() {
  __m512 sums[kSums] = {}, factor = _mm512_set1_ps(0.5f);
  asm volatile("" : "+v"(factor));
#define PS_STEP(i) sums[i] = _mm512_fmadd_ps(factor, factor, sums[i]);
  for (int step = 0; step < kSteps; ++step) {
    PS_EACH(PS_STEP)
    PS_EACH(PS_KEEP)
  }
#undef PS_STEP
}

__attribute__((target("avx512f,avx512bf16"), noinline)) void bfloat16_512() {
  __m512 sums[kSums] = {};
  __m512i bits = _mm512_setzero_si512();
  asm volatile("" : "+v"(bits));
  const __m512bh pair = (__m512bh)bits;
#define PS_STEP(i) sums[i] = _mm512_dpbf16_ps(sums[i], pair, pair);
  for (int step = 0; step < kSteps; ++step) {
    PS_EACH(PS_STEP)
    PS_EACH(PS_KEEP)
  }
#undef PS_STEP
}

__attribute__((target("avx512f,avx512vnni"), noinline)) void int8_512() {
  __m512i sums[kSums] = {}, codes = _mm512_set1_epi8(1);
  asm volatile("" : "+v"(codes));
#define PS_STEP(i) sums[i] = _mm512_dpbusd_epi32(sums[i], codes, codes);
  for (int step = 0; step < kSteps; ++step) {
    PS_EACH(PS_STEP)
    PS_EACH(PS_KEEP)
  }
#undef PS_STEP
}

__attribute__((target("avx2,fma"), noinline)) void float32_256() {
  __m256 sums[kSums] = {}, factor = _mm256_set1_ps(0.5f);
  asm volatile("" : "+v"(factor));
#define PS_STEP(i) sums[i] = _mm256_fmadd_ps(factor, factor, sums[i]);
  for (int step = 0; step < kSteps; ++step) {
    PS_EACH(PS_STEP)
    PS_EACH(PS_KEEP)
  }
#undef PS_STEP
}

#undef PS_EACH
#undef PS_KEEP

#endif

struct Rate {
  void (*run)() = nullptr;
  double operations = 0;  // of one step of one sum; a multiplication and an addition are two
};

Rate rate_of(const char* level, int kind) {
#ifdef __x86_64__
  if (std::strcmp(level, "avx512") == 0) {
    if (kind == kFloat32) return {float32_512, 32};
    if (kind == kBfloat16) return {bfloat16_512, 64};
    if (kind == kInt8) return {int8_512, 128};
  }
  if (std::strcmp(level, "avx2") == 0 && kind == kFloat32) return {float32_256, 16};
#endif
  (void)level;
  (void)kind;
  return {};
}

// Seconds that `threads` threads take for body(thread), begun together.
template <class Body>
double together(int threads, const Body& body) {
  std::atomic<int> ready{0};
  std::vector<double> seconds(static_cast<std::size_t>(threads));
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread) {
    workers.emplace_back([&, thread] {
      ++ready;
      while (ready.load() < threads) std::this_thread::yield();
      const auto begin = std::chrono::steady_clock::now();
      body(thread);
      seconds[static_cast<std::size_t>(thread)] = seconds_since(begin);
    });
  }
  for (std::thread& worker : workers) worker.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

}  // namespace

// Bytes or operations a second of all threads together, of `kind`; 0 where the device's level has
// no such instruction. bytes: that are read, or copied, in all.
PS_API double ps_ceiling(Device* device, int kind, std::size_t bytes, ErrorText* error) {
  return guarded(error, 0.0, [&] {
    double result = 0;
    device->run([&] {
      const Context& context = device->context;
      const auto threads = static_cast<std::size_t>(context.threads);
      if (kind == kRead || kind == kCopy) {
        const std::size_t share = bytes / threads / 4096 * 4096;
        Buffer from(share * threads), to(kind == kCopy ? share * threads : 64);
        std::memset(from.data(), 1, from.size());
        std::memset(to.data(), 1, to.size());
        const std::size_t repeats = 1 + (std::size_t{256} << 20) / bytes;
        const auto pass = [&](int thread) {
          const std::size_t at = static_cast<std::size_t>(thread) * share;
          for (std::size_t i = 0; i < repeats; ++i) {
            if (kind == kRead) {
              const std::uint64_t sum = read_all(from.as<std::uint8_t>() + at, share);
              asm volatile("" : : "r"(sum));
            } else {
              std::memcpy(to.as<std::uint8_t>() + at, from.as<std::uint8_t>() + at, share);
            }
          }
        };
        result = static_cast<double>(share * threads * repeats) / together(context.threads, pass);
        return;
      }
      const Rate rate = rate_of(context.kernels->name, kind);
      if (rate.run == nullptr) return;
      result = rate.operations * kSums * kSteps * context.threads /
               together(context.threads, [&](int) { rate.run(); });
    });
    return result;
  });
}
