// A hash for file names and integrity: 128 bits, from two runs of FNV-1a (Fowler, Noll and Vo) with different seeds.
// Not cryptographic: a user who can write to the cache can forge any hash.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace jaxkern {

inline uint64_t Hash(std::string_view text, uint64_t seed) {
  uint64_t h = seed;
  for (const unsigned char c : text) h = (h ^ c) * 1099511628211u;
  return h;
}

inline std::string HexHash(std::string_view text) {
  char hex[33];
  std::snprintf(hex, sizeof hex, "%016llx%016llx", static_cast<unsigned long long>(Hash(text, 14695981039346656037u)),
                static_cast<unsigned long long>(Hash(text, 0x9e3779b97f4a7c15u)));
  return hex;
}

}  // namespace jaxkern
