// The fp64 reference, and the fp32 kernel, on the cases of data/attention_cases.h5, whose answers come from
// the definition in numpy.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention_problem.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/rotary/rotary.hpp"
#include "stored_cases.hpp"

namespace longhalo::testing {
namespace {

TEST(Cases, ReferenceAttentionAgrees) {
  const StoredCases file("attention_cases.h5");
  ASSERT_GE(file.names().size(), 10U);
  for (const std::string& name : file.names()) {
    const StoredCases::Array q = file.read(name + "/q_rotated"), out = file.read(name + "/out"),
                             lse = file.read(name + "/lse");
    const std::vector<int64_t> bands = file.read_whole_numbers(name + "/bands");
    std::vector<StoredCases::Array> k, v;
    for (size_t b = 0; b < bands.size() / 3; ++b) {
      k.push_back(file.read(name + "/band" + std::to_string(b) + "/k"));
      v.push_back(file.read(name + "/band" + std::to_string(b) + "/v"));
    }
    std::vector<BandKeys<double>> keys;
    for (size_t b = 0; b < k.size(); ++b)
      keys.push_back({{bands[3 * b], bands[3 * b + 1], bands[3 * b + 2]},
                      k[b].values.data(),
                      v[b].values.data(),
                      0,
                      k[b].side(0)});
    Attention<double> p;
    p.queries = q.side(0), p.heads = q.side(1), p.head_dim = q.side(2), p.kv_heads = k[0].side(1);
    p.scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
    std::vector<double> bias, got(q.values.size()), got_lse(lse.values.size());
    std::vector<int64_t> doc_start;
    if (file.has(name + "/landmark_bias")) bias = file.read(name + "/landmark_bias").values;
    if (file.has(name + "/doc_start")) doc_start = file.read_whole_numbers(name + "/doc_start");
    p.q = q.values.data(), p.bands = keys, p.out = got.data(), p.lse = got_lse.data();
    p.landmark_bias = bias.empty() ? nullptr : bias.data();
    p.doc_start = doc_start.empty() ? nullptr : doc_start.data();
    attention_reference(p);
    expect_same(got, out.values, name + " out");
    expect_same(got_lse, lse.values, name + " lse");

    AttentionProblem fp32;
    fp32.heads = p.heads, fp32.kv_heads = p.kv_heads, fp32.head_dim = p.head_dim, fp32.queries = p.queries;
    fp32.q = downcast(q.values), fp32.landmark_bias = downcast(bias), fp32.doc_start = doc_start;
    for (size_t b = 0; b < k.size(); ++b)
      fp32.bands.push_back({keys[b].band, 0, keys[b].count, downcast(k[b].values), downcast(v[b].values)});
    expect_right(fp32, run_kernel(fp32));
    if (HasFailure()) return;
  }
}

TEST(Cases, ReferenceRotaryAndPoolingAgree) {
  const StoredCases file("attention_cases.h5");
  ASSERT_GE(file.names().size(), 10U);
  for (const std::string& name : file.names()) {
    StoredCases::Array q = file.read(name + "/q");
    const StoredCases::Array k = file.read(name + "/k"), v = file.read(name + "/v");
    const int64_t n = q.side(0), heads = q.side(1), d = q.side(2), kv_heads = k.side(1);
    const std::vector<double> frequencies = rotary_frequencies(d, file.theta(name));
    rotary_reference(n, heads, d, frequencies, 0, 1, q.values.data());
    expect_same(q.values, file.read(name + "/q_rotated").values, name + " rotated q");

    const std::vector<int64_t> bands = file.read_whole_numbers(name + "/bands");
    std::vector<double> queries;
    if (file.has(name + "/landmark_query")) queries = file.read(name + "/landmark_query").values;
    for (size_t b = 0; b < bands.size() / 3; ++b) {
      const std::string band = name + "/band" + std::to_string(b);
      const StoredCases::Array right_k = file.read(band + "/k"), right_v = file.read(band + "/v");
      const int64_t stride = bands[3 * b];
      std::vector<double> got_k = k.values, got_v = v.values;
      double centre = 0;
      if (stride > 1) {
        const int64_t row = kv_heads * d;
        got_k.resize(static_cast<size_t>(n / stride * row));
        got_v.resize(got_k.size());
        const double* u =
            queries.empty() || b == 0 ? nullptr : queries.data() + (static_cast<int64_t>(b) - 1) * row;
        landmark_pool_reference(n, kv_heads, d, stride, u, k.values.data(), v.values.data(), got_k.data(),
                                got_v.data());
        centre = static_cast<double>(stride - 1) / 2;
      }
      rotary_reference(right_k.side(0), kv_heads, d, frequencies, centre, static_cast<double>(stride),
                       got_k.data());
      expect_same(got_k, right_k.values, band + " keys");
      expect_same(got_v, right_v.values, band + " values");
    }
  }
}

}  // namespace
}  // namespace longhalo::testing
