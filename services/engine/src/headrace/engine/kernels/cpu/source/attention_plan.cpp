#include "attention_plan.h"

namespace hr {
namespace {

// A task of more than this part of what a thread has to do is split: the last one to end keeps the others waiting.
constexpr int kSharesPerThread = 4;

SliceRows slice_of(const hr_batch &batch, int slice) {
  const int first = batch.first_row[slice];
  return {first, batch.first_row[slice + 1] - first, batch.positions[first], batch.tables + batch.table_start[slice]};
}

// Pairs of a token and a position that it sees, about.
int64_t pairs(const SliceRows &slice, int first, int last) {
  return static_cast<int64_t>(slice.start + last) * (last - first);
}

struct Work {
  int64_t singles, tiles;
};

Work work_of(const hr_batch &batch, int kv_heads) {
  Work work{};
  for (int s = 0; s < batch.slices; s++) {
    const SliceRows slice = slice_of(batch, s);
    (slice.count == 1 ? work.singles : work.tiles) += pairs(slice, 0, slice.count) * kv_heads;
  }
  return work;
}

}  // namespace

void AttentionPlan::make(const hr_batch &batch, int heads, int kv_heads, int value_dim, int threads) {
  singles_.clear();
  stores_.clear();
  tiles_.clear();
  states_size_ = 0;
  countdowns_used_ = 0;
  const int group = heads / kv_heads, tile_tokens = kQueryRows / group;
  const Work work = work_of(batch, kv_heads);
  const int shares = threads > 1 ? kSharesPerThread * threads : 0;
  for (int s = 0; s < batch.slices; s++) {
    const SliceRows slice = slice_of(batch, s);
    const bool single = slice.count == 1;
    const int count = ceil_div(slice.count, tile_tokens);
    for (int tile = count - 1; tile >= 0; tile--) {  // the longest first: the last ones end together
      const int first = tile * tile_tokens;
      const int last = first + tile_tokens < slice.count ? first + tile_tokens : slice.count;
      const bool split = pairs(slice, first, last) * shares > (single ? work.singles : work.tiles);
      const int ranges = split ? ceil_div(slice.start + last, kRange) : 1;
      for (int kv_head = 0; kv_head < kv_heads; kv_head++) {
        const Task task{s, kv_head, first, last, -1, 1, -1, 0};
        add(single ? singles_ : tiles_, task, ranges, state_size(value_dim) * group * (last - first));
        if (!single && tile == 0) stores_.push_back(task);
      }
    }
  }
  states_.reserve(states_size_);
  if (countdowns_used_ > countdown_room_) {
    countdown_room_ = countdowns_used_;
    countdowns_ = std::make_unique<std::atomic<int>[]>(countdown_room_);
  }
  for (const auto *tasks : {&singles_, &tiles_}) {
    for (const Task &task : *tasks) {
      if (task.range >= 0) countdowns_[task.countdown].store(task.ranges, std::memory_order_relaxed);
    }
  }
}

void AttentionPlan::add(std::vector<Task> &to, const Task &whole, int ranges, size_t row_states) {
  if (ranges == 1) return to.push_back(whole);
  for (int range = 0; range < ranges; range++) {
    Task part = whole;
    part.range = range;
    part.ranges = ranges;
    part.countdown = countdowns_used_;
    part.states = states_size_;
    to.push_back(part);
  }
  countdowns_used_++;
  states_size_ += row_states * ranges;
}

void AttentionPlan::run(Pool &pool, const Kernels &kernels, const AttentionLayer &layer, const hr_batch &batch) {
  const int singles = static_cast<int>(singles_.size());
  pool.run(singles + static_cast<int>(stores_.size()), [&](int index, int) {
    const Task &task = index < singles ? singles_[index] : stores_[index - singles];
    const SliceRows slice = slice_of(batch, task.slice);
    // The one new token lies in the last range: no other task reads it.
    if (task.range == task.ranges - 1 || task.range < 0) kernels.store_keys_and_values(layer, slice, task.kv_head);
    if (index < singles) attend(kernels, layer, slice, task);
  });
  pool.run(static_cast<int>(tiles_.size()), [&](int index, int) {
    const Task &task = tiles_[index];
    attend(kernels, layer, slice_of(batch, task.slice), task);
  });
}

void AttentionPlan::attend(const Kernels &kernels, const AttentionLayer &layer, const SliceRows &slice,
                           const Task &task) {
  if (task.range < 0) return kernels.attend(layer, slice, task.kv_head, task.first, task.last, -1, nullptr);
  float *states = states_.get() + task.states;
  const int rows = (task.last - task.first) * (layer.heads / layer.kv_heads);
  kernels.attend(layer, slice, task.kv_head, task.first, task.last, task.range,
                 states + state_size(layer.value_dim) * rows * task.range);
  std::atomic<int> &countdown = countdowns_[task.countdown];
  if (countdown.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  countdown.store(task.ranges, std::memory_order_relaxed);  // for the next layer
  kernels.merge(layer, slice, task.kv_head, task.first, task.last, task.ranges, states);
}

}  // namespace hr
