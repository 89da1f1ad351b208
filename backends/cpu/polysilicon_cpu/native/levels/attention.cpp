#include "levels/attention.h"

#include "levels/attention_floats.h"
#include "levels/attention_softmax.h"
#include "levels/attention_store.h"
#include "levels/attention_tiles.h"
#include "levels/attention_turn.h"
#if defined(__AVX512BF16__)
#include "levels/attention_pairs.h"
#endif

namespace polysilicon::PS_LEVEL {
namespace {

template <int R>
void attend_rows(const TilePart& part) {
#if defined(__AVX512BF16__)
  if (part.pairs) return attend_pairs<R>(part);
#endif
  switch (part.key_storage) {
    case Storage::kF32: score<Stored<Storage::kF32>, R>(part); break;
    case Storage::kF16: score<Stored<Storage::kF16>, R>(part); break;
    case Storage::kBF16: score<Stored<Storage::kBF16>, R>(part); break;
    case Storage::kI8: score<Stored<Storage::kI8>, R>(part); break;
    case Storage::kF8: score<Stored<Storage::kF8>, R>(part); break;
  }
  soften(part);
  switch (part.value_storage) {
    case Storage::kF32: mix<Stored<Storage::kF32>, R>(part); break;
    case Storage::kF16: mix<Stored<Storage::kF16>, R>(part); break;
    case Storage::kBF16: mix<Stored<Storage::kBF16>, R>(part); break;
    case Storage::kI8: mix<Stored<Storage::kI8>, R>(part); break;
    case Storage::kF8: mix<Stored<Storage::kF8>, R>(part); break;
  }
}

void attend(const TilePart& part) {
  switch (padded_rows(part.rows)) {
    case 1: return attend_rows<1>(part);
    case 2: return attend_rows<2>(part);
#if defined(__AVX2__) || defined(__ARM_NEON)
    case 3: return attend_rows<3>(part);
    case 4: return attend_rows<4>(part);
#endif
#if defined(__AVX2__)
    case 6: return attend_rows<6>(part);
#endif
#if defined(__AVX512F__)
    case 8: return attend_rows<8>(part);
    case 12: return attend_rows<12>(part);
#endif
  }
}

void angles(const double* frequencies, int pairs, float scale, int position, float* cosine,
            float* sine) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: leaves whole numbers in the low bits
  constexpr double kQuarter = 1.5707963267341256;  // pi / 2 in 33 bits: products with n are exact
  constexpr double kRest = 6.077100506506192e-11;
PS_IVDEP
  for (int i = 0; i < pairs; ++i) {
    const double angle = position * frequencies[i];
    const double shifted = angle * 0.63661977236758134308 + kShift;
    const std::int64_t quarters = __builtin_bit_cast(std::int64_t, shifted);
    const double n = shifted - kShift;
    const double r = (angle - n * kQuarter) - n * kRest;
    const double z = r * r;
    // Taylor's series: for |r| <= pi / 4 their rest is far below what a float32 shows.
    double s = 1.0 / 362880 - z / 39916800;
    s = -1.0 / 5040 + z * s;
    s = 1.0 / 120 + z * s;
    s = r + r * z * (-1.0 / 6 + z * s);
    double c = 1.0 / 40320 - z / 3628800;
    c = -1.0 / 720 + z * c;
    c = 1.0 / 24 + z * c;
    c = 1.0 + z * (-1.0 / 2 + z * c);
    const bool swapped = quarters & 1;
    const double y = swapped ? c : s;
    const double x = swapped ? s : c;
    sine[i] = static_cast<float>((quarters & 2 ? -y : y) * scale);
    cosine[i] = static_cast<float>(((quarters + 1) & 2 ? -x : x) * scale);
  }
}

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
constexpr auto widen = nullptr;
#endif

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    kRows, kPairs,    padded_rows, pack_query, attend, fold,
    finish, store_key, store_value, turn,       widen,  angles,
};

}  // namespace polysilicon::PS_LEVEL
