// A pool in which the calling thread takes tasks like everyone else, and can finish all of them alone.
//
// A parallel region split into equal static parts is as slow as its slowest thread: with one foreign process on two
// cores its 90th percentile went from 4 to 134 ms per step, that of a pool which steals single tasks to 11.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hr {

class Pool {
 public:
  // `threads` counts the caller; at least 1.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // work(task, thread) for every task below `tasks`, each exactly once, in any order; returns when all are done.
  // Only one thread may call it, and work may not call it.
  template <typename Work>
  void run(int tasks, const Work &work) {
    if (tasks <= 1 || helpers_.empty()) {
      for (int task = 0; task < tasks; task++) work(task, 0);
      return;
    }
    run_shared(tasks, [](const void *context, int task, int thread) {
      (*static_cast<const Work *>(context))(task, thread);
    }, &work);
  }

 private:
  using Call = void (*)(const void *context, int task, int thread);

  void run_shared(int tasks, Call call, const void *context);
  void take_tasks(uint32_t epoch, int thread);
  void help(int thread);
  bool wait_for_work(uint32_t seen);
  void wait_for_end();

  // The epoch in the upper half, the next task in the lower: a helper that comes late to a region that is over, or
  // over and followed by another, cannot take a task of it, because its compare-and-swap names the epoch it read.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  // Of the current region. Written only while every task of the last one is done, read only by who holds a ticket.
  std::atomic<Call> call_{nullptr};
  std::atomic<const void *> context_{nullptr};
  std::atomic<uint32_t> tasks_{0};

  std::atomic<bool> stopping_{false};
  std::atomic<bool> caller_sleeps_{false};
  std::mutex mutex_;
  std::condition_variable work_arrived_;
  std::condition_variable work_ended_;
  std::vector<std::thread> helpers_;
};

// Denormals count as zero while one of these lives: near-zero activations would take a hundred times as long.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace hr
