// AdamW and SGD on parts of parameters in one pass over memory; native.py compiles and calls it.
//
// One call does them all, on threads of its own: they take chunks as they come and never wait for
// Python's interpreter.
//
// With a 16-bit copy AdamW moves 30 bytes of host memory a parameter: parameter, gradient and two
// moments are read (16), all but the gradient written (12), and so is the copy (2). Work goes block
// by block: new parameters are rounded into a buffer in the first cache and streamed from there
// past the caches, which would otherwise read the copy's lines before they write them (2 bytes).
// Gradients are widened and divided in registers, and not written back. To widen, divide and round
// in loops of their own, through buffers too, took 10 to 30% off the rate (EPYC 9004, two cores and
// one): memory idles meanwhile. fp16 alone has loops of its own, as compilers do not put it into
// vectors.
//
// What is read is asked for ahead of the loop: on 16 cores of a Xeon that is 10% faster, beside
// copies and without; on two of an EPYC 9004 it makes no difference, but 40% where the four arrays
// lie powers of two apart (benchmarks/cpu_prefetch.py).
//
// Every fused multiply-add is written out and the compiler may add none (-ffp-contract=off), square
// roots and divisions are IEEE's: an element's bits depend on its own values alone, not on where a
// part begins or on vectors and tails. They are those of the vector body of torch's fused kernels
// as built for AVX2 and AVX-512.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

// Elements of a block: the buffers take 6 KiB of the first cache.
constexpr int64_t BLOCK = 1024;

// Elements that are asked for at a time, and how many before they are read: 2 KiB of fp32.
constexpr int64_t ASKED = 64;
constexpr int64_t AHEAD = 512;
constexpr int LEVEL = 2;  // of __builtin_prefetch: 3 is the first cache, 2 the second

// Elements that a thread takes at a time: half a millisecond of a core's work, so that all end
// within that of each other.
constexpr int64_t CHUNK = 1 << 17;

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
void widen(const Fp16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; i++) to[i] = _cvtsh_ss(from[i].bits);
}

void narrow_to_fp16(const float* from, uint16_t* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}
#else  // has_fp16() says so
void widen(const Fp16*, float*, int64_t) {}
void narrow_to_fp16(const float*, uint16_t*, int64_t) {}
#endif

// Gradients as the loop reads them: where they lie, fp16 from the buffer.
const float* readable(const float* gradient, float*, int64_t) { return gradient; }
const Bf16* readable(const Bf16* gradient, float*, int64_t) { return gradient; }
const float* readable(const Fp16* gradient, float* buffer, int64_t count) {
  widen(gradient, buffer, count);
  return buffer;
}

// Whole lines go past the caches, what lies before and after them through.
void stream(const uint16_t* from, uint16_t* to, int64_t count) {
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

// ASKED elements, AHEAD of these. What lies behind the end of an array is asked for in vain.
template <class Element>
inline void ask(const Element* elements) {
  const char* bytes = reinterpret_cast<const char*>(elements) + AHEAD * sizeof(Element);
  for (size_t i = 0; i < ASKED * sizeof(Element); i += 64) __builtin_prefetch(bytes + i, 0, LEVEL);
}

enum Type : int32_t { NONE, FP32, BF16, FP16 };  // as native.py counts them

}  // namespace

extern "C" {

// As native.py's _Part has it.
struct Part {
  int64_t count;
  float* parameter;
  float* moments[2];
  const void* gradient;
  uint16_t* copy;
  int32_t gradient_type;
  int32_t copy_type;
  float divisor;
};

// Who does the work.
struct Team {
  int32_t threads;
  int32_t nice;  // of each of them, where there are several
};

// In the order of the constants in adamw.py and sgd.py.
struct AdamW {
  float decay, first_weight, second_decay, second_weight, root, epsilon, rate;
};

struct Sgd {
  float weight_decay, momentum, rate;
};
}

namespace {

// `rule` updates the moments of one element and returns its new parameter, from its number and its
// gradient. TO_BF16: of the copy.
template <bool DIVIDED, bool TO_BF16, class Gradient, class Rule>
void in_blocks(const Part& part, const Rule rule) {
  alignas(64) uint16_t copy[BLOCK];
  alignas(64) float buffer[BLOCK];
  const float divisor = part.divisor;
  for (int64_t start = 0; start < part.count; start += BLOCK) {
    const int64_t count = std::min(BLOCK, part.count - start);
    const auto* narrow = static_cast<const Gradient*>(part.gradient) + start;
    const auto* gradient = readable(narrow, buffer, count);
    float* parameter = part.parameter + start;
    const auto elements = [&](int64_t from, int64_t several) {
#pragma GCC ivdep
      for (int64_t i = from; i < from + several; i++) {
        const float g = DIVIDED ? widened(gradient[i]) / divisor : widened(gradient[i]);
        const float p = rule(start + i, g);
        parameter[i] = p;
        if (TO_BF16) copy[i] = bf16(p);
      }
    };
    int64_t i = 0;
    for (; i + ASKED <= count; i += ASKED) {
      ask(parameter + i);
      ask(narrow + i);
      for (const float* moment : part.moments)
        if (moment) ask(moment + start + i);
      elements(i, ASKED);
    }
    elements(i, count - i);
    if (part.copy_type == FP16) narrow_to_fp16(parameter, copy, count);
    if (part.copy_type != NONE) stream(copy, part.copy + start, count);
  }
#ifdef __SSE2__
  _mm_sfence();  // before anyone is told that the copy is there
#endif
}

template <class Gradient, class Rule>
void with_gradient(const Part& part, const Rule& rule) {
  const bool divided = part.divisor != 1.0f, to_bf16 = part.copy_type == BF16;
  if (divided && to_bf16) return in_blocks<true, true, Gradient>(part, rule);
  if (divided) return in_blocks<true, false, Gradient>(part, rule);
  if (to_bf16) return in_blocks<false, true, Gradient>(part, rule);
  return in_blocks<false, false, Gradient>(part, rule);
}

template <class Rule>
void by_rule(const Part& part, const Rule& rule) {
  if (part.gradient_type == BF16) return with_gradient<Bf16>(part, rule);
  if (part.gradient_type == FP16) return with_gradient<Fp16>(part, rule);
  return with_gradient<float>(part, rule);
}

// m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2;
// p = decay p + rate m / (sqrt(v) / root + epsilon),
// where decay, rate (negative) and root hold the learning rate and the corrections of bias. m is
// reached from the nearer end, as by torch's lerp; the choice inside of the loop kept g++ 12 from
// using vectors.
void update(const Part& part, const AdamW& c) {
  float *parameter = part.parameter, *first = part.moments[0], *second = part.moments[1];
  const auto rule = [=](int64_t i, float g, float m) {
    const float v = multiply_add(c.second_weight * g, g, c.second_decay * second[i]);
    first[i] = m;
    second[i] = v;
    return parameter[i] * c.decay + c.rate * m / (std::sqrt(v) / c.root + c.epsilon);
  };
  const float weight = c.first_weight;
  if (weight < 0.5f)
    by_rule(part, [=](int64_t i, float g) {
      return rule(i, g, multiply_add(weight, g - first[i], first[i]));
    });
  else
    by_rule(part, [=](int64_t i, float g) {
      return rule(i, g, multiply_add(weight - 1.0f, g - first[i], g));
    });
}

// b = momentum b + g + weight_decay p, where there is momentum, else without its term;
// p += rate b, where rate is negative.
void update(const Part& part, const Sgd& c) {
  float *parameter = part.parameter, *kept = part.moments[0];
  const auto decayed = [=](int64_t i, float g) {
    return multiply_add(parameter[i], c.weight_decay, g);
  };
  if (kept)
    by_rule(part, [=](int64_t i, float g) {
      kept[i] = c.momentum * kept[i] + decayed(i, g);
      return multiply_add(kept[i], c.rate, parameter[i]);
    });
  else
    by_rule(part, [=](int64_t i, float g) {
      return multiply_add(decayed(i, g), c.rate, parameter[i]);
    });
}

int64_t chunks(const Part& part) { return (part.count + CHUNK - 1) / CHUNK; }

// A chunk of the part, counted from 0.
Part cut(Part part, int64_t number) {
  const int64_t start = number * CHUNK;
  const int64_t width = part.gradient_type == FP32 ? 4 : 2;
  part.count = std::min(CHUNK, part.count - start);
  part.parameter += start;
  for (float*& moment : part.moments)
    if (moment) moment += start;
  part.gradient = static_cast<const char*>(part.gradient) + width * start;
  if (part.copy) part.copy += start;
  return part;
}

// Which matters where the process has threads that should not wait for these.
void be_nice(int32_t nice) {
#ifdef __linux__  // where a thread has a priority of its own; a sandbox may forbid to set it
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
#endif
}

template <class Constants>
void update_all(const Part* parts, int64_t count, const Constants& constants, const Team& team) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += chunks(parts[i]);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t number; (number = next.fetch_add(1)) < total;) {
      const Part* part = parts;
      while (number >= chunks(*part)) number -= chunks(*part++);
      update(cut(*part, number), constants);
    }
  };
  std::vector<std::thread> threads;
  const int64_t wanted = std::min<int64_t>(team.threads, total);
  try {
    while (wanted > 1 && static_cast<int64_t>(threads.size()) < wanted)
      threads.emplace_back([&] {
        be_nice(team.nice);
        work();
      });
  } catch (const std::system_error&) {  // no more are to be had; those that run do all
  }
  if (threads.empty()) work();
  for (std::thread& thread : threads) thread.join();
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

void adamw(const Part* parts, int64_t count, const AdamW* constants, const Team* team) {
  update_all(parts, count, *constants, *team);
}

void sgd(const Part* parts, int64_t count, const Sgd* constants, const Team* team) {
  update_all(parts, count, *constants, *team);
}
}
