// One call does all parts of a work, on threads of its own: they take parts as they come and never
// wait for Python's interpreter.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <unistd.h>
#endif

// As native.py's _Team has it.
struct Team {
  int32_t threads;
  int32_t nice;  // how much more so than the caller each of them is, where there are several
};

namespace {

// Elements that a thread takes at a time: half a millisecond of a core's work on AdamW, so that all
// end within that of each other.
constexpr int64_t CHUNK = 1 << 17;

int64_t chunks(int64_t elements) { return (elements + CHUNK - 1) / CHUNK; }

// Which matters where the process has threads that should not wait for these.
void be_nice(int32_t more) {
#ifdef __linux__  // where a thread has a priority of its own; a sandbox may forbid to set it
  [[maybe_unused]] const int forbidden = nice(more);
#endif
}

// `work` gets the numbers below `total`, each once.
template <class Work>
void in_parallel(int64_t total, const Team& team, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto all = [&] {
    for (int64_t number; (number = next.fetch_add(1)) < total;) work(number);
  };
  std::vector<std::thread> threads;
  const int64_t wanted = std::min<int64_t>(team.threads, total);
  try {
    while (wanted > 1 && static_cast<int64_t>(threads.size()) < wanted)
      threads.emplace_back([&] {
        be_nice(team.nice);
        all();
      });
  } catch (const std::system_error&) {  // no more are to be had; those that run do all
  }
  if (threads.empty()) all();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
