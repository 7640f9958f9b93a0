#include "comm/host_steps.hpp"

#include "core/error.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

std::string mpi_words(int code) {
  char words[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, words, &length);
  return {words, static_cast<size_t>(length)};
}

}  // namespace

void HostSteps::run(void* data) noexcept {
  auto& step = *static_cast<Step*>(data);
  Failure& failure = *step.failure;
  if (!failure.happened.load()) {
    std::string words;
    try {
      const Waiting waiting(step.what);
      const int code = step.work();
      if (code != MPI_SUCCESS) words = text(step.what, " failed: ", mpi_words(code));
    } catch (const std::exception& error) {
      words = text(step.what, " failed: ", error.what());
    }
    if (!words.empty()) {
      const std::lock_guard lock(failure.mutex);
      failure.words = words;
      failure.happened.store(true);
    }
  }
  step.done.store(true, std::memory_order_release);
}

void HostSteps::queue(const char* what, Work work, cudaStream_t stream) {
  while (!steps_.empty() && steps_.front()->done.load(std::memory_order_acquire))
    steps_.pop_front();
  auto step = std::make_unique<Step>();
  step->what = what;
  step->work = std::move(work);
  step->failure = failure_;
  steps_.push_back(std::move(step));
  last_.make_wait(stream);  // of an event never recorded: no wait
  check_cuda(cudaLaunchHostFunc(stream, &HostSteps::run, steps_.back().get()), "cudaLaunchHostFunc");
  last_.record(stream);
}

void HostSteps::check() const {
  if (!failure_->happened.load()) return;
  const std::lock_guard lock(failure_->mutex);
  throw InvariantError(failure_->words, std::source_location::current());
}

}  // namespace longhalo
