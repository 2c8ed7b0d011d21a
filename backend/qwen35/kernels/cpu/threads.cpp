// A small pool: the caller works too; workers spin for a moment before they sleep, because a step is many short calls.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "common.h"

namespace qwen35 {
namespace {

constexpr int kSpins = 2000;  // about 20 us

// Items of the current region are claimed one by one from `cursor`: the region's number in its upper half, the next item
// in its lower. A worker that comes late finds nothing left and is waited for by nobody, so that a core which somebody
// else has taken costs its own work alone. While the caller writes a region's fields the cursor is closed: a claim that
// has read some of them then fails.
struct Pool {
  static constexpr uint64_t kClosed = 0xffffffff;

  std::mutex busy;   // one parallel region at a time; a second caller computes alone
  std::mutex mutex;  // guards falling asleep
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::atomic<uint64_t> cursor{kClosed};
  std::atomic<int64_t> count{0}, done{0}, sleeping{0};
  std::atomic<void (*)(void*, int64_t)> fn{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<bool> stop{false};

  uint64_t region() const { return cursor.load() >> 32; }

  void drain() {
    for (uint64_t seen = cursor.load();;) {
      const int64_t item = seen & kClosed;
      if (item >= count.load()) return;
      const auto run = fn.load();
      void* const argument = context.load();
      if (!cursor.compare_exchange_weak(seen, seen + 1)) continue;
      run(argument, item);
      done.fetch_add(1);
      seen = cursor.load();
    }
  }

  void work(uint64_t seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && region() == seen; ++spin) std::this_thread::yield();
      if (region() == seen) {
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        wake.wait(lock, [&] { return region() != seen; });
        sleeping.fetch_sub(1);
      }
      seen = region();
      if (stop.load()) return;
      drain();
    }
  }

  void open(int64_t num_items, void (*function)(void*, int64_t), void* argument) {
    const uint64_t number = (region() + 1) << 32;
    cursor.store(number | kClosed);
    count.store(num_items), fn.store(function), context.store(argument), done.store(0);
    cursor.store(number);
    if (sleeping.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    wake.notify_all();
  }

  void resize(int64_t num_threads) {
    std::lock_guard<std::mutex> lock(busy);
    if (static_cast<int64_t>(workers.size()) == num_threads - 1) return;
    stop = true;
    open(0, nullptr, nullptr);
    for (auto& worker : workers) worker.join();
    workers.clear();
    stop = false;
    for (int64_t i = 1; i < num_threads; ++i) workers.emplace_back(&Pool::work, this, region());
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: its threads end with the process
  return *instance;
}

struct Buffers {
  void* data[4] = {};
  size_t num_bytes[4] = {};
  ~Buffers() {
    for (void* part : data) std::free(part);
  }
};

}  // namespace

void parallel(int64_t count, void (*fn)(void*, int64_t), void* context) {
  Pool& p = pool();
  if (count > 1 && !p.workers.empty() && p.busy.try_lock()) {
    std::lock_guard<std::mutex> lock(p.busy, std::adopt_lock);
    p.open(count, fn, context);
    p.drain();
    while (p.done.load() < count) std::this_thread::yield();
    return;
  }
  for (int64_t i = 0; i < count; ++i) fn(context, i);
}

void* scratch(int which, size_t num_bytes) {
  thread_local Buffers buffers;
  if (buffers.num_bytes[which] < num_bytes) {
    std::free(buffers.data[which]);
    size_t rounded = (num_bytes + 4095) & ~size_t{4095};
    buffers.data[which] = std::aligned_alloc(64, rounded);
    if (!buffers.data[which]) std::abort();
    buffers.num_bytes[which] = rounded;
  }
  return buffers.data[which];
}

}  // namespace qwen35

extern "C" void qwen35_set_num_threads(int64_t num_threads) { qwen35::pool().resize(num_threads); }
