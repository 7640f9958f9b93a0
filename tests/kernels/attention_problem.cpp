#include "attention_problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/text.hpp"

namespace longhalo::testing {
namespace {

template <class T>
void describe(const AttentionProblem& problem, Attention<T>& a) {
  a.heads = problem.heads, a.kv_heads = problem.kv_heads, a.head_dim = problem.head_dim;
  a.scale = static_cast<T>(problem.scale());
  a.queries = problem.queries, a.first_query = problem.first_query;
  a.doc_start = problem.doc_start.empty() ? nullptr : problem.doc_start.data();
}

double largest_norm(const std::vector<float>& x, int64_t d) {
  double largest = 0;
  for (size_t at = 0; at < x.size(); at += static_cast<size_t>(d)) {
    double squares = 0;
    for (size_t c = at; c < at + static_cast<size_t>(d); ++c)
      squares += static_cast<double>(x[c]) * x[c];
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

int64_t pick(std::mt19937& random, const std::vector<int64_t>& from) {
  return from[random() % from.size()];
}

// Documents of odd lengths, some of one token, from a start at or before the first query.
std::vector<int64_t> documents(std::mt19937& random, int64_t first_query, int64_t n) {
  std::vector<int64_t> starts;
  int64_t start = std::max<int64_t>(0, first_query - static_cast<int64_t>(random() % 40));
  int64_t next = first_query + 1 + static_cast<int64_t>(random() % 20);
  for (int64_t i = first_query; i < first_query + n; ++i) {
    if (i == next) {
      start = i;
      next = i + (random() % 3 == 0 ? 1 : 1 + static_cast<int64_t>(random() % 60));
    }
    starts.push_back(start);
  }
  return starts;
}

}  // namespace

std::string AttentionProblem::text() const {
  std::string words =
      longhalo::text("H ", heads, " H_kv ", kv_heads, " d ", head_dim, " n ", queries, " first_query ",
                     first_query, doc_start.empty() ? "" : " packed", landmark_bias.empty() ? "" : " bias",
                     units == QueryUnits::kExponents ? " q in exponents" : "");
  for (const OwnedBand& b : bands)
    words += longhalo::text(" {", b.band.stride, ", ", b.band.near, ", ", b.band.far, "} keys [", b.first_key,
                            ", ", b.first_key + b.count, ")");
  return words;
}

AttentionAnswer run_kernel(const AttentionProblem& problem) {
  Attention<float> a;
  describe(problem, a);
  std::vector<BandKeys<float>> keys;
  for (const OwnedBand& b : problem.bands)
    keys.push_back({b.band, b.k.data(), b.v.data(), b.first_key, b.count});
  constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  AttentionAnswer answer{std::vector<float>(problem.q.size(), kPoison),
                         std::vector<float>(static_cast<size_t>(problem.heads * problem.queries), kPoison)};
  a.q = problem.q.data(), a.bands = keys;
  a.landmark_bias = problem.landmark_bias.empty() ? nullptr : problem.landmark_bias.data();
  a.out = answer.out.data(), a.lse = answer.lse.data();
  attention_forward(a);
  return answer;
}

Judgement judge(const AttentionProblem& problem) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.queries));
  std::iota(rows.begin(), rows.end(), 0);
  return judge(problem, rows);
}

Judgement judge(const AttentionProblem& problem, const std::vector<int64_t>& rows) {
  const std::vector<double> q = upcast(problem.q), bias = upcast(problem.landmark_bias);
  std::vector<std::vector<double>> k, v, magnitude;
  double longest_key = 0, all_keys = 0;
  for (const OwnedBand& b : problem.bands) {
    k.push_back(upcast(b.k));
    v.push_back(upcast(b.v));
    longest_key = std::max(longest_key, largest_norm(b.k, problem.head_dim));
    all_keys += static_cast<double>(b.count);
  }
  magnitude = v;
  for (auto& band : magnitude)
    for (double& x : band)
      x = std::abs(x);
  const auto count = static_cast<int64_t>(rows.size()), width = problem.heads * problem.head_dim;
  Judgement right;
  right.out.resize(static_cast<size_t>(count * width)), right.weighed.resize(right.out.size());
  right.lse.resize(static_cast<size_t>(problem.heads * count));
  for (auto [values, out] : {std::pair{&v, &right.out}, std::pair{&magnitude, &right.weighed}}) {
    std::vector<BandKeys<double>> keys;
    for (size_t b = 0; b < problem.bands.size(); ++b)
      keys.push_back({problem.bands[b].band, k[b].data(), (*values)[b].data(), problem.bands[b].first_key,
                      problem.bands[b].count});
    double* const to = out->data();
#pragma omp parallel for schedule(dynamic)
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = rows[static_cast<size_t>(r)];
      std::vector<double> lse(static_cast<size_t>(problem.heads));
      Attention<double> a;
      describe(problem, a);
      a.queries = 1, a.first_query = problem.first_query + row;
      if (a.doc_start != nullptr) a.doc_start += row;
      a.q = q.data() + row * width, a.landmark_bias = bias.empty() ? nullptr : bias.data();
      a.bands = keys, a.out = to + r * width, a.lse = lse.data();
      attention_reference(a);
      for (int64_t h = 0; h < problem.heads; ++h)
        right.lse[static_cast<size_t>(h * count + r)] = lse[static_cast<size_t>(h)];
    }
  }

  // What fp32 may change, to first order, with u = 2^-24 and rounding errors that add up like a random walk
  // (Higham and Mary, "A new approach to probabilistic rounding error analysis", SISC 2019: a sum of m terms
  // errs by at most lambda sqrt(m) u times the sum of magnitudes with a probability that lambda = 4 puts
  // beyond doubt):
  //   a score, a product of d terms, scaled and shifted with 4 roundings more: lambda (sqrt(d) + 4) u A,
  //   where A = scale * max |q| * max |k| bounds its sum of magnitudes (and A + |bias| the score). An error
  //   of the score is a relative error of its weight; the exponential (4 u), the running rescale and the
  //   division: 8 u; sums of weights, and of weights times values, over L keys: lambda sqrt(L) u.
  // The error of a row of out is relative to sum softmax * |v|, that of lse is absolute.
  const double lambda = 4;
  double scores = problem.scale() * largest_norm(problem.q, problem.head_dim) * longest_key;
  double shift = 0;
  for (float x : problem.landmark_bias)
    shift = std::max(shift, static_cast<double>(std::abs(x)));
  right.tolerance = lambda * kUnit *
                    ((std::sqrt(static_cast<double>(problem.head_dim)) + 4) * (scores + shift) + 8 +
                     std::sqrt(all_keys + 1));
  return right;
}

void expect_right(const AttentionProblem& problem, const AttentionAnswer& answer) {
  const Judgement right = judge(problem);
  const int64_t d = problem.head_dim;
  for (int64_t row = 0; row < problem.queries; ++row) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      const double lse = right.lse[static_cast<size_t>(h * problem.queries + row)];
      const float got = answer.lse[static_cast<size_t>(h * problem.queries + row)];
      double error = 0, size = 0;
      for (int64_t c = 0; c < d; ++c) {
        const auto at = static_cast<size_t>((row * problem.heads + h) * d + c);
        error += std::pow(answer.out[at] - right.out[at], 2);
        size += std::pow(right.weighed[at], 2);
      }
      const bool blind = lse == -std::numeric_limits<double>::infinity();
      const bool lse_right = blind ? got == lse : std::abs(got - lse) <= right.tolerance;
      const bool out_right =
          std::sqrt(error) <= right.tolerance * std::sqrt(size);  // false for NaN; 0 where blind
      if (lse_right && out_right) continue;
      ADD_FAILURE() << problem.text() << "\nrow " << row << " head " << h << ": out errs by "
                    << std::sqrt(error) / std::sqrt(size) << ", lse " << got << " instead of " << lse
                    << "; rounding explains " << right.tolerance;
      return;
    }
  }
}

void fill(AttentionProblem& problem, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill_one = [&](std::vector<float>& x, int64_t count) {
    x.resize(static_cast<size_t>(count));
    for (float& value : x)
      value = normal(random);
  };
  fill_one(problem.q, problem.queries * problem.heads * problem.head_dim);
  for (float& value : problem.q)
    value *= problem.query_factor();
  for (OwnedBand& b : problem.bands) {
    fill_one(b.k, b.count * problem.kv_heads * problem.head_dim);
    fill_one(b.v, b.count * problem.kv_heads * problem.head_dim);
  }
}

void add_band(AttentionProblem& problem, const Band& band, int64_t first_key, int64_t count) {
  problem.bands.push_back({band, first_key, count, {}, {}});
}

void add_band_of_history(AttentionProblem& problem, const Band& band, int64_t missing_in_front,
                         int64_t missing_behind) {
  const int64_t oldest = band.far > problem.first_query ? 0 : problem.first_query - band.far + 1;
  const int64_t first = oldest / band.stride + missing_in_front;
  const int64_t end = (problem.last_query() + 1) / band.stride - missing_behind;
  add_band(problem, band, first, std::max<int64_t>(0, end - first));
}

AttentionProblem random_problem(unsigned seed) {
  std::mt19937 random(seed);
  AttentionProblem p;
  const int64_t group = 1 + static_cast<int64_t>(random() % 8);
  p.head_dim = pick(random, {8, 16, 40, 64, 64, 80, 96, 128});
  p.kv_heads = pick(random, {1, 1, 2, 3});
  p.heads = group * p.kv_heads;
  p.queries = pick(random, {1, 2, 3, 8, 9, 31, 47, 64, 97, 127, 128, 129});
  p.first_query = pick(random, {0, 0, 1, 63, 95, 96, 97, 200, 10'000'000});
  const int64_t window = pick(random, {1, 2, 7, 32, 95, 96, 97, 128});
  const int64_t stride = pick(random, {2, 3, 8, 16, 32});
  // At a huge position an unlimited band would have millions of keys; a far one stands for it.
  const int64_t unlimited = p.first_query > 1000 ? stride * 50 + window : kUnlimited;
  const std::vector<std::vector<Band>> choices{
      {{1, 0, window}},
      {{1, 0, p.first_query > 1000 ? 300 : kUnlimited}},
      {{1, 0, window}, {stride, window, unlimited}},
      {{stride, 0, unlimited}},
      {{1, 0, window}, {stride, window + 5, window + 5 * stride}},
      {{1, 3, 3 + window}, {2, window, 3 * window}, {stride, 2 * window, unlimited}},
      {{1, 0, window},
       {2, window, 2 * window + 2},
       {4, 2 * window, 4 * window + 4},
       {stride, 4 * window, unlimited}},
      {{1, 7, 7}, {stride, 2 * window, unlimited}}};
  for (const Band& band : choices[random() % choices.size()])
    add_band_of_history(p, band, pick(random, {0, 0, 0, 1, 5}), pick(random, {0, 0, 0, 1, 3}));
  if (random() % 4 == 0) p.bands.back().count = 0;
  if (random() % 3 == 0) p.doc_start = documents(random, p.first_query, p.queries);
  if (random() % 2 == 0) {
    p.landmark_bias.resize(static_cast<size_t>(p.heads));
    for (float& x : p.landmark_bias)
      x = -3.0F + static_cast<float>(random() % 100) / 50.0F;
  }
  fill(p, seed + 1000);
  return p;
}

}  // namespace longhalo::testing
