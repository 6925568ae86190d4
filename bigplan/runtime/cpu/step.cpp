// AdamW and SGD on parts of parameters in one pass over memory.
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
// Every fused multiply-add is written out and the compiler may add none (-ffp-contract=off), square
// roots and divisions are IEEE's: an element's bits depend on its own values alone, not on where a
// part begins or on vectors and tails. They are those of the vector body of torch's fused kernels
// as built for AVX2 and AVX-512.

#include "elements.h"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

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

// In the order of the constants in runtime/optimizer/adamw.py and sgd.py.
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
  settle();
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

template <class Constants>
void update_all(const Part* parts, int64_t count, const Constants& constants, const Team& team) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) total += chunks(parts[i].count);
  in_parallel(total, team, [&](int64_t number) {
    const Part* part = parts;
    while (number >= chunks(part->count)) number -= chunks((part++)->count);
    update(cut(*part, number), constants);
  });
}

}  // namespace

extern "C" {

void adamw(const Part* parts, int64_t count, const AdamW* constants, const Team* team) {
  update_all(parts, count, *constants, *team);
}

void sgd(const Part* parts, int64_t count, const Sgd* constants, const Team* team) {
  update_all(parts, count, *constants, *team);
}
}
