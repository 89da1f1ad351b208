// What the loops over tiles share: how many rows they take, how stored keys and values are read, and
// what is prefetched meanwhile.
#pragma once

#include <cstdint>

#include "levels/attention.h"
#include "levels/vectors.h"

namespace polysilicon::PS_LEVEL {
namespace {

constexpr int kVectors = kUnit / kWidth;  // of a unit's slots

#if defined(__AVX512F__)
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#elif defined(__ARM_NEON)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif
static_assert(kRows <= kTileRows);

// Units of keys and vectors of values side by side that `rows` rows leave registers for.
constexpr int units_beside(int rows) {
  if (kWidth == 16) return rows <= 4 ? 4 : 2;
  return kWidth == 8 && rows <= 2 ? 2 : 1;
}

constexpr int columns_beside(int rows) { return rows * 4 <= 2 * kRows ? 4 : 2; }

int padded_rows(int rows) {
  if (rows <= 4) return rows;
  return rows <= 6 ? 6 : rows <= 8 ? 8 : 12;
}

// How each storage gives two dimensions of a unit's keys, and two slots of its values.
template <Storage storage>
struct Stored;

template <>
struct Stored<Storage::kF32> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load(reinterpret_cast<const float*>(unit) + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load(reinterpret_cast<const float*>(unit) + slot * width + column);
  }
};

template <>
struct Stored<Storage::kF16> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(unit) + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(unit) + slot * width + column);
  }
};

template <>
struct Stored<Storage::kBF16> {
  static Floats half(const std::uint8_t* words, int index) {
    const Words pairs = load_as<Words>(words);
    return index % 2 ? high_bf16(pairs) : low_bf16(pairs);
  }
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return half(unit + (d / 2 * kUnit + vector * kWidth) * 4, d);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return half(unit + (static_cast<std::size_t>(slot / 2) * width + column) * 4, slot);
  }
};

template <>
struct Stored<Storage::kI8> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load_i8(reinterpret_cast<const std::int8_t*>(unit) + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load_i8(reinterpret_cast<const std::int8_t*>(unit) + slot * width + column);
  }
};

template <>
struct Stored<Storage::kF8> {
  static Floats key(const std::uint8_t* unit, int d, int vector) {
    return load_f8(unit + d * kUnit + vector * kWidth);
  }
  static Floats value(const std::uint8_t* unit, int width, int slot, int column) {
    return load_f8(unit + slot * width + column);
  }
};

// What is read some way ahead of a unit's keys or values: they are read in the order keys, values,
// and then the next part's keys. Each of `steps` steps fetches `lines` of its lines.
struct Ahead {
  const std::uint8_t* from = nullptr;
  int bytes = 0;
  int stride = 0;

  Ahead() = default;
  Ahead(const std::uint8_t* from, int bytes, int steps)
      : from(from), bytes(bytes), stride((bytes + 64 * steps - 1) / (64 * steps) * 64) {}

  void fetch(int step) const {
    const int end = (step + 1) * stride < bytes ? (step + 1) * stride : bytes;
    for (int i = step * stride; i < end; i += 64) __builtin_prefetch(from + i, 0, 3);
  }
};

// By experiment: with more the first cache overflows, with less memory is too slow.
constexpr int kAheadBytes = 8192;

int units_ahead(int bytes) { return bytes >= kAheadBytes ? 1 : kAheadBytes / bytes; }

// beside: units that are read at once.
Ahead ahead_of_keys(const TilePart& part, int unit, int beside, int steps) {
  if (part.key_bytes == 0) return {};
  const int end = (part.last + kUnit - 1) / kUnit;
  const int least = units_ahead(part.key_bytes);
  const int other = unit + (least < beside ? beside : least);
  if (other < end) return {part.keys[other], part.key_bytes, steps};
  const int value = part.first / kUnit + other - end;
  if (value < end) return {part.values[value], part.value_bytes, steps};
  return {};
}

Ahead ahead_of_values(const TilePart& part, int unit, int steps) {
  if (part.key_bytes == 0) return {};
  const int end = (part.last + kUnit - 1) / kUnit;
  const int other = unit + units_ahead(part.value_bytes);
  if (other < end) return {part.values[other], part.value_bytes, steps};
  const int key = other - end;
  if (part.next != nullptr && key < part.next_units) return {part.next[key], part.key_bytes, steps};
  return {};
}

}  // namespace
}  // namespace polysilicon::PS_LEVEL
