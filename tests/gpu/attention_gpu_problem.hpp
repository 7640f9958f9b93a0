// Attention problems of tests/kernels on the GPU: inputs that bf16 holds exactly, so that kernel and fp64
// reference see equal numbers; arrays between guard zones; and what bf16 explains of an error.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_problem.hpp"
#include "core/bfloat16.hpp"
#include "device/device_buffer.hpp"

namespace longhalo::testing {

/// Rounds q, the keys and the values to numbers that bf16 holds.
void round_to_bfloat16(AttentionProblem& problem);

/// For problems of many seeds: kExponents for half of the odd ones and half of the even ones.
QueryUnits units_of(unsigned seed);

/// How the rows of keys and values lie in memory: each array dense; [count, 2, H_kv, d], keys and values in
/// one; or each with 8 elements of NaN behind every row.
enum class KeyLayout { kDense, kInterleaved, kPadded };

struct GpuAnswer {
  std::vector<BFloat16> out;  // [n, H, d]
  std::vector<float> lse;     // [H, n], empty when not asked for
};
bool same_bits(const GpuAnswer& a, const GpuAnswer& b);

enum class WantLse { kYes, kNo };

/// A problem's arrays in device memory. What lies before and behind the keys and values is NaN; out and lse
/// lie between guard zones.
class GpuAttention {
 public:
  GpuAttention(const AttentionProblem& problem, cudaStream_t stream, KeyLayout layout = KeyLayout::kDense);

  /// Pointers to the arrays here; valid as long as this object.
  Attention<BFloat16> description();
  /// Fills out, lse and their guard zones with NaN.
  void poison();
  /// Out and lse as they are now; fails the test when a guard zone was written to. The host waits.
  GpuAnswer answer(WantLse want = WantLse::kYes) const;
  /// poison(), the kernel, answer().
  GpuAnswer run(AttentionKernel kernel, WantLse want = WantLse::kYes);

 private:
  struct DeviceBand {
    DeviceBuffer<BFloat16> storage;
    BandKeys<BFloat16> keys;
  };
  void add_band(const OwnedBand& band, KeyLayout layout);

  AttentionProblem shape_;  // without its arrays
  cudaStream_t stream_;
  std::vector<DeviceBand> storage_;
  std::vector<BandKeys<BFloat16>> bands_;
  DeviceBuffer<BFloat16> q_, out_;
  DeviceBuffer<float> bias_, lse_;
  DeviceBuffer<int64_t> doc_start_;
};

/// Adds a failure for each way in which `answer` differs from the fp64 reference by more than its number
/// formats explain; see the .cpp file for the bounds. `rows`: the rows that are looked at, all by default.
void expect_right(const AttentionProblem& problem, const GpuAnswer& answer, std::vector<int64_t> rows = {});

/// Runs the kernel twice, expects equal bits and the right answer.
void expect_kernel_right(const AttentionProblem& problem, AttentionKernel kernel, cudaStream_t stream,
                         KeyLayout layout = KeyLayout::kDense);

}  // namespace longhalo::testing
