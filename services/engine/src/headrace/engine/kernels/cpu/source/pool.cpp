#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hr {
namespace {

// Regions of a step follow each other within a few microseconds; a helper that slept in between would cost two system
// calls each time. Between steps there is Python, and spinning would take a core from it.
constexpr auto kHelperSpin = std::chrono::microseconds(60);
// The caller's spin is shorter: what it waits for is one task, or a helper that lost its core. In the second case the
// caller's sleep empties this core, and the kernel moves the helper here at once.
constexpr auto kCallerSpin = std::chrono::microseconds(20);
constexpr int kPausesPerLook = 32;
constexpr uint64_t kClosed = 0xffffffff;  // as the next task: more than any region has

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin until `done`, at most for `limit`; whether it was.
template <typename Done>
bool spin(std::chrono::microseconds limit, const Done &done) {
  if (done()) return true;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; i++) {
      if (done()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

FlushDenormals::FlushDenormals() : saved_(0) {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(saved_ | 0x8040);  // flush to zero, denormals are zero
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

Pool::Pool(int threads) {
  for (int thread = 1; thread < threads; thread++) helpers_.emplace_back([this, thread] { help(thread); });
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_arrived_.notify_all();
  for (auto &helper : helpers_) helper.join();
}

void Pool::run_shared(int tasks, Call call, const void *context) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  // Closed first: a helper that is late to the last region, and reads the new fields below beside the old ticket, then
  // fails to exchange it.
  ticket_.exchange(static_cast<uint64_t>(epoch) << 32 | kClosed, std::memory_order_acq_rel);
  call_.store(call, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  tasks_.store(static_cast<uint32_t>(tasks), std::memory_order_release);
  unfinished_.store(tasks, std::memory_order_release);
  ticket_.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    work_arrived_.notify_all();
  }
  take_tasks(epoch, 0);
  wait_for_end();
}

void Pool::take_tasks(uint32_t epoch, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    if (static_cast<uint32_t>(ticket >> 32) != epoch) return;
    // These may already be another region's, but then the exchange below fails: its epoch is another.
    const auto next = static_cast<uint32_t>(ticket);
    const Call call = call_.load(std::memory_order_acquire);
    const void *context = context_.load(std::memory_order_acquire);
    if (next >= tasks_.load(std::memory_order_acquire)) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    call(context, static_cast<int>(next), thread);
    if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps_.load(std::memory_order_seq_cst)) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      work_ended_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::wait_for_end() {
  const auto ended = [this] { return unfinished_.load(std::memory_order_seq_cst) == 0; };
  if (spin(kCallerSpin, ended)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true, std::memory_order_seq_cst);
  work_ended_.wait(lock, ended);
  caller_sleeps_.store(false, std::memory_order_relaxed);
}

void Pool::help(int thread) {
  const FlushDenormals flush;
  uint32_t seen = 0;
  while (wait_for_work(seen)) {
    seen = epoch_.load(std::memory_order_acquire);
    take_tasks(seen, thread);
  }
}

bool Pool::wait_for_work(uint32_t seen) {
  const auto arrived = [this, seen] {
    return epoch_.load(std::memory_order_seq_cst) != seen || stopping_.load(std::memory_order_relaxed);
  };
  if (!spin(kHelperSpin, arrived)) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    work_arrived_.wait(lock, arrived);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
  return !stopping_.load(std::memory_order_relaxed);
}

}  // namespace hr
