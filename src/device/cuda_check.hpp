// Every CUDA call and every launch is checked: the message says what was tried, where, what CUDA said, and
// what to do. Memory that ran out and a missing or unfit driver are the user's to deal with (UserError);
// anything else is LongHalo's fault (InvariantError) and leaves the device unusable.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <string_view>

namespace longhalo {

/// Throws unless `code` is cudaSuccess. `what` names the call or the purpose.
void check_cuda(cudaError_t code, std::string_view what,
                const std::source_location& where = std::source_location::current());

/// Throws when the launch just made was refused. With LONGHALO_SYNC_LAUNCHES=1 in the environment it also
/// waits for the kernel, so that a fault inside is named here and not by a later call; not inside graph
/// capture.
void check_launch(std::string_view kernel, cudaStream_t stream,
                  const std::source_location& where = std::source_location::current());

/// Makes the host wait until `stream` is done, which may be for as long as other ranks take: the watchdog
/// sees it. `what`, a literal, names what is waited for.
void wait_for_stream(cudaStream_t stream, const char* what,
                     const std::source_location& where = std::source_location::current());

/// For destructors and other places that must not throw: logs instead.
void log_cuda_failure(cudaError_t code, std::string_view what) noexcept;

}  // namespace longhalo
