// Gradients of looked-up rows, added to the rows of a table's sum in host memory.
//
// A row's gradients are added in fp32, in their order, and to the sum once: no result depends on
// threads. Each thread takes some places of the sorted rows at a time, with all of a row that begins
// there.

#include "elements.h"
#include "team.h"

#include <algorithm>
#include <cstdint>

extern "C" {

// As native.py's _Rows has it. Row rows[i] gets gradient order[i]; rows are sorted.
struct Rows {
  int64_t count;
  int64_t columns;
  const int64_t* rows;
  const int64_t* order;
  void* total;
  const void* gradients;
  int32_t total_type;
  int32_t gradient_type;
};
}

namespace {

constexpr int64_t PLACES = 8;

inline void narrow(const float* from, Bf16* to, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) to[i].bits = bf16(from[i]);
}

inline void narrow(const float* from, Fp16* to, int64_t count) {
  narrow_to_fp16(from, reinterpret_cast<uint16_t*>(to), count);
}

inline void put(float* sum, float* total, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) total[i] += sum[i];
}

// The sum is rounded before it is added, as in torch.
template <class Total>
void put(float* sum, Total* total, int64_t count) {
  Total rounded[BLOCK];
  float buffer[BLOCK], other[BLOCK];
  narrow(sum, rounded, count);
  const auto* before = readable(total, buffer, count);
  const auto* part = readable(rounded, other, count);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) sum[i] = widened(before[i]) + widened(part[i]);
  narrow(sum, total, count);
}

// Not inlined: g++ 12 would swap this loop with that over places, and gather elements.
template <class Element>
__attribute__((noinline)) void add(float* sum, const Element* values, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) sum[i] += widened(values[i]);
}

// Of the places from `first` to `last`, all of one row.
template <class Total, class Gradient>
void add_run(const Rows& all, int64_t first, int64_t last) {
  const auto* gradients = static_cast<const Gradient*>(all.gradients);
  auto* total = static_cast<Total*>(all.total) + all.rows[first] * all.columns;
  float sum[BLOCK], buffer[BLOCK];
  for (int64_t start = 0; start < all.columns; start += BLOCK) {
    const int64_t several = std::min(BLOCK, all.columns - start);
    std::fill(sum, sum + several, 0.0f);
    for (int64_t place = first; place < last; place++) {
      const auto* one = gradients + all.order[place] * all.columns + start;
      add(sum, readable(one, buffer, several), several);
    }
    put(sum, total + start, several);
  }
}

template <class Total, class Gradient>
void add_runs(const Rows& all, const Team& team) {
  in_parallel((all.count + PLACES - 1) / PLACES, team, [&](int64_t number) {
    const int64_t* rows = all.rows;
    const int64_t behind = std::min(all.count, (number + 1) * PLACES);
    int64_t first = number * PLACES;
    while (first < behind && first > 0 && rows[first] == rows[first - 1]) first++;
    while (first < behind) {
      int64_t last = first + 1;
      while (last < all.count && rows[last] == rows[first]) last++;
      add_run<Total, Gradient>(all, first, last);
      first = last;
    }
  });
}

template <class Total>
void by_gradient(const Rows& all, const Team& team) {
  if (all.gradient_type == BF16) return add_runs<Total, Bf16>(all, team);
  if (all.gradient_type == FP16) return add_runs<Total, Fp16>(all, team);
  return add_runs<Total, float>(all, team);
}

}  // namespace

extern "C" {

void add_rows(const Rows* all, const Team* team) {
  if (all->total_type == BF16) return by_gradient<Bf16>(*all, *team);
  if (all->total_type == FP16) return by_gradient<Fp16>(*all, *team);
  return by_gradient<float>(*all, *team);
}
}
