// Helper threads take tasks when they have time. Nobody waits for them, so they cost little on a busy machine.
#pragma once

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace torch_fastdet {

class Helpers {
 public:
  // Return how many helpers the caller may use: none if PyTorch is set to one thread.
  static int count() { return std::min(at::get_num_threads() - 1, kMost); }

  // Queue the task for another thread, which runs it soon, late or never.
  static void ask(std::function<void()> task) {
    static Helpers* const helpers = new Helpers;  // never destroyed: its threads run until the process exits
    if (helpers->process_ != getpid()) return;    // a forked process has none of the threads
    {
      const std::lock_guard<std::mutex> lock(helpers->mutex_);
      if (helpers->tasks_.size() >= kMostTasks) return;
      helpers->tasks_.push_back(std::move(task));
    }
    helpers->came_.notify_one();
  }

 private:
  static constexpr int kMost = 7;
  static constexpr size_t kMostTasks = 64;

  Helpers() {
    try {
      for (int i = 0; i < kMost; ++i) std::thread([this] { run(); }).detach();
    } catch (const std::system_error&) {  // there may be no more threads
    }
  }

  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      came_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> tasks_;
};

}  // namespace torch_fastdet
