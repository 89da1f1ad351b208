// Vectors of AVX512, and the codes of repacked weights as operands of its dot products.
#pragma once

#include <immintrin.h>

#include <utility>

#include "levels/products_generic.h"

#define PS_INLINE __attribute__((always_inline)) inline
#define PS_LAMBDA __attribute__((always_inline))

namespace polysilicon::PS_LEVEL {
namespace {

template <int... index, class Body>
PS_INLINE void unroll(std::integer_sequence<int, index...>, const Body& body) {
  (body(std::integral_constant<int, index>{}), ...);
}

template <int count, class Body>
PS_INLINE void unroll(const Body& body) {
  unroll(std::make_integer_sequence<int, count>{}, body);
}

PS_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }

PS_INLINE int load_int(const std::uint8_t* from) {
  int value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

PS_INLINE float load_float(const std::uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <int by>
PS_INLINE __m512i shift_right(__m512i bytes) {
  if constexpr (by > 0) return _mm512_srli_epi16(bytes, by);
  if constexpr (by < 0) return _mm512_slli_epi16(bytes, -by);
  return bytes;
}

// The codes of inputs 4 r .. 4 r + 3 of every lane, from a tile's planes.
template <int bits, int r>
PS_INLINE __m512i codes_of(const __m512i* planes) {
  if constexpr (bits == 8) {
    return planes[r];
  } else {
    constexpr bool four = bits & 4, two = bits & 2, one = bits & 1;
    constexpr int two_low = four ? 4 : 0, one_low = bits - 1;
    const __m512i* two_planes = planes + (four ? 4 : 0);
    const __m512i* one_plane = two_planes + (two ? 2 : 0);
    __m512i codes;
    if constexpr (four) {
      codes = _mm512_and_si512(shift_right<r / 4 * 4>(planes[r % 4]), _mm512_set1_epi8(15));
    }
    if constexpr (two) {
      const __m512i shifted = shift_right<r / 2 * 2 - two_low>(two_planes[r % 2]);
      const __m512i mask = _mm512_set1_epi8(3 << two_low);
      // 0xf8 is a | (b & c).
      if constexpr (four) codes = _mm512_ternarylogic_epi64(codes, shifted, mask, 0xf8);
      else codes = _mm512_and_si512(shifted, mask);
    }
    if constexpr (one) {
      const __m512i shifted = shift_right<r - one_low>(one_plane[0]);
      const __m512i mask = _mm512_set1_epi8(1 << one_low);
      codes = _mm512_ternarylogic_epi64(codes, shifted, mask, 0xf8);
    }
    return codes;
  }
}

// Vectors of 16-bit numbers, pairs of inputs in a lane, from codes of four inputs: even is inputs 0
// and 1, odd 2 and 3.
struct Pairs {
  __m512i even, odd;
};

PS_INLINE Pairs words_of(__m512i codes) {
  const __m512i first = _mm512_set1_epi32(static_cast<int>(0xff01ff00u));
  const __m512i step = _mm512_set1_epi32(static_cast<int>(0x00020002u));
  // Within 128 bits, from byte 4 n of each lane's four.
  const __m512i lanes = _mm512_set4_epi32(0x000c000c, 0x00080008, 0x00040004, 0);
  const __m512i even = _mm512_add_epi8(first, lanes);
  return {_mm512_shuffle_epi8(codes, even),
          _mm512_shuffle_epi8(codes, _mm512_add_epi8(even, step))};
}

// Codes as whole numbers in bfloat16. Up to 7 bits are raised by 128, where bfloat16 is spaced by 1.
template <int bits>
PS_INLINE Pairs bfloat16_of(__m512i codes) {
  if constexpr (bits < 8) {
    const Pairs words = words_of(codes);
    const __m512i raise = _mm512_set1_epi16(0x4300);
    return {_mm512_or_si512(words.even, raise), _mm512_or_si512(words.odd, raise)};
  } else {
    const __m512i byte = _mm512_set1_epi32(255);
    const auto number = [byte](__m512i word) PS_LAMBDA {
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(word, byte)));
    };
    const __m512i a = number(codes), b = number(_mm512_srli_epi32(codes, 8));
    const __m512i c = number(_mm512_srli_epi32(codes, 16));
    const __m512i d = number(_mm512_srli_epi32(codes, 24));
    return {_mm512_or_si512(_mm512_srli_epi32(a, 16), b),
            _mm512_or_si512(_mm512_srli_epi32(c, 16), d)};
  }
}

int bfloat16_raise(Codes codes, int bits) {
  return codes == Codes::kAffine && bits < 8 ? 128 : 0;
}

// How a product reads the record of a row: `vectors` vectors of codes a tile, each multiplied with
// 4 bytes of the record.
struct Int8Product {
  static constexpr int vectors = 8;
  static constexpr bool high = true;  // whether inputs may have a high byte
  using Sum = __m512i;

  static const RecordPart& part(const RecordLayout& layout) { return layout.int8; }
  static PS_INLINE Sum step(Sum sum, __m512i codes, const std::uint8_t* values) {
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(load_int(values)));
  }
  static PS_INLINE __m512 value(Sum sum, const std::uint8_t* correction) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(load_int(correction))));
  }
  static PS_INLINE __m512 finish(__m512 total, const std::uint8_t* step) {
    return _mm512_mul_ps(total, _mm512_set1_ps(load_float(step)));
  }
};

struct Bfloat16Product {
  static constexpr int vectors = 16;
  static constexpr bool high = false;
  using Sum = __m512;

  static const RecordPart& part(const RecordLayout& layout) { return layout.bfloat16; }
  static PS_INLINE Sum step(Sum sum, __m512i codes, const std::uint8_t* values) {
    return _mm512_dpbf16_ps(sum, (__m512bh)codes, (__m512bh)_mm512_set1_epi32(load_int(values)));
  }
  static PS_INLINE __m512 value(Sum sum, const std::uint8_t* correction) {
    return _mm512_add_ps(sum, _mm512_set1_ps(load_float(correction)));
  }
  static PS_INLINE __m512 finish(__m512 total, const std::uint8_t*) { return total; }
};

// The vectors of one half of a tile, in order, given to use(index, vector).
template <class Product, int bits, int half, class Use>
PS_INLINE void half_vectors(const __m512i* planes, const Use& use) {
  unroll<4>([&](auto index) PS_LAMBDA {
    constexpr int r = half * 4 + index;
    const __m512i codes = codes_of<bits, r>(planes);
    if constexpr (Product::vectors == 8) {
      use(std::integral_constant<int, r>{}, codes);
    } else {
      const Pairs pairs = bfloat16_of<bits>(codes);
      use(std::integral_constant<int, 2 * r>{}, pairs.even);
      use(std::integral_constant<int, 2 * r + 1>{}, pairs.odd);
    }
  });
}

// Unpacks a tile into vectors.
template <class Product, int bits>
PS_INLINE void unpack_affine(const std::uint8_t* tile, __m512i* vectors) {
  __m512i planes[bits];
  unroll<bits>([&](auto i) PS_LAMBDA { planes[i] = load(tile + i * 64); });
  unroll<2>([&](auto half) PS_LAMBDA {
    half_vectors<Product, bits, half>(planes, [&](auto index, __m512i vector) PS_LAMBDA {
      _mm512_storeu_si512(vectors + index, vector);
    });
  });
}

// Floats nearest to which bfloat16 is taken, two for each lane, as pairs.
PS_INLINE __m512i bfloat16_pairs(__m512 low, __m512 high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  alignas(64) static constexpr std::uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(load(kOrder), both);
}

void unpack_table(const Segment& segment, const std::uint8_t* tile, __m512i* vectors) {
  alignas(64) std::uint8_t codes[8 * 64];
  code_bytes(tile, segment.bits, codes);
  if (segment.bits <= 4) {
    const __mmask16 mask = static_cast<__mmask16>((1u << (1 << segment.bits)) - 1);
    const __m512 floats = _mm512_maskz_loadu_ps(mask, segment.table);
    const __m512i table = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(floats));
    for (int r = 0; r < 8; ++r) {
      const Pairs words = words_of(load(codes + r * 64));
      vectors[2 * r] = _mm512_permutexvar_epi16(words.even, table);
      vectors[2 * r + 1] = _mm512_permutexvar_epi16(words.odd, table);
    }
    return;
  }
  for (int r = 0; r < 8; ++r) {
    const __m512i bytes = load(codes + r * 64);
    __m512 values[4];
    for (int b = 0; b < 4; ++b) {
      const __m512i shifted = _mm512_srli_epi32(bytes, static_cast<unsigned>(b) * 8);
      const __m512i index = _mm512_and_si512(shifted, _mm512_set1_epi32(255));
      values[b] = _mm512_i32gather_ps(index, segment.table, 4);
    }
    vectors[2 * r] = bfloat16_pairs(values[0], values[1]);
    vectors[2 * r + 1] = bfloat16_pairs(values[2], values[3]);
  }
}

void unpack_float16(const std::uint8_t* tile, __m512i* vectors) {
  for (int pair = 0; pair < kTile / 2; ++pair) {
    const __m512i bits = load(tile + pair * 64);
    const __m512 low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
    const __m512 high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    vectors[pair] = bfloat16_pairs(low, high);
  }
}

template <class Product, int bits>
void unpack_block(const Segment& segment, const std::uint8_t* codes, int step, __m512i* panel) {
  for (int tile = 0; tile < segment.tiles; ++tile) {
    __m512i* vectors = panel + tile * step;
    if constexpr (bits > 0) {
      unpack_affine<Product, bits>(codes, vectors);
    } else if (segment.codes == Codes::kTable) {
      unpack_table(segment, codes, vectors);
    } else if (segment.codes == Codes::kFloat16) {
      unpack_float16(codes, vectors);
    } else {
      std::memcpy(vectors, codes, 16 * 64);
    }
    codes += segment.tile_bytes;
  }
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
