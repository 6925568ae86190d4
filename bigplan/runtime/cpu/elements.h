// Values in fp32, bf16 and fp16 as the loops over host memory read and write them.
//
// What is read is asked for ahead of a loop: on 12 of 16 cores of a Xeon, beside copies, that is 10%
// faster for AdamW, a third for sums of bf16 and two thirds for their squares; on two cores of an
// EPYC 9004 it makes no difference, but 40% where AdamW's four arrays lie powers of two apart
// (benchmarks/cpu_prefetch.py).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

enum Type : int32_t { NONE, FP32, BF16, FP16 };  // as native.py counts them

// Elements of a block: buffers of it fit in the first cache.
constexpr int64_t BLOCK = 1024;

// Elements that are asked for at a time, and how many bytes before they are read.
constexpr int64_t ASKED = 64;
constexpr int64_t AHEAD = 4096;
constexpr int LEVEL = 2;  // of __builtin_prefetch: 3 is the first cache, 2 the second

// Where the CPU has no such instruction: rounded twice, rather than by a call for each.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }

inline float widened(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

// To nearest, ties to even; a carry out of the largest makes it infinite. NaN stays NaN.
inline uint16_t bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#ifdef __F16C__
inline void widen(const Fp16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; i++) to[i] = _cvtsh_ss(from[i].bits);
}

inline void narrow_to_fp16(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}
#else  // has_fp16() says so
inline void widen(const Fp16*, float*, int64_t) {}
inline void narrow_to_fp16(const float*, uint16_t*, int64_t) {}
#endif

// Values as a loop reads them: where they lie, fp16 from the buffer.
inline const float* readable(const float* gradient, float*, int64_t) { return gradient; }
inline const Bf16* readable(const Bf16* gradient, float*, int64_t) { return gradient; }
inline const float* readable(const Fp16* gradient, float* buffer, int64_t count) {
  widen(gradient, buffer, count);
  return buffer;
}

// ASKED elements, AHEAD bytes from these. What lies behind the end of an array is asked for in vain.
template <class Element>
inline void ask(const Element* elements) {
  const char* bytes = reinterpret_cast<const char*>(elements) + AHEAD;
  for (size_t i = 0; i < ASKED * sizeof(Element); i += 64) __builtin_prefetch(bytes + i, 0, LEVEL);
}

// Whole lines go past the caches, what lies before and after them through.
inline void stream(const uint16_t* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
#ifdef __SSE2__
  const int64_t before = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64 / 2;
  i = std::min(before, count);
  std::memcpy(to, from, 2 * i);
  for (; i + 32 <= count; i += 32)
    for (int64_t j = i; j < i + 32; j += 8) {
      const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), values);
    }
#endif
  std::memcpy(to + i, from + i, 2 * (count - i));
}

// Before anyone is told that what was streamed is there.
inline void settle() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace
