// Working memory.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <memory>

namespace hr {

// Memory aligned for the widest registers, zeroed, that only grows.
template <typename T>
class Buffer {
 public:
  // At least `count` elements; those from before are lost when it grows.
  T *reserve(size_t count) {
    if (count > count_) {
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      memory_.reset(static_cast<T *>(aligned_alloc(64, bytes)));
      memset(memory_.get(), 0, bytes);
      count_ = count;
    }
    return memory_.get();
  }
  T *get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T *memory) const { free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t count_ = 0;
};

}  // namespace hr
