#include "attention_gradient_problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace longhalo::testing {
namespace {

template <class T>
void describe(const AttentionProblem& problem, Attention<T>& a) {
  a.heads = problem.heads, a.kv_heads = problem.kv_heads, a.head_dim = problem.head_dim;
  a.scale = problem.scale();
  a.queries = problem.queries, a.first_query = problem.first_query;
  a.doc_start = problem.doc_start.empty() ? nullptr : problem.doc_start.data();
}

std::vector<double> norms(const std::vector<float>& x, int64_t d) {
  std::vector<double> norms;
  for (size_t at = 0; at < x.size(); at += static_cast<size_t>(d)) {
    double squares = 0;
    for (size_t c = at; c < at + static_cast<size_t>(d); ++c)
      squares += static_cast<double>(x[c]) * x[c];
    norms.push_back(std::sqrt(squares));
  }
  return norms;
}

double largest(const std::vector<double>& x) {
  return x.empty() ? 0 : *std::max_element(x.begin(), x.end());
}

struct Reference {
  std::vector<double> dq, d_bias;
  std::vector<std::vector<double>> dk, dv;
};

Reference run_reference(const AttentionProblem& problem, const std::vector<double>& d_out) {
  Reference answer;
  const std::vector<double> q = upcast(problem.q), bias = upcast(problem.landmark_bias);
  std::vector<std::vector<double>> k, v;
  for (const OwnedBand& b : problem.bands) {
    k.push_back(upcast(b.k));
    v.push_back(upcast(b.v));
    answer.dk.emplace_back(b.k.size());
    answer.dv.emplace_back(b.v.size());
  }
  std::vector<BandKeys<double>> keys;
  std::vector<BandGradient<double>> d_keys;
  for (size_t b = 0; b < k.size(); ++b) {
    keys.push_back({problem.bands[b].band, k[b].data(), v[b].data(), problem.bands[b].first_key,
                    problem.bands[b].count});
    d_keys.push_back({answer.dk[b].data(), answer.dv[b].data()});
  }
  AttentionGradient<double> a;
  describe(problem, a.forward);
  answer.dq.resize(q.size());
  std::vector<double> out(q.size());
  answer.d_bias.resize(static_cast<size_t>(problem.heads));
  a.forward.q = q.data(), a.forward.bands = keys, a.forward.out = out.data();
  a.forward.landmark_bias = bias.empty() ? nullptr : bias.data();
  a.d_out = d_out.data(), a.dq = answer.dq.data(), a.d_bands = d_keys;
  a.d_landmark_bias = answer.d_bias.data();
  attention_backward_reference(a);
  return answer;
}

void expect_rows(const std::vector<float>& got, const std::vector<double>& right,
                 const std::vector<double>& error, int64_t d, const std::string& what) {
  ASSERT_EQ(got.size(), right.size()) << what;
  for (size_t row = 0; row < error.size(); ++row) {
    double squares = 0;
    for (size_t at = row * static_cast<size_t>(d); at < (row + 1) * static_cast<size_t>(d); ++at)
      squares += std::pow(got[at] - right[at], 2);
    ASSERT_LE(std::sqrt(squares), error[row]) << what << ", row " << row;  // false for NaN
  }
}

}  // namespace

GradientAnswer run_backward(const AttentionProblem& problem, const std::vector<float>& d_out,
                            int64_t portion) {
  const AttentionAnswer forward = run_kernel(problem);
  GradientAnswer answer;
  answer.dq.assign(problem.q.size(), std::numeric_limits<float>::quiet_NaN());
  answer.d_bias.resize(static_cast<size_t>(problem.heads));
  for (const OwnedBand& b : problem.bands) {
    answer.dk.emplace_back(b.k.size());
    answer.dv.emplace_back(b.v.size());
  }
  std::vector<BandKeys<float>> keys;
  std::vector<BandGradient<float>> d_keys;
  for (size_t b = 0; b < problem.bands.size(); ++b) {
    const OwnedBand& from = problem.bands[b];
    keys.push_back({from.band, from.k.data(), from.v.data(), from.first_key, from.count});
    d_keys.push_back({answer.dk[b].data(), answer.dv[b].data()});
  }
  for (int64_t first = 0; first < problem.queries; first += std::min(portion, problem.queries)) {
    const int64_t count = std::min(portion, problem.queries - first);
    const int64_t at = first * problem.heads * problem.head_dim;
    std::vector<float> out = forward.out, lse;
    for (int64_t h = 0; h < problem.heads; ++h)
      lse.insert(lse.end(), forward.lse.begin() + h * problem.queries + first,
                 forward.lse.begin() + h * problem.queries + first + count);
    AttentionGradient<float> a;
    describe(problem, a.forward);
    a.forward.queries = count, a.forward.first_query += first;
    if (a.forward.doc_start != nullptr) a.forward.doc_start += first;
    a.forward.q = problem.q.data() + at, a.forward.out = out.data() + at, a.forward.lse = lse.data();
    a.forward.bands = keys;
    a.forward.landmark_bias = problem.landmark_bias.empty() ? nullptr : problem.landmark_bias.data();
    a.d_out = d_out.data() + at, a.dq = answer.dq.data() + at, a.d_bands = d_keys;
    a.d_landmark_bias = answer.d_bias.data();
    attention_backward(a);
  }
  return answer;
}

// To first order, with u = 2^-24, lambda = 4 and tau the forward pass's tolerance (attention_problem.cpp):
//   a weight p is the exponential of a score less lse, which both err as in the forward pass: 2 tau,
//   relative; d_out . v, D = out . d_out and ds = p (d_out . v - D) are at most |d_out| max|v| =: m, p m and
//   2 p m. The dot products of d terms err by lambda sqrt(d) u m, D by tau m more (the error of out), so that
//   ds errs by p m e with e = 2 * 2 tau + tau + lambda (2 sqrt(d) + 4) u; sums over the L keys of a row, or
//   the R rows of a key, add lambda sqrt(L or R) u of their terms' size.
// Hence the absolute errors
//   dq:   scale m max|k| (e + 2 lambda sqrt(L) u)                        for a row, as its weights sum to 1
//   dk:   scale max|v| sum_rows(p |d_out| |q|) (e + 2 lambda sqrt(R) u)
//   dv:   sum_rows(p |d_out|) (2 tau + lambda sqrt(R) u)
//   bias: sum_rows(m) (e + 2 lambda sqrt(L) u)
// A kernel that rounds by a larger unit w where it says so: the weights of the forward pass and out, w m each
// in D; the weights, w in dv; dS, 2 w p m more; dq itself, of at most 2 m scale max|k|. That is 4 w more in e
// and 2 w more of dq.
// A weight below 2^-126 may become 0 (a key that nobody else weighs then gets nothing): `lost`.
// The two sums over rows are made by the reference itself: they are its dv for a d_out that holds these
// numbers.
GradientJudgement judge_backward(const AttentionProblem& problem, const std::vector<float>& d_out,
                                 double unit) {
  const int64_t d = problem.head_dim;
  Reference right = run_reference(problem, upcast(d_out));
  const std::vector<double> q_norm = norms(problem.q, d), d_out_norm = norms(d_out, d);
  std::vector<double> sizes(d_out.size());
  for (size_t row = 0; row < q_norm.size(); ++row) {
    sizes[row * static_cast<size_t>(d)] = d_out_norm[row] * q_norm[row];
    sizes[row * static_cast<size_t>(d) + 1] = d_out_norm[row];
  }
  const Reference column = run_reference(problem, sizes);
  double longest_k = 0, longest_v = 0, keys = 0;
  for (const OwnedBand& b : problem.bands) {
    longest_k = std::max(longest_k, largest(norms(b.k, d)));
    longest_v = std::max(longest_v, largest(norms(b.v, d)));
    keys += static_cast<double>(b.count);
  }
  const double lambda = 4, root_d = std::sqrt(static_cast<double>(d));
  double shift = 0;
  for (float x : problem.landmark_bias)
    shift = std::max(shift, static_cast<double>(std::abs(x)));
  const double tau =
      lambda * kUnit *
      ((root_d + 4) * (problem.scale() * largest(q_norm) * longest_k + shift) + 8 + std::sqrt(keys + 1));
  const double e = 5 * tau + lambda * (2 * root_d + 4) * kUnit + 4 * unit;
  const double over_keys = e + 2 * lambda * std::sqrt(keys + 1) * kUnit;
  const double rows = std::sqrt(static_cast<double>(problem.queries * problem.heads / problem.kv_heads));
  const double scale = problem.scale();
  const double lost = rows * rows * 0x1p-126 * largest(d_out_norm);

  GradientJudgement judgement;
  judgement.d_bias_error.resize(static_cast<size_t>(problem.heads));
  for (size_t row = 0; row < d_out_norm.size(); ++row) {
    judgement.dq_error.push_back(scale * d_out_norm[row] * longest_v * longest_k * (over_keys + 2 * unit));
    judgement.d_bias_error[row % static_cast<size_t>(problem.heads)] +=
        d_out_norm[row] * longest_v * over_keys;
  }
  for (const std::vector<double>& dv : column.dv) {
    std::vector<double> k_error, v_error;
    for (size_t at = 0; at < dv.size(); at += static_cast<size_t>(d)) {
      k_error.push_back(scale * longest_v *
                        (dv[at] * (e + 2 * lambda * rows * kUnit) + lost * largest(q_norm)));
      v_error.push_back(dv[at + 1] * (2 * tau + lambda * rows * kUnit + unit) + lost);
    }
    judgement.dk_error.push_back(std::move(k_error));
    judgement.dv_error.push_back(std::move(v_error));
  }
  judgement.dq = std::move(right.dq), judgement.dk = std::move(right.dk), judgement.dv = std::move(right.dv);
  judgement.d_bias = std::move(right.d_bias);
  return judgement;
}

void expect_right(const AttentionProblem& problem, const GradientAnswer& answer,
                  const GradientJudgement& right) {
  SCOPED_TRACE(problem.text());
  expect_rows(answer.dq, right.dq, right.dq_error, problem.head_dim, "dq");
  for (size_t b = 0; b < right.dk.size(); ++b) {
    expect_rows(answer.dk[b], right.dk[b], right.dk_error[b], problem.head_dim,
                "dk of band " + std::to_string(b));
    expect_rows(answer.dv[b], right.dv[b], right.dv_error[b], problem.head_dim,
                "dv of band " + std::to_string(b));
  }
  expect_rows(answer.d_bias, right.d_bias, right.d_bias_error, 1, "d_landmark_bias");
}

}  // namespace longhalo::testing
