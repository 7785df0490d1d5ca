// Who attends to what in a step: the same for all of its layers.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "pool.h"

namespace hr {

// Tasks of one step's attention. A slice of one token is attended to by the tasks that store its keys and values; the
// tasks of longer slices need all of them stored, and come in a second region. Where there are too few tasks to keep all
// threads busy, those of long contexts are split by ranges; whoever ends last merges. Results are the same either way.
class AttentionPlan {
 public:
  void make(const hr_batch &batch, int heads, int kv_heads, int value_dim, int threads);
  // Store the keys and values of all slices in one layer, and attend to them.
  void run(Pool &pool, const Kernels &kernels, const AttentionLayer &layer, const hr_batch &batch);

 private:
  struct Task {
    int slice, kv_head;
    int first, last;  // tokens of the slice
    int range;        // -1: all
    int ranges;
    int countdown;    // its place among the countdowns
    size_t states;    // of range 0
  };

  void add(std::vector<Task> &to, const Task &whole, int ranges, size_t row_states);
  void attend(const Kernels &kernels, const AttentionLayer &layer, const SliceRows &slice, const Task &task);

  std::vector<Task> singles_, stores_, tiles_;
  Buffer<float> states_;
  size_t states_size_ = 0;
  std::unique_ptr<std::atomic<int>[]> countdowns_;
  int countdown_room_ = 0, countdowns_used_ = 0;
};

}  // namespace hr
