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

struct Pool {
  std::mutex busy;   // one parallel region at a time; a second caller computes alone
  std::mutex mutex;  // guards sleeping
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::atomic<int64_t> generation{0}, next{0}, running{0};
  std::atomic<bool> stop{false};
  int64_t count = 0;
  void (*fn)(void*, int64_t) = nullptr;
  void* context = nullptr;

  void drain() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) fn(context, i);
  }

  void work(int64_t seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && generation.load() == seen; ++spin) std::this_thread::yield();
      if (generation.load() == seen) {
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait(lock, [&] { return generation.load() != seen; });
      }
      seen = generation.load();
      if (stop.load()) return;
      drain();
      running.fetch_sub(1);
    }
  }

  void announce() {
    std::lock_guard<std::mutex> lock(mutex);
    generation.fetch_add(1);
    wake.notify_all();
  }

  void resize(int64_t num_threads) {
    std::lock_guard<std::mutex> lock(busy);
    if (static_cast<int64_t>(workers.size()) == num_threads - 1) return;
    stop = true;
    announce();
    for (auto& worker : workers) worker.join();
    workers.clear();
    stop = false;
    for (int64_t i = 1; i < num_threads; ++i) workers.emplace_back(&Pool::work, this, generation.load());
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
    p.count = count, p.fn = fn, p.context = context;
    p.next = 0;
    p.running = static_cast<int64_t>(p.workers.size());
    p.announce();
    p.drain();
    while (p.running.load()) std::this_thread::yield();
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
