// Sums over gradients in host memory, each in one pass: of two of them, and of squares.

#include "elements.h"
#include "team.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

// Partial sums of squares that a block has: they stay in registers.
constexpr int64_t LANES = ASKED;

inline void put(float value, float* place) { *place = value; }
inline void put(float value, Bf16* place) { place->bits = bf16(value); }

template <class Element>
void add(Element* total, const Element* part, int64_t count) {
  const auto elements = [=](int64_t from, int64_t several) {
#pragma GCC ivdep
    for (int64_t i = from; i < from + several; i++)
      put(widened(total[i]) + widened(part[i]), total + i);
  };
  int64_t i = 0;
  for (; i + ASKED <= count; i += ASKED) {
    ask(total + i);
    ask(part + i);
    elements(i, ASKED);
  }
  elements(i, count - i);
}

void add(Fp16* total, const Fp16* part, int64_t count) {
  float sum[BLOCK], other[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t several = std::min(BLOCK, count - start);
    widen(total + start, sum, several);
    widen(part + start, other, several);
    add(sum, other, several);
    narrow_to_fp16(sum, reinterpret_cast<uint16_t*>(total + start), several);
  }
}

// Lanes are added up block by block, in fp64: the result depends on the values alone.
template <class Element>
double squares(const Element* values, int64_t count) {
  float buffer[BLOCK];
  double total = 0.0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t several = std::min(BLOCK, count - start);
    const auto* value = readable(values + start, buffer, several);
    float lanes[LANES] = {};
    const auto elements = [&](int64_t from, int64_t width) {
#pragma GCC ivdep
      for (int64_t i = 0; i < width; i++) {
        const float v = widened(value[from + i]);
        lanes[i] = multiply_add(v, v, lanes[i]);
      }
    };
    int64_t i = 0;
    for (; i + LANES <= several; i += LANES) {
      ask(values + start + i);
      elements(i, LANES);
    }
    elements(i, several - i);
    total = std::accumulate(lanes, lanes + LANES, total);
  }
  return total;
}

template <class Element>
void add_all(void* total, const void* part, int64_t count, const Team& team) {
  in_parallel(chunks(count), team, [=](int64_t number) {
    const int64_t start = number * CHUNK;
    add(static_cast<Element*>(total) + start, static_cast<const Element*>(part) + start,
        std::min(CHUNK, count - start));
  });
}

template <class Element>
double squares_of_all(const void* values, int64_t count, const Team& team) {
  std::vector<double> sums(chunks(count));
  in_parallel(chunks(count), team, [&](int64_t number) {
    const int64_t start = number * CHUNK;
    sums[number] =
        squares(static_cast<const Element*>(values) + start, std::min(CHUNK, count - start));
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace

extern "C" {

// Whether 16-bit values may be fp16.
int32_t has_fp16() {
#ifdef __F16C__
  return 1;
#else
  return 0;
#endif
}

// total += part, in fp32; rounded to the type of both.
void add(void* total, const void* part, int64_t count, int32_t type, const Team* team) {
  if (type == BF16) return add_all<Bf16>(total, part, count, *team);
  if (type == FP16) return add_all<Fp16>(total, part, count, *team);
  return add_all<float>(total, part, count, *team);
}

double square_sum(const void* values, int64_t count, int32_t type, const Team* team) {
  if (type == BF16) return squares_of_all<Bf16>(values, count, *team);
  if (type == FP16) return squares_of_all<Fp16>(values, count, *team);
  return squares_of_all<float>(values, count, *team);
}
}
