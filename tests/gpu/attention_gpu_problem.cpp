#include "attention_gpu_problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace longhalo::testing {
namespace {

constexpr int64_t kGuard = 4096;          // elements before and behind out and lse
constexpr int64_t kGuardRows = 130;       // rows before and behind keys and values: more than a key tile
constexpr BFloat16 kNan{0xffff};          // what cudaMemset(0xff) leaves
constexpr uint32_t kNanBits = ~0U;        // the same in fp32
constexpr double kBfloat16Unit = 0x1p-8;  // half a unit in the last place of 1
// The bounds: of the whole tensor in the Frobenius norm, and of one lse.
constexpr double kTensorError = 5e-3;
constexpr double kLseError = 1e-4;

std::vector<BFloat16> to_bits(const std::vector<float>& x) {
  std::vector<BFloat16> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), to_bfloat16);
  return bits;
}

template <class T>
DeviceBuffer<T> upload(const std::vector<T>& x, cudaStream_t stream) {
  return to_device<T>(x, "test input", stream);
}

template <class T>
std::vector<T> download(const DeviceBuffer<T>& x, cudaStream_t stream) {
  std::vector<T> values(static_cast<size_t>(x.size()));
  to_host<T>(values, x.data(), stream);
  return values;
}

}  // namespace

void round_to_bfloat16(AttentionProblem& problem) {
  const auto round = [](std::vector<float>& x) {
    for (float& value : x)
      value = to_float(to_bfloat16(value));
  };
  round(problem.q);
  for (OwnedBand& b : problem.bands) {
    round(b.k);
    round(b.v);
  }
}

QueryUnits units_of(unsigned seed) {
  return std::popcount(seed) % 2 == 1 ? QueryUnits::kExponents : QueryUnits::kPlain;
}

bool same_bits(const GpuAnswer& a, const GpuAnswer& b) {
  return a.out.size() == b.out.size() && a.lse.size() == b.lse.size() &&
         std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(BFloat16)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

GpuAttention::GpuAttention(const AttentionProblem& problem, cudaStream_t stream, KeyLayout layout)
    : stream_(stream) {
  shape_.heads = problem.heads, shape_.kv_heads = problem.kv_heads, shape_.head_dim = problem.head_dim;
  shape_.units = problem.units;
  shape_.queries = problem.queries, shape_.first_query = problem.first_query;
  q_ = upload(to_bits(problem.q), stream);
  if (!problem.landmark_bias.empty()) bias_ = upload(problem.landmark_bias, stream);
  if (!problem.doc_start.empty()) doc_start_ = upload(problem.doc_start, stream);
  out_ = DeviceBuffer<BFloat16>(q_.size() + 2 * kGuard, "out", stream);
  lse_ = DeviceBuffer<float>(problem.heads * problem.queries + 2 * kGuard, "lse", stream);
  for (const OwnedBand& b : problem.bands)
    add_band(b, layout);
  for (const DeviceBand& b : storage_)
    bands_.push_back(b.keys);
}

void GpuAttention::add_band(const OwnedBand& band, KeyLayout layout) {
  const int64_t width = shape_.kv_heads * shape_.head_dim;
  const int64_t stride = layout == KeyLayout::kDense         ? width
                         : layout == KeyLayout::kInterleaved ? 2 * width
                                                             : width + 8;
  const int64_t one = (band.count + 2 * kGuardRows) * stride;  // elements of an array with its guards
  const int64_t k_at = kGuardRows * stride;
  const int64_t v_at = layout == KeyLayout::kInterleaved ? k_at + width : one + k_at;
  std::vector<BFloat16> bits(static_cast<size_t>(layout == KeyLayout::kInterleaved ? one : 2 * one), kNan);
  for (int64_t r = 0; r < band.count; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      const auto from = static_cast<size_t>(r * width + c);
      bits[static_cast<size_t>(k_at + r * stride + c)] = to_bfloat16(band.k[from]);
      bits[static_cast<size_t>(v_at + r * stride + c)] = to_bfloat16(band.v[from]);
    }
  }
  DeviceBand there;
  there.storage = upload(bits, stream_);
  there.keys = {band.band,
                there.storage.data() + k_at,
                there.storage.data() + v_at,
                band.first_key,
                band.count,
                layout == KeyLayout::kDense ? 0 : stride};
  storage_.push_back(std::move(there));
}

Attention<BFloat16> GpuAttention::description() {
  Attention<BFloat16> a;
  a.heads = shape_.heads, a.kv_heads = shape_.kv_heads, a.head_dim = shape_.head_dim;
  a.scale = shape_.scale();
  a.queries = shape_.queries, a.first_query = shape_.first_query;
  a.q = q_.data(), a.bands = bands_;
  a.landmark_bias = bias_.data(), a.doc_start = doc_start_.data();
  a.out = out_.data() + kGuard, a.lse = lse_.data() + kGuard;
  return a;
}

void GpuAttention::poison() {
  check_cuda(cudaMemsetAsync(out_.data(), 0xff, static_cast<size_t>(out_.bytes()), stream_), "poisoning out");
  check_cuda(cudaMemsetAsync(lse_.data(), 0xff, static_cast<size_t>(lse_.bytes()), stream_), "poisoning lse");
}

GpuAnswer GpuAttention::answer(WantLse want) const {
  const std::vector<BFloat16> out = download(out_, stream_);
  const std::vector<float> lse = download(lse_, stream_);
  const auto whole = [](BFloat16 x) { return x.bits == kNan.bits; };
  const auto whole_lse = [](float x) { return std::bit_cast<uint32_t>(x) == kNanBits; };
  EXPECT_TRUE(std::all_of(out.begin(), out.begin() + kGuard, whole)) << "written to before out";
  EXPECT_TRUE(std::all_of(out.end() - kGuard, out.end(), whole)) << "written to behind out";
  EXPECT_TRUE(std::all_of(lse.begin(), lse.begin() + kGuard, whole_lse)) << "written to before lse";
  EXPECT_TRUE(std::all_of(lse.end() - kGuard, lse.end(), whole_lse)) << "written to behind lse";
  GpuAnswer answer;
  answer.out.assign(out.begin() + kGuard, out.end() - kGuard);
  if (want == WantLse::kYes) answer.lse.assign(lse.begin() + kGuard, lse.end() - kGuard);
  return answer;
}

GpuAnswer GpuAttention::run(AttentionKernel kernel, WantLse want) {
  poison();
  Attention<BFloat16> a = description();
  if (want == WantLse::kNo) a.lse = nullptr;
  attention_forward(stream_, a, kernel);
  return answer(want);
}

// What bf16 may change, u = 2^-8: the kernel rounds the weights to bf16 for the second product, each by a
// relative u at most, which moves a component of out by at most u * sum softmax * |v| ("weighed"), and then
// rounds out itself, by u * |out|. judge() adds what fp32 sums may change. These are bounds, for every row.
// Over the whole tensor such errors mostly cancel, hence the far smaller kTensorError there.
void expect_right(const AttentionProblem& problem, const GpuAnswer& answer, std::vector<int64_t> rows) {
  if (rows.empty()) {
    rows.resize(static_cast<size_t>(problem.queries));
    std::iota(rows.begin(), rows.end(), 0);
  }
  const Judgement right = judge(problem, rows);
  const auto count = static_cast<int64_t>(rows.size()), d = problem.head_dim;
  double all_errors = 0, all_out = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = rows[static_cast<size_t>(r)];
    for (int64_t h = 0; h < problem.heads; ++h) {
      const double lse = right.lse[static_cast<size_t>(h * count + r)];
      double error = 0, out = 0, weighed = 0;
      bool zero = true;
      for (int64_t c = 0; c < d; ++c) {
        const auto at = static_cast<size_t>((r * problem.heads + h) * d + c);
        const float got = to_float(answer.out[static_cast<size_t>((row * problem.heads + h) * d + c)]);
        error += std::pow(got - right.out[at], 2);
        out += std::pow(right.out[at], 2);
        weighed += std::pow(right.weighed[at], 2);
        zero = zero && got == 0.0F;
      }
      all_errors += error, all_out += out;
      const bool blind = lse == -std::numeric_limits<double>::infinity();
      const double bound =
          kBfloat16Unit * (std::sqrt(out) + std::sqrt(weighed)) + right.tolerance * std::sqrt(weighed);
      const bool out_right = blind ? zero : std::sqrt(error) <= bound;  // false for NaN
      bool lse_right = true;
      float got = 0;
      if (!answer.lse.empty()) {
        got = answer.lse[static_cast<size_t>(h * problem.queries + row)];
        lse_right = blind ? got == lse : std::abs(got - lse) <= std::max(kLseError, right.tolerance);
      }
      if (out_right && lse_right) continue;
      ADD_FAILURE() << problem.text() << "\nrow " << row << " head " << h << ": out errs by "
                    << std::sqrt(error) << " where rounding explains " << bound << "; lse " << got
                    << " instead of " << lse;
      return;
    }
  }
  EXPECT_LE(std::sqrt(all_errors), kTensorError * std::sqrt(all_out)) << problem.text();
}

void expect_kernel_right(const AttentionProblem& problem, AttentionKernel kernel, cudaStream_t stream,
                         KeyLayout layout) {
  GpuAttention there(problem, stream, layout);
  const GpuAnswer first = there.run(kernel), second = there.run(kernel);
  EXPECT_TRUE(same_bits(first, second)) << "two runs differ: " << problem.text();
  expect_right(problem, first);
}

}  // namespace longhalo::testing
