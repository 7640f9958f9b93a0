// Attention problems for the tests: owned fp32 inputs, their fp64 copies, and the fp64 reference's answer
// with the error that fp32 may make.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "numbers.hpp"

namespace longhalo::testing {

struct OwnedBand {
  Band band;
  int64_t first_key = 0;
  int64_t count = 0;
  std::vector<float> k, v;
};

/// What fill() multiplies normal queries with, and the scale that goes with it: 1 and d^-1/2, or
/// exponent_factor(d) and kExponentScale.
enum class QueryUnits { kPlain, kExponents };

struct AttentionProblem {
  int64_t heads = 1, kv_heads = 1, head_dim = 8, queries = 1, first_query = 0;
  std::vector<OwnedBand> bands;
  std::vector<float> q, landmark_bias;  // an empty bias is not given
  std::vector<int64_t> doc_start;       // empty: not given
  QueryUnits units = QueryUnits::kPlain;
  float scale() const {
    return units == QueryUnits::kExponents ? kExponentScale : 1.0F / std::sqrt(static_cast<float>(head_dim));
  }
  float query_factor() const { return units == QueryUnits::kExponents ? exponent_factor(head_dim) : 1.0F; }
  int64_t last_query() const { return first_query + queries - 1; }
  std::string text() const;
};

struct AttentionAnswer {
  std::vector<float> out, lse;
};

/// The kernel's answer; the outputs are NaN before it runs.
AttentionAnswer run_kernel(const AttentionProblem& problem);

/// The same in fp64, and what rounding may change.
struct Judgement {
  std::vector<double> out, lse;
  std::vector<double> weighed;  // [n, H, d] sum of softmax * |v|: what a row's error is measured against
  double tolerance = 0;         // relative, for each row in the 2-norm; absolute for lse
};
Judgement judge(const AttentionProblem& problem);
/// Of these rows of q alone: out and weighed are [rows, H, d], lse is [H, rows]. Uses all OpenMP threads.
Judgement judge(const AttentionProblem& problem, const std::vector<int64_t>& rows);

/// Adds GoogleTest failures for rows of `answer` that rounding does not explain, with the problem's text.
void expect_right(const AttentionProblem& problem, const AttentionAnswer& answer);

/// Fills q, the keys and the values with normal numbers; q's are multiplied with query_factor().
void fill(AttentionProblem& problem, unsigned seed);

/// Gives the problem a band with keys [first_key, first_key + count) (numbers by fill()).
void add_band(AttentionProblem& problem, const Band& band, int64_t first_key, int64_t count);

/// The band with every key that any query can see, a few of them missing at both ends when `halo` asks for
/// it.
void add_band_of_history(AttentionProblem& problem, const Band& band, int64_t missing_in_front = 0,
                         int64_t missing_behind = 0);

/// Every feature drawn at random: shapes, bands (with gaps, strided from distance 0, of finite reach, empty
/// ones), key arrays that begin late and end early, packed documents, queries far into a document.
AttentionProblem random_problem(unsigned seed);

}  // namespace longhalo::testing
