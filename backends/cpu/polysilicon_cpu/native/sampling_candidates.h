// Candidates of a draw, and how few of them are found without sorting all.
#pragma once

#include <cstdint>

namespace polysilicon::sampling {

// A candidate; in the order of keys the better one comes first.
struct Entry {
  std::uint64_t key;
  float score;
  float weight;
};

// Puts a larger score first, and of equal ones the lower id.
inline std::uint64_t key_of(float score, std::int32_t id) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, score);
  const std::uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return std::uint64_t{~rising} << 32 | static_cast<std::uint32_t>(id);
}

inline std::int32_t id_of(const Entry& entry) { return static_cast<std::int32_t>(entry.key); }

inline bool better(const Entry& a, const Entry& b) { return a.key < b.key; }

// Reorders entries so that the shortest prefix in the order of keys that weighs at least `mass`
// stands first; its length, at least 1.
int shortest_prefix(Entry* entries, int count, double mass);

}  // namespace polysilicon::sampling
