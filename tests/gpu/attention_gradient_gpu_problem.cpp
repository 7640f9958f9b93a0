#include "attention_gradient_gpu_problem.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

namespace longhalo::testing {
namespace {

constexpr double kTensorError = 1e-2;
constexpr double kStart = 6;     // what results are added to is normal, and never larger
constexpr float kUnused = 3e4F;  // where nothing must come from

// Rows of a band's arrays; an empty range stands where keys would begin to be seen.
KeyRange rows_seen(const AttentionProblem& p, const OwnedBand& band, int64_t row) {
  const int64_t doc_start = p.doc_start.empty() ? 0 : p.doc_start[static_cast<size_t>(row)];
  const KeyRange seen = visible_keys(band.band, p.first_query + row, doc_start);
  const int64_t end = std::clamp<int64_t>(seen.end - band.first_key, 0, band.count);
  return {std::clamp<int64_t>(seen.begin - band.first_key, 0, end), end};
}

int64_t keys_seen(const AttentionProblem& p, int64_t row) {
  int64_t count = 0;
  for (const OwnedBand& band : p.bands)
    count += rows_seen(p, band, row).count();
  return count;
}

// Large numbers for the keys before all and behind all that a query sees. Not for those between: where
// documents begin, keys may lie between two queries' ranges, and kernels read a tile's keys from the first to
// the last.
AttentionProblem with_unseen_keys_spoiled(AttentionProblem p) {
  const int64_t width = p.kv_heads * p.head_dim;
  for (OwnedBand& band : p.bands) {
    int64_t first = band.count, end = 0;
    for (int64_t row = 0; row < p.queries; ++row) {
      const KeyRange seen = rows_seen(p, band, row);
      first = std::min(first, seen.begin), end = std::max(end, seen.end);
    }
    for (std::vector<float>* x : {&band.k, &band.v}) {
      std::fill(x->begin(), x->begin() + first * width, kUnused);
      std::fill(x->begin() + std::max(first, end) * width, x->end(), kUnused);
    }
  }
  return p;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& right) {
  double error = 0, size = 0;
  for (size_t at = 0; at < got.size(); ++at) {
    error += std::pow(got[at] - right[at], 2);
    size += std::pow(right[at], 2);
  }
  return size > 0 ? std::sqrt(error / size) : 0;
}

// `start`: the largest magnitude of what the result was added to, which costs half a unit in its last place.
void expect_rows(const std::vector<double>& got, const std::vector<double>& right,
                 const std::vector<double>& error, int64_t d, double start, const std::string& what) {
  ASSERT_EQ(got.size(), right.size()) << what;
  const double added = start * kFp32Unit * std::sqrt(static_cast<double>(d));
  for (size_t row = 0; row < error.size(); ++row) {
    double squares = 0;
    for (size_t at = row * static_cast<size_t>(d); at < (row + 1) * static_cast<size_t>(d); ++at)
      squares += std::pow(got[at] - right[at], 2);
    ASSERT_LE(std::sqrt(squares), error[row] + added) << what << ", row " << row;  // false for NaN
  }
}

void expect_answer_right(const AttentionProblem& problem, const GradientJudgement& got,
                         const GradientJudgement& right) {
  const int64_t d = problem.head_dim;
  expect_rows(got.dq, right.dq, right.dq_error, d, 0, "dq");
  expect_rows(got.d_bias, right.d_bias, right.d_bias_error, 1, kStart, "d_landmark_bias");
  for (size_t b = 0; b < right.dk.size(); ++b) {
    expect_rows(got.dk[b], right.dk[b], right.dk_error[b], d, kStart, "dk of band " + std::to_string(b));
    expect_rows(got.dv[b], right.dv[b], right.dv_error[b], d, kStart, "dv of band " + std::to_string(b));
  }
  // The gradient of the score of the only key in sight is 0, and what a kernel has there is the rounding of
  // out. Where half of the rows are such, there is nothing to be relative to.
  int64_t alone = 0;
  for (int64_t row = 0; row < problem.queries; ++row)
    alone += keys_seen(problem, row) <= 1 ? 1 : 0;
  if (2 * alone >= problem.queries) return;
  EXPECT_LE(relative_error(got.dq, right.dq), kTensorError) << "dq";
  for (size_t b = 0; b < right.dk.size(); ++b) {
    EXPECT_LE(relative_error(got.dk[b], right.dk[b]), kTensorError) << "dk of band " << b;
    EXPECT_LE(relative_error(got.dv[b], right.dv[b]), kTensorError) << "dv of band " << b;
  }
}

}  // namespace

GpuGradient::GpuGradient(const AttentionProblem& problem, const std::vector<float>& d_out,
                         cudaStream_t stream, KeyLayout layout)
    : stream_(stream), forward_(with_unseen_keys_spoiled(problem), stream, layout) {
  shape_.heads = problem.heads, shape_.kv_heads = problem.kv_heads, shape_.head_dim = problem.head_dim;
  shape_.queries = problem.queries;
  const int64_t width = problem.heads * problem.head_dim;
  for (int64_t row = 0; row < problem.queries; ++row)
    for (int64_t c = 0; c < width; ++c)
      d_out_.push_back(
          to_bfloat16(keys_seen(problem, row) > 0 ? d_out[static_cast<size_t>(row * width + c)] : kUnused));
  for (const OwnedBand& band : problem.bands)
    add_band(band, layout);
  bias_before_ = normal_floats(problem.heads, 4);
}

void GpuGradient::add_band(const OwnedBand& band, KeyLayout layout) {
  const int64_t width = shape_.kv_heads * shape_.head_dim;
  const bool interleaved = layout == KeyLayout::kInterleaved;
  const int64_t row_stride = layout == KeyLayout::kDense ? width : interleaved ? 2 * width : width + 8;
  const int64_t all = (interleaved ? 1 : 2) * band.count * row_stride;
  bands_.push_back({interleaved ? width : band.count * row_stride,
                    row_stride,
                    normal_floats(all, 3),
                    {},
                    Guarded<float>(all, stream_)});
}

void GpuGradient::run(AttentionKernel kernel, bool bias_wanted, bool deterministic) {
  forward_.run(AttentionKernel::kAutomatic);
  Guarded<BFloat16> d_out(static_cast<int64_t>(d_out_.size()), stream_), dq(d_out_.size(), stream_);
  Guarded<float> d_bias(shape_.heads, stream_);
  d_out.put(d_out_);
  d_bias.put(bias_before_);
  AttentionGradient<BFloat16> a;
  a.forward = forward_.description();
  a.d_out = d_out.data(), a.dq = dq.data();
  a.d_landmark_bias = bias_wanted ? d_bias.data() : nullptr;
  a.deterministic = deterministic;
  std::vector<BandGradient<BFloat16>> d_bands;
  for (DeviceBand& band : bands_) {
    band.results.poison();
    band.results.put(band.before);
    const bool dense = band.row_stride == shape_.kv_heads * shape_.head_dim;
    d_bands.push_back({band.results.data(), band.results.data() + band.first_v, dense ? 0 : band.row_stride});
  }
  a.d_bands = d_bands;
  const int64_t bytes = attention_backward_workspace(a);
  Guarded<unsigned char> workspace(bytes, stream_);
  a.workspace = workspace.data();
  attention_backward(stream_, a, kernel);
  dq_ = dq.values();
  bias_after_ = d_bias.values();
  for (DeviceBand& band : bands_)
    band.after = band.results.values();
  workspace.values();
}

GradientJudgement GpuGradient::answer() const {
  GradientJudgement answer;
  answer.dq = doubles(dq_);
  for (size_t h = 0; h < bias_before_.size(); ++h)
    answer.d_bias.push_back(static_cast<double>(bias_after_[h]) - static_cast<double>(bias_before_[h]));
  const int64_t width = shape_.kv_heads * shape_.head_dim;
  for (const DeviceBand& band : bands_) {
    std::vector<double> dk, dv;
    const auto size = static_cast<int64_t>(band.before.size());
    for (int64_t at = 0; at < size; ++at) {
      const int64_t from_v = at - band.first_v;
      const bool is_v = from_v >= 0 && from_v % band.row_stride < width;
      const bool is_k = !is_v && at % band.row_stride < width;
      const auto i = static_cast<size_t>(at);
      if (is_k || is_v)
        (is_v ? dv : dk).push_back(static_cast<double>(band.after[i]) - static_cast<double>(band.before[i]));
      else
        EXPECT_EQ(band.after[i], band.before[i]) << "written between the rows of dk and dv";
    }
    answer.dk.push_back(std::move(dk)), answer.dv.push_back(std::move(dv));
  }
  return answer;
}

std::vector<uint32_t> GpuGradient::bits() const {
  std::vector<uint32_t> bits;
  for (BFloat16 x : dq_)
    bits.push_back(x.bits);
  const auto add = [&](const std::vector<float>& values) {
    for (float x : values)
      bits.push_back(std::bit_cast<uint32_t>(x));
  };
  add(bias_after_);
  for (const DeviceBand& band : bands_)
    add(band.after);
  return bits;
}

void expect_gradient_right(const AttentionProblem& problem, unsigned seed, AttentionKernel kernel,
                           cudaStream_t stream, KeyLayout layout) {
  SCOPED_TRACE(problem.text());
  std::vector<float> d_out = normal_floats(problem.queries * problem.heads * problem.head_dim, seed);
  for (float& x : d_out)
    x = to_float(to_bfloat16(x));
  GpuGradient there(problem, d_out, stream, layout);
  there.run(kernel);
  const std::vector<uint32_t> first = there.bits();
  there.run(kernel);
  EXPECT_EQ(first, there.bits()) << "two runs differ";
  const GradientJudgement right = judge_backward(problem, d_out, kBf16Unit);
  expect_answer_right(problem, there.answer(), right);
  if (kernel != AttentionKernel::kHopper || ::testing::Test::HasFailure()) return;
  SCOPED_TRACE("dq added in any order");
  there.run(kernel, true, false);
  expect_answer_right(problem, there.answer(), right);
}

}  // namespace longhalo::testing
