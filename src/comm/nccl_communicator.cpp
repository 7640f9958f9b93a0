#include "comm/nccl_communicator.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "core/error.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {
namespace {

constexpr double kInitSeconds = 120;
constexpr double kEndSeconds = 20, kAbortSeconds = 10;

// A peer may come late to the first message, after its own loading. The watchdog, where there is one, says
// more and comes first.
double call_seconds() {
  constexpr double kForEver = 1e9, kAfterTheWatchdog = 10;
  const double deadline = deadline_seconds();
  return deadline > 0 ? deadline + kAfterTheWatchdog : kForEver;
}

ncclResult_t state_of(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
  return asked == ncclSuccess ? state : asked;
}

// The state once it is no longer ncclInProgress, or ncclInProgress when `seconds` have passed.
ncclResult_t settled_state(ncclComm_t comm, double seconds) {
  const Stopwatch watch;
  ncclResult_t state = state_of(comm);
  while (state == ncclInProgress && watch.seconds() < seconds) {
    if (watch.seconds() < 1e-3)
      std::this_thread::yield();  // queueing takes microseconds
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));  // making connections
    state = state_of(comm);
  }
  return state;
}

// Runs `work` on a thread of its own and waits for it, but not longer than `seconds`.
bool ends_within(double seconds, std::function<void()> work) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread([shared, work = std::move(work)] {
    work();
    const std::lock_guard lock(shared->mutex);
    shared->done = true;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  return shared->changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return shared->done; });
}

}  // namespace

std::string nccl_words(ncclResult_t result, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  std::string words = ncclGetErrorString(result);
  if (last != nullptr && *last != '\0') words += text(" (", last, ")");
  return words;
}

NcclCommunicator::NcclCommunicator(const MpiSession& session, const ncclUniqueId& id)
    : where_(text("rank ", session.rank(), " on host ", session.host())) {
  check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Waiting waiting("NCCL's start");
  const double patience = std::min(kInitSeconds, call_seconds());
  ncclResult_t result = ncclCommInitRankConfig(&comm_, session.ranks(), id, session.rank(), &config);
  if (result == ncclInProgress) result = settled_state(comm_, patience);
  if (result == ncclSuccess) return;
  const std::string words =
      result == ncclInProgress ? text("it was not ready within ", patience, " s") : nccl_words(result, comm_);
  healthy_ = false;
  close();
  throw UserError(
      text("NCCL could not start: ", words), where_,
      "run with NCCL_DEBUG=WARN to see why (a full /dev/shm, no network between the hosts, ...), or "
      "set run.transport: staged");
}

NcclCommunicator::~NcclCommunicator() {
  if (std::uncaught_exceptions() > 0) healthy_ = false;  // the other ranks may never come here
  close();
}

void NcclCommunicator::run(const char* what, const std::function<ncclResult_t()>& calls) {
  const std::lock_guard lock(mutex_);
  const Waiting waiting(what);
  ncclResult_t result = calls();
  if (result == ncclInProgress) result = settled_state(comm_, call_seconds());
  if (result != ncclSuccess) fail(result, what);
}

std::string NcclCommunicator::fault() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) return {};  // run() looks itself
  const ncclResult_t state = state_of(comm_);
  return state == ncclSuccess || state == ncclInProgress
             ? std::string()
             : text("NCCL says of the messages between the GPUs: ", nccl_words(state, comm_));
}

void NcclCommunicator::check_health() {
  const std::lock_guard lock(mutex_);
  const ncclResult_t state = state_of(comm_);
  if (state != ncclSuccess && state != ncclInProgress) fail(state, "a message between the GPUs");
}

void NcclCommunicator::fail(ncclResult_t result, const char* what) {
  healthy_ = false;
  const std::string said = result == ncclInProgress ? text(what, " was not through within ", call_seconds(),
                                                           " s: a rank did not come")
                                                    : text(what, " failed: ", nccl_words(result, comm_));
  if (result == ncclInvalidArgument || result == ncclInvalidUsage)
    throw InvariantError(said, std::source_location::current());
  throw UserError(
      said, where_,
      "see whether the other ranks are alive and NCCL_DEBUG=WARN tells more, or set run.transport: "
      "staged");
}

void NcclCommunicator::close() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  ncclComm_t comm = std::exchange(comm_, nullptr);
  try {
    const bool ended =
        ends_within((healthy_ ? kEndSeconds : 0) + kAbortSeconds, [=, device = device_, healthy = healthy_] {
          log_cuda_failure(cudaSetDevice(device), "selecting the GPU");
          if (healthy) {
            ncclResult_t result = ncclCommFinalize(comm);
            if (result == ncclInProgress) result = settled_state(comm, kEndSeconds);
            if (result == ncclSuccess) return void(ncclCommDestroy(comm));
          }
          ncclCommAbort(comm);
        });
    if (!ended) log_warning("NCCL's communicator did not end in time; it is left as it is");
  } catch (...) {  // no thread to be had: the communicator stays until the process ends
  }
}

}  // namespace longhalo
