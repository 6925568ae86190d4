// AdamW on moments in bf16 or 8 bits, in one pass over memory; spec/moments.py has the format,
// runtime/memory/moments.py the same in torch.
//
// With a 16-bit copy it moves 22 bytes of host memory a parameter in bf16 and 18 in 8 bits, where
// fp32 moves 30. A block of 256 elements is widened, updated and rounded in buffers in the first
// cache, since its scale is known only when all of it is updated.

#include "elements.h"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t SCALED = 256;  // elements that share a scale
static_assert(CHUNK % SCALED == 0, "threads begin with a block");

}  // namespace

extern "C" {

// As runtime/optimizer/narrow_adamw.py has them.
struct Run {
  int64_t start;
  float decay, rate;
};

struct NarrowPart {
  int64_t start;  // of a chunk within its part
  int64_t count;
  float* parameter;
  void* moments[2];
  float* scales[2];
  const void* gradient;
  uint16_t* copy;
  const Run* runs;
  int64_t run_count;
  int32_t gradient_type;
  int32_t copy_type;
  float divisor;
};

struct NarrowAdamW {
  float first_weight, second_decay, second_weight, root, epsilon;
  uint32_t step;
  float first_levels[256], second_levels[256];
};
}

namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float value_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t drawn(float parameter, float gradient, uint32_t step) {
  uint32_t word = bits_of(parameter) * 0x9e3779b1u + bits_of(gradient) * 0x85ebca77u +
                  step * 0xc2b2ae3du;
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

// A block on its way: gradients, moments and the second one's roots in fp32, random words.
struct Block {
  alignas(64) float gradient[SCALED];
  alignas(64) float first[SCALED];
  alignas(64) float second[SCALED];
  alignas(64) float root[SCALED];
  alignas(64) uint32_t word[SCALED];
  alignas(64) uint16_t copy[SCALED];
};

// A value up to 1 within its decade, and how many levels that has: as moments.py's `_decade`.
template <int BITS>
inline void decade(float& value, float& width) {
  width = static_cast<float>(1 << (BITS - 1));
  for (int i = 0; i < BITS - 2; i++) {
    const bool low = value < 0.1f;
    value = low ? value * 10.0f : value;
    width = low ? width * 0.5f : width;
  }
}

// Rounded down, of -1 and more. Compared as floats, so that what is not a number is held, too.
inline float held(float place, float last) {
  const float above = place > -1.0f ? place : -1.0f;
  const float within = above < last ? above : last;
  return static_cast<float>(static_cast<int32_t>(within + 1.0f)) - 1.0f;
}

// The code of the nearest level of a first moment's magnitude.
inline int32_t nearest_level(float value) {
  float within = value, width;
  decade<7>(within, width);
  const float number = held((within - 0.1f) * (1 / 0.9f) * width, width - 1.0f);
  const float up = value >= 1.0f - 0.225f / 64 ? 1.0f : 0.0f;  // from the last level to 1
  return static_cast<int32_t>(width + number + up) - 1;
}

// The code of the level below or above a second moment's root, by a random word: such that the
// square is right on average. Levels are computed, since tables are read element by element: so it
// takes half of the time. They are those of the decade that the value is multiplied into.
inline int32_t either_level(float value, uint32_t word) {
  float width;
  decade<8>(value, width);
  const float number = held((value - 0.1f) * (1 / 0.9f) * width - 0.5f, width - 1.0f);
  const float step = 0.9f / width, first = 0.1f + 0.5f * step;
  const float under = width > 2.0f ? 0.1f - 0.1f * step : 0.0f;  // the last of the decade below
  const float over = width < 128.0f ? 1.0f + 2.5f * step : 1.0f;  // the first of the one above
  const float low = number < 0.0f ? under : first + number * step;
  const float high = number + 1.0f < width ? first + (number + 1.0f) * step : over;
  const float chance = static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
  const float drawn = chance * (high * high - low * low), beyond = value * value - low * low;
  const float least = low > 0.0f ? drawn : -1.0f;  // what is above 0 does not become 0
  const float up = least < beyond ? (value > 0.0f ? 1.0f : 0.0f) : 0.0f;
  return static_cast<int32_t>(width + number + up) - 1;
}

// The largest magnitude, by integers: compilers put their maximum into vectors.
inline float largest(const float* values, int64_t count) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; i++) {
    const int32_t bits = static_cast<int32_t>(bits_of(values[i]) & 0x7fffffff);
    found = bits > found ? bits : found;
  }
  return value_of(static_cast<uint32_t>(found));
}

struct Int8 {
  using First = int8_t;
  using Second = uint8_t;

  static void decode(const NarrowPart& part, const NarrowAdamW& c, int64_t at, int64_t count,
                     Block& block) {
    const auto* first = static_cast<const uint8_t*>(part.moments[0]) + at;
    const auto* second = static_cast<const uint8_t*>(part.moments[1]) + at;
    const float scale = part.scales[0][at / SCALED], other = part.scales[1][at / SCALED];
    for (int64_t i = 0; i < count; i++) {
      block.first[i] = c.first_levels[first[i]] * scale;
      const float root = c.second_levels[second[i]] * other;
      block.second[i] = root * root;
    }
  }

  static void encode(const NarrowPart& part, const NarrowAdamW& c, int64_t at, int64_t count,
                     const Block& block) {
    auto* first = static_cast<int8_t*>(part.moments[0]) + at;
    auto* second = static_cast<uint8_t*>(part.moments[1]) + at;
    const float scale = largest(block.first, count), other = largest(block.root, count);
    part.scales[0][at / SCALED] = scale;
    part.scales[1][at / SCALED] = other;
    const float by = scale > 0.0f ? scale : 1.0f, by_other = other > 0.0f ? other : 1.0f;
    alignas(64) int32_t codes[SCALED];  // in loops of their own: compilers mix no widths of vectors
    for (int64_t i = 0; i < count; i++) {
      const int32_t code = nearest_level(std::fabs(block.first[i]) / by);
      codes[i] = block.first[i] < 0.0f ? -code : code;
    }
    for (int64_t i = 0; i < count; i++) first[i] = static_cast<int8_t>(codes[i]);
    for (int64_t i = 0; i < count; i++)
      codes[i] = either_level(block.root[i] / by_other, block.word[i]);
    for (int64_t i = 0; i < count; i++) second[i] = static_cast<uint8_t>(codes[i]);
  }
};

struct InBf16 {
  using First = Bf16;
  using Second = Bf16;

  static void decode(const NarrowPart& part, const NarrowAdamW&, int64_t at, int64_t count,
                     Block& block) {
    const auto* first = static_cast<const Bf16*>(part.moments[0]) + at;
    const auto* second = static_cast<const Bf16*>(part.moments[1]) + at;
    for (int64_t i = 0; i < count; i++) {
      block.first[i] = widened(first[i]);
      block.second[i] = widened(second[i]);
    }
  }

  static void encode(const NarrowPart& part, const NarrowAdamW&, int64_t at, int64_t count,
                     const Block& block) {
    auto* first = static_cast<uint16_t*>(part.moments[0]) + at;
    auto* second = static_cast<uint16_t*>(part.moments[1]) + at;
    for (int64_t i = 0; i < count; i++) {
      first[i] = bf16(block.first[i]);
      second[i] = static_cast<uint16_t>((bits_of(block.second[i]) + (block.word[i] & 0xffff)) >> 16);
    }
  }
};

template <class Gradient>
void widen_gradient(const NarrowPart& part, int64_t at, int64_t count, Block& block) {
  const auto* narrow = static_cast<const Gradient*>(part.gradient) + at;
  const auto* gradient = readable(narrow, block.gradient, count);
  const float divisor = part.divisor;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) block.gradient[i] = widened(gradient[i]) / divisor;
}

void widen_gradients(const NarrowPart& part, int64_t at, int64_t count, Block& block) {
  if (part.gradient_type == BF16) return widen_gradient<Bf16>(part, at, count, block);
  if (part.gradient_type == FP16) return widen_gradient<Fp16>(part, at, count, block);
  return widen_gradient<float>(part, at, count, block);
}

// As step.cpp has it, but that both moments are in the block and beta1 is at least 0.5 or not.
void moments(const NarrowPart& part, const NarrowAdamW& c, int64_t at, int64_t count,
             Block& block) {
  const float* parameter = part.parameter + at;
  const bool from_old = c.first_weight < 0.5f;
  const float weight = from_old ? c.first_weight : c.first_weight - 1.0f;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) {
    const float g = block.gradient[i], m = block.first[i];
    block.first[i] = multiply_add(weight, g - m, from_old ? m : g);
    const float v = multiply_add(c.second_weight * g, g, c.second_decay * block.second[i]);
    block.second[i] = v;
    block.root[i] = std::sqrt(v);
    block.word[i] = drawn(parameter[i], g, c.step);
  }
}

void parameters(const NarrowPart& part, const NarrowAdamW& c, int64_t at, int64_t count,
                Block& block, const Run*& run) {
  float* parameter = part.parameter + at;
  const Run* last = part.runs + part.run_count - 1;
  const int64_t place = part.start + at;
  for (int64_t from = 0; from < count;) {
    while (run < last && run[1].start <= place + from) run++;
    const int64_t to = run < last ? std::min(count, run[1].start - place) : count;
    const float decay = run->decay, rate = run->rate;
#pragma GCC ivdep
    for (int64_t i = from; i < to; i++) {
      const float p = parameter[i];
      parameter[i] = p * decay + rate * block.first[i] / (block.root[i] / c.root + c.epsilon);
    }
    from = to;
  }
  if (part.copy_type == BF16)
    for (int64_t i = 0; i < count; i++) block.copy[i] = bf16(parameter[i]);
  if (part.copy_type == FP16) narrow_to_fp16(parameter, block.copy, count);
  if (part.copy_type != NONE) stream(block.copy, part.copy + at, count);
}

template <class Code>
void update(const NarrowPart& part, const NarrowAdamW& c) {
  Block block;
  const Run* run = part.runs;
  for (int64_t at = 0; at < part.count; at += SCALED) {
    const int64_t count = std::min(SCALED, part.count - at);
    for (int64_t i = at; i < at + SCALED; i += ASKED) {
      ask(part.parameter + i);
      ask(static_cast<const typename Code::First*>(part.moments[0]) + i);
      ask(static_cast<const typename Code::Second*>(part.moments[1]) + i);
      if (part.gradient_type == FP32) ask(static_cast<const float*>(part.gradient) + i);
      else ask(static_cast<const uint16_t*>(part.gradient) + i);
    }
    widen_gradients(part, at, count, block);
    Code::decode(part, c, at, count, block);
    moments(part, c, at, count, block);
    parameters(part, c, at, count, block, run);
    Code::encode(part, c, at, count, block);
  }
  settle();
}

// A chunk of the part, counted from 0.
template <class Code>
NarrowPart cut(NarrowPart part, int64_t number) {
  const int64_t start = number * CHUNK;
  const int64_t width = part.gradient_type == FP32 ? 4 : 2;
  part.start = start;
  part.count = std::min(CHUNK, part.count - start);
  part.parameter += start;
  part.moments[0] = static_cast<typename Code::First*>(part.moments[0]) + start;
  part.moments[1] = static_cast<typename Code::Second*>(part.moments[1]) + start;
  for (float*& scales : part.scales)
    if (scales) scales += start / SCALED;
  part.gradient = static_cast<const char*>(part.gradient) + width * start;
  if (part.copy) part.copy += start;
  return part;
}

template <class Code>
void update_all(const NarrowPart& part, const NarrowAdamW& constants, const Team& team) {
  in_parallel(chunks(part.count), team,
              [&](int64_t number) { update<Code>(cut<Code>(part, number), constants); });
}

}  // namespace

extern "C" {

void adamw_int8(const NarrowPart* part, const NarrowAdamW* constants, const Team* team) {
  update_all<Int8>(*part, *constants, *team);
}

void adamw_bf16(const NarrowPart* part, const NarrowAdamW* constants, const Team* team) {
  update_all<InBf16>(*part, *constants, *team);
}
}
