// The emulator runs a launch's blocks one after another, in random order, with each thread of a block as a fiber. A
// thread runs until it waits at a barrier or a warp intrinsic; then another thread that need not wait is chosen at
// random. A thread that relies on what no barrier promises thus soon meets an order that breaks it.
#include "emulator.h"

#include <pthread.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

#if defined(__x86_64__)
// Save what a call preserves and continue on another stack. swapcontext would ask the kernel for the signal mask each
// time.
asm(R"(
.text
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emulator_switch(void** from, void* to);
#endif

namespace emulator {
namespace {

constexpr unsigned kMostThreads = 1024, kMostVariables = 16;
#if defined(EMULATOR_TSAN)
constexpr size_t kStack = size_t{64} << 10;
#else
constexpr size_t kStack = size_t{256} << 10;
#endif
constexpr size_t kGuard = 4096;
// A block may have this many bytes of shared memory, without and with cudaFuncSetAttribute, on compute capability 9.0.
constexpr size_t kPlainShared = 48 << 10, kMostShared = 227 << 10;

// Tell ThreadSanitizer, which sees threads as fibers, what orders them.
#if defined(EMULATOR_TSAN)
void release(void* object) {
  __tsan_release(object);
}
void acquire(void* object) {
  __tsan_acquire(object);
}
#else
void release(void*) {}
void acquire(void*) {}
#endif

struct Context {
#if defined(__x86_64__)
  void* top = nullptr;  // of its stack, where its registers lie

  void start(char* stack, size_t bytes, void (*function)()) {
    auto* slots = reinterpret_cast<void**>(stack + bytes);
    std::fill(slots - 8, slots, nullptr);
    slots[-2] = reinterpret_cast<void*>(function);
    top = slots - 8;
  }
  void switch_to(Context& to) {
    emulator_switch(&top, to.top);
  }
#else
  ucontext_t context{};

  void start(char* stack, size_t bytes, void (*function)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    makecontext(&context, function, 0);
  }
  void switch_to(Context& to) {
    swapcontext(&context, &to.context);
  }
#endif
};

struct Fiber {
  Context context{};
  void* mapping = nullptr;
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* sanitizer = nullptr;  // ASan's fake stack, TSan's fiber
  uint3 index{};
  unsigned number = 0;
  bool done = false;
  Site site{};        // where it waits
  unsigned mask = 0;  // of the warp intrinsic; 0: a barrier
  uint64_t value = 0;
  Lanes lanes{};

  Fiber() = default;
  ~Fiber() {
    if (!mapping) return;
#if defined(EMULATOR_ASAN)
    __asan_unpoison_memory_region(stack, kStack);
#endif
    munmap(mapping, kGuard + kStack);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void make_stack() {
    void* memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE)) throw std::bad_alloc();
    mapping = memory;
    stack = static_cast<char*>(memory) + kGuard;
    stack_bytes = kStack;
  }
};

uint64_t random_state = 0;
cudaError_t last_error = cudaSuccess;
std::map<const void*, size_t> dynamic_limits;  // of kernels, by cudaFuncSetAttribute
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber host_context;
char launch_order, fence_order;

// These objects order the threads of one block. They alternate, so that a thread that quickly returns does not order
// one that is slow to leave. Other blocks have other objects, because nothing orders them.
struct Order {
  uint64_t barrier[2], warp[32][2], shared;
};
Order orders[256];

// This is a variable in shared memory.
struct Shared {
  const void* variable;
  char* bytes;
  size_t size;
};
std::vector<Shared>& used = *new std::vector<Shared>;  // by blocks that have ended

// This is the running block. It has no containers, because their code may come from a file under ThreadSanitizer.
struct Block {
  unsigned threads = 0, waiting = 0, exited = 0;
  uint64_t barriers = 0;  // passed
  bool any = false, any_result = false;
  unsigned ready[kMostThreads];  // threads that may run
  unsigned ready_count = 0;
  Shared shared[kMostVariables];
  int shared_count = 0;
  size_t dynamic_bytes = 0;

  void make_ready(unsigned thread) { ready[ready_count++] = thread; }
  std::string failure;
};
// These are copies that a thread has deferred, in order, with the commit that each belongs to.
struct PutOff {
  static constexpr size_t kMost = 128;
  Copy copies[kMost];
  size_t commits[kMost];
  size_t begin, end, commit;
};
PutOff put_offs[kMostThreads];

Block block;
Fiber* current = nullptr;
Body body;
const void* arguments;
Order* order = orders;
uint64_t warp_syncs[32];

std::string where(const Fiber& fiber) {
  std::string text = "thread " + std::to_string(fiber.number) + " of block (" + std::to_string(blockIdx.x) + ", " +
                     std::to_string(blockIdx.y) + ")";
  if (!fiber.site.intrinsic) return text;
  return text + ", at " + fiber.site.intrinsic + " of " + fiber.site.file + ":" + std::to_string(fiber.site.line);
}

bool same(const Site& a, const Site& b) {
  return a.line == b.line && !std::strcmp(a.file, b.file) && !std::strcmp(a.intrinsic, b.intrinsic);
}

void switch_to(Fiber& to) {
  Fiber& from = *current;
  current = &to;
  threadIdx = to.index;
#if defined(EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(from.done ? nullptr : &from.sanitizer, to.stack, to.stack_bytes);
#elif defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(to.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  from.context.switch_to(to.context);
#if defined(EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

// Run a thread that can run, or the host if there is none.
void run_another() {
  if (!block.ready_count || !block.failure.empty()) return switch_to(host_context);
  unsigned& pick = block.ready[random_bits() % block.ready_count];
  Fiber& next = *fibers[pick];
  pick = block.ready[--block.ready_count];
  if (&next != current) switch_to(next);
}

void report(const char* what, const Fiber& thread, const Fiber* other) {
  block.failure = what + (": " + where(thread));
  if (other) block.failure += "; " + where(*other);
}

// Abandon the block without destroying anything on the thread's stack.
[[noreturn]] void fail(const char* what, const Fiber& thread, const Fiber* other = nullptr) {
  report(what, thread, other);
  release(&launch_order);
  for (;;) run_another();
}

void enter() {
#if defined(EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  body(arguments);
  release(&launch_order);
  Fiber& me = *current;
  me.done = true;
  ++block.exited;
  if (block.waiting) block.failure = "a thread ended while others wait at a barrier";
  for (;;) run_another();
}

void run_block() {
  block.threads = blockDim.x * blockDim.y * blockDim.z;
  block.waiting = block.exited = 0;
  block.any = false;
  block.ready_count = block.shared_count = 0;
  order = order == std::end(orders) - 1 ? orders : order + 1;
  for (unsigned i = 0; i < block.threads; ++i) {
    Fiber& fiber = *fibers[i];
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    fiber.number = i;
    fiber.done = false;
    put_offs[i].begin = put_offs[i].end = put_offs[i].commit = 0;
    fiber.site = Site{};
#if defined(EMULATOR_TSAN)
    // Give each block's thread its own fiber, and a stack that no thread has used.
    mmap(fiber.stack, fiber.stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    fiber.sanitizer = __tsan_create_fiber(0);
#endif
    fiber.context.start(fiber.stack, fiber.stack_bytes, enter);
    block.make_ready(i);
  }
  current = &host_context;
  run_another();
#if defined(EMULATOR_TSAN)
  for (unsigned i = 0; i < block.threads; ++i) __tsan_destroy_fiber(fibers[i]->sanitizer);
#endif
  used.insert(used.end(), block.shared, block.shared + block.shared_count);
  if (block.failure.empty() && block.exited < block.threads) {
    block.failure = "no thread can run on:";
    for (unsigned i = 0; i < block.threads; ++i) {
      const bool first = i == 0 || fibers[i - 1]->done || !same(fibers[i]->site, fibers[i - 1]->site);
      if (!fibers[i]->done && first) block.failure += "\n  " + where(*fibers[i]) + ", and those after it";
    }
  }
}

cudaError_t refusal(const Shape& shape, const void* kernel) {
  const dim3 &g = shape.grid, &b = shape.block;
  const uint64_t threads = uint64_t{b.x} * b.y * b.z;
  if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || !threads || threads > kMostThreads)
    return cudaErrorInvalidConfiguration;
  const auto limit = dynamic_limits.find(kernel);
  return shape.shared_bytes > (limit == dynamic_limits.end() ? kPlainShared : limit->second) ? cudaErrorInvalidValue
                                                                                             : cudaSuccess;
}

}  // namespace

void seed(uint64_t value) {
  random_state = value;
}

uint64_t random_bits() {  // splitmix64
  uint64_t x = random_state += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

int lane() {
  return static_cast<int>(current->number % 32);
}

void fence() {
  release(&fence_order);
  acquire(&fence_order);
  preempt();
}

void preempt() {
  if (random_bits() % 4) return;
  block.make_ready(current->number);
  run_another();
}

bool barrier_or(const Site& site, bool any) {
  Fiber& me = *current;
  me.site = site;
  me.mask = 0;
  const uint64_t turn = block.barriers;
  release(&order->barrier[turn % 2]);
  block.any = block.any || any;
  ++block.waiting;
  if (block.exited) fail("a barrier after other threads have ended", me);
  if (block.waiting == block.threads) {
    block.any_result = block.any;
    block.any = false;
    block.waiting = 0;
    ++block.barriers;
    for (unsigned i = 0; i < block.threads; ++i) {
      if (!same(fibers[i]->site, site)) fail("different barriers", me, fibers[i].get());
    }
    for (unsigned i = 0; i < block.threads; ++i) {
      fibers[i]->site = Site{};
      block.make_ready(i);
    }
  }
  run_another();
  acquire(&order->barrier[turn % 2]);
  return block.any_result;
}

void barrier(const Site& site) {
  barrier_or(site, false);
}

Lanes exchange(const Site& site, unsigned mask, uint64_t value) {
  Fiber& me = *current;
  me.site = site;
  me.mask = mask;
  me.value = value;
  const unsigned first = me.number / 32 * 32;
  if (!(mask >> me.number % 32 & 1)) fail("a lane that its mask does not name", me);
  bool all = true;
  for (unsigned i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    if (first + i >= block.threads || fibers[first + i]->done) fail("a lane of the mask has ended", me);
    const Fiber& other = *fibers[first + i];
    if (!other.site.intrinsic) {
      all = false;
    } else if (!same(other.site, site) || other.mask != mask) {
      fail("lanes of one mask wait apart", me, &other);
    }
  }
  if (all) {
    for (unsigned i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      Fiber& other = *fibers[first + i];
      other.site = Site{};
      for (unsigned j = 0; j < 32; ++j) other.lanes.value[j] = mask >> j & 1 ? fibers[first + j]->value : 0;
      block.make_ready(first + i);
    }
  }
  run_another();
  return me.lanes;
}

// This is the only warp intrinsic that promises an order of memory accesses.
void sync_warp(const Site& site, unsigned mask) {
  const unsigned warp = current->number / 32;
  const uint64_t turn = warp_syncs[warp];
  release(&order->warp[warp][turn % 2]);
  exchange(site, mask, 0);
  if (warp_syncs[warp] == turn) ++warp_syncs[warp];  // the first to leave
  acquire(&order->warp[warp][turn % 2]);
}

void* shared_memory(const void* variable, size_t bytes) {
  acquire(&order->shared);
  char* memory = nullptr;
  size_t all = bytes, plain = variable == &block ? 0 : bytes;
  for (int i = 0; i < block.shared_count; ++i) {
    const Shared& other = block.shared[i];
    if (other.variable == variable) memory = other.bytes;
    all += other.size;
    plain += other.variable == &block ? 0 : other.size;
  }
  if (!memory) {  // the first thread of the block here
    void* fresh = nullptr;
    if (plain > kPlainShared || all > kMostShared || block.shared_count == kMostVariables ||
        posix_memalign(&fresh, variable == &block ? 128 : 16, bytes))
      fail("more shared memory than a block can have", *current);
    memory = static_cast<char*>(fresh);
    // Fill in garbage, either random or (as on a device) what an earlier block has left there.
    const Shared* left = nullptr;
    for (size_t i = 0; i < used.size(); ++i) left = used[i].variable == variable ? &used[i] : left;
    if (random_bits() % 2) left = nullptr;
    for (size_t i = 0; i < bytes; ++i) {
      memory[i] = left && i < left->size ? left->bytes[i] : static_cast<char>(random_bits());
    }
    block.shared[block.shared_count++] = {variable, memory, bytes};
  }
  release(&order->shared);
  return memory;
}

unsigned char* dynamic_shared() {
  return static_cast<unsigned char*>(shared_memory(&block, block.dynamic_bytes));
}

void put_off(const Copy& copy) {
  PutOff& mine = put_offs[current->number];
  if (mine.end - mine.begin == PutOff::kMost) fail("more asynchronous copies than are emulated", *current);
  mine.commits[mine.end % PutOff::kMost] = mine.commit;
  mine.copies[mine.end++ % PutOff::kMost] = copy;
}

void commit_copies() {
  ++put_offs[current->number].commit;
}

bool next_copy(size_t left, Copy& copy) {
  PutOff& mine = put_offs[current->number];
  if (mine.begin == mine.end || mine.commits[mine.begin % PutOff::kMost] + left >= mine.commit) return false;
  copy = mine.copies[mine.begin++ % PutOff::kMost];
  return true;
}

void run(const Shape& shape, const void* kernel, Body launched, const void* launched_with) {
  if (const cudaError_t error = refusal(shape, kernel)) {
    last_error = error;
    return;
  }
  gridDim = shape.grid;
  blockDim = shape.block;
  body = launched;
  arguments = launched_with;
  block.dynamic_bytes = shape.shared_bytes;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  while (fibers.size() < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->make_stack();
  }
#if defined(EMULATOR_ASAN)
  pthread_attr_t attributes;  // the host's own stack, to come back to
  void* stack = nullptr;
  if (pthread_getattr_np(pthread_self(), &attributes) ||
      pthread_attr_getstack(&attributes, &stack, &host_context.stack_bytes))
    throw std::runtime_error("the host's stack is not known");
  pthread_attr_destroy(&attributes);
  host_context.stack = static_cast<char*>(stack);
#endif
#if defined(EMULATOR_TSAN)
  host_context.sanitizer = __tsan_get_current_fiber();
#endif
  std::vector<uint64_t> turns(uint64_t{gridDim.x} * gridDim.y * gridDim.z);
  for (uint64_t i = 0; i < turns.size(); ++i) {  // shuffled from the inside out
    const uint64_t place = random_bits() % (i + 1);
    turns[i] = turns[place];
    turns[place] = i;
  }
  for (const uint64_t i : turns) {
    blockIdx = {static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                static_cast<unsigned>(i / gridDim.x / gridDim.y)};
    run_block();
    if (!block.failure.empty()) break;
  }
  acquire(&launch_order);
  const size_t kept = std::min<size_t>(used.size(), kMostVariables);
  for (size_t i = 0; i + kept < used.size(); ++i) std::free(used[i].bytes);
  used.erase(used.begin(), used.end() - static_cast<int64_t>(kept));
  if (!block.failure.empty()) {
    fibers.clear();
    throw std::runtime_error(std::exchange(block.failure, {}));
  }
}

}  // namespace emulator

// These are the runtime's functions that csrc/core calls.

cudaError_t cudaGetLastError() {
  return std::exchange(emulator::last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return emulator::last_error;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1024;
      return cudaSuccess;
    default:
      return cudaErrorNotSupported;
  }
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = 80;  // no clusters
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > emulator::kMostShared)
    return cudaErrorInvalidValue;
  emulator::dynamic_limits[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return cudaErrorNotSupported;
}
