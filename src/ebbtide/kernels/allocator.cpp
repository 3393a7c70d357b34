// Torch's large CPU tensors from the pool of pages.cpp. A library of its own, for this one needs torch's headers.

#include <c10/core/CPUAllocator.h>

namespace {

void *(*take)(size_t);
int (*give)(void *);
size_t least;

// Of whatever `allocate` returned.
void release(void *address) {
  if (address && !give(address)) c10::GetDefaultCPUAllocator()->raw_deleter()(address);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    // What the pool has no memory for, torch's own refuses in torch's words.
    void *found = count >= least ? take(count) : nullptr;
    if (!found) found = c10::GetDefaultCPUAllocator()->raw_allocate(count);
    return {found, found, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

// Tensors of `at_least` bytes are the pool's from here on; those that are there stay whose they are.
extern "C" void allocator_use(void *(*pool_take)(size_t), int (*pool_give)(void *), size_t at_least) {
  static Allocator *made = new Allocator;  // never destroyed: tensors may outlive all else
  take = pool_take;
  give = pool_give;
  least = at_least;
  c10::SetCPUAllocator(made, 1);
}
