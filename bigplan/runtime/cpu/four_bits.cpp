// Matrices to 4 bits in one pass: spec/four_bits.py has the format.

#include "elements.h"

#include <algorithm>
#include <cstdint>

namespace {

constexpr int COLUMNS = 64;  // that share a scale
constexpr int BOUNDS = 15;   // between the 16 levels

// The largest magnitude, NaN if there is one: as integers NaN is above all of them.
inline float largest(const float* values) {
  uint32_t most = 0;
#pragma GCC ivdep
  for (int i = 0; i < COLUMNS; i++) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float result;
  std::memcpy(&result, &most, sizeof most);
  return result;
}

// Write the scale in its own precision; what it is there.
inline float put_scale(float scale, float* place) { return *place = scale; }
inline float put_scale(float scale, Bf16* place) {
  place->bits = bf16(scale);
  return widened(*place);
}
inline float put_scale(float scale, Fp16* place) {
  float result;
  narrow_to_fp16(&scale, &place->bits, 1);
  widen(place, &result, 1);
  return result;
}

template <class Stored>
inline void pack_block(const float* values, const float* bounds, Stored* out) {
  constexpr int BYTES = COLUMNS / 2;
  const float scale = put_scale(largest(values), out + BYTES / sizeof(Stored));
  const float divisor = scale > 0 ? scale : 1.0f;
  int32_t counts[COLUMNS];
#pragma GCC ivdep
  for (int i = 0; i < COLUMNS; i++) {
    const float divided = values[i] / divisor;
    int32_t count = 0;
    for (int bound = 0; bound < BOUNDS; bound++) count += divided > bounds[bound];
    counts[i] = count;
  }
  uint8_t codes[BYTES];
#pragma GCC ivdep
  for (int i = 0; i < BYTES; i++)
    codes[i] = static_cast<uint8_t>(counts[2 * i] | counts[2 * i + 1] << 4);
  std::memcpy(out, codes, BYTES);
}

template <class Element, class Stored>
void pack(const Element* values, int64_t blocks, const float* bounds, Stored* out) {
  constexpr int64_t SIZE = COLUMNS / 2 / sizeof(Stored) + 1;
  float buffer[COLUMNS];
  for (int64_t block = 0; block < blocks; block++) {
    const auto* value = readable(values + block * COLUMNS, buffer, COLUMNS);
#pragma GCC ivdep
    for (int i = 0; i < COLUMNS; i++) buffer[i] = widened(value[i]);
    pack_block(buffer, bounds, out + block * SIZE);
  }
}

template <class Element>
void pack_into(const void* values, int64_t blocks, const float* bounds, void* out, int32_t type) {
  const auto* from = static_cast<const Element*>(values);
  if (type == BF16) return pack(from, blocks, bounds, static_cast<Bf16*>(out));
  if (type == FP16) return pack(from, blocks, bounds, static_cast<Fp16*>(out));
  return pack(from, blocks, bounds, static_cast<float*>(out));
}

}  // namespace

extern "C" {

// So many blocks of values of one type to codes and scales of another, one behind the other.
// `bounds` [15]: a value's code is the number of those that it is above, once divided.
void pack_four_bits(const void* values, int64_t count, int32_t type, const float* bounds, void* out,
                    int32_t stored) {
  const int64_t blocks = count / COLUMNS;
  if (type == BF16) return pack_into<Bf16>(values, blocks, bounds, out, stored);
  if (type == FP16) return pack_into<Fp16>(values, blocks, bounds, out, stored);
  return pack_into<float>(values, blocks, bounds, out, stored);
}
}
