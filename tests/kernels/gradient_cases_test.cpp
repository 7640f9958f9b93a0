// The whole way back from attention's output to q, k, v, landmark query and bias, through attention, rotary
// embedding and pooling, against what torch's autograd makes of the definition (data/gradient_cases.h5).
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention/attention_backward.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/rotary/rotary.hpp"
#include "stored_cases.hpp"

namespace longhalo::testing {
namespace {

template <class T>
struct Gradients {
  std::vector<T> q, k, v, landmark_query, landmark_bias;
};

// One of the stored problems, in fp64 for the references or in fp32 for the kernels.
template <class T>
class Problem {
 public:
  Problem(const StoredCases& cases, const StoredCases& gradients, const std::string& name)
      : d_out_(numbers(gradients, name + "/d_out")), k_(numbers(cases, name + "/k")) {
    v_ = numbers(cases, name + "/v");
    const auto q = cases.read(name + "/q_rotated");
    q_ = {q.values.begin(), q.values.end()};
    p_.queries = q.side(0), p_.heads = q.side(1), p_.head_dim = q.side(2);
    p_.kv_heads = cases.read(name + "/k").side(1);
    p_.scale = static_cast<T>(1 / std::sqrt(static_cast<double>(p_.head_dim)));
    frequencies_ = rotary_frequencies(p_.head_dim, cases.theta(name));
    const std::vector<int64_t> bands = cases.read_whole_numbers(name + "/bands");
    query_.resize((bands.size() / 3 - 1) * static_cast<size_t>(row()));
    if (cases.has(name + "/landmark_query")) query_ = numbers(cases, name + "/landmark_query");
    bias_.resize(static_cast<size_t>(p_.heads));
    if (cases.has(name + "/landmark_bias")) bias_ = numbers(cases, name + "/landmark_bias");
    if (cases.has(name + "/doc_start")) doc_start_ = cases.read_whole_numbers(name + "/doc_start");
    for (size_t b = 0; b < bands.size() / 3; ++b) {
      const std::string band = name + "/band" + std::to_string(b);
      band_k_.push_back(numbers(cases, band + "/k"));
      band_v_.push_back(numbers(cases, band + "/v"));
      keys_.push_back({{bands[3 * b], bands[3 * b + 1], bands[3 * b + 2]},
                       band_k_[b].data(),
                       band_v_[b].data(),
                       0,
                       static_cast<int64_t>(band_k_[b].size()) / row()});
    }
    out_.resize(q_.size());
    lse_.resize(static_cast<size_t>(p_.heads * p_.queries));
    p_.q = q_.data(), p_.bands = keys_, p_.landmark_bias = bias_.data();
    p_.doc_start = doc_start_.empty() ? nullptr : doc_start_.data();
    p_.out = out_.data(), p_.lse = lse_.data();
  }

  Gradients<T> gradients() {
    Gradients<T> d;
    d.q.resize(q_.size()), d.k.resize(k_.size()), d.v.resize(v_.size());
    d.landmark_query.resize(query_.size()), d.landmark_bias.resize(bias_.size());
    std::vector<std::vector<T>> dk, dv;
    std::vector<BandGradient<T>> d_bands;
    for (size_t b = 0; b < keys_.size(); ++b)
      dk.emplace_back(band_k_[b].size()), dv.emplace_back(band_v_[b].size());
    for (size_t b = 0; b < keys_.size(); ++b)
      d_bands.push_back({dk[b].data(), dv[b].data()});
    AttentionGradient<T> back;
    back.forward = p_, back.d_out = d_out_.data(), back.dq = d.q.data(), back.d_bands = d_bands;
    back.d_landmark_bias = d.landmark_bias.data();
    attention(back);
    turn_back(p_.queries, p_.heads, 0, 1, d.q);
    for (size_t b = 0; b < keys_.size(); ++b) {
      const int64_t stride = keys_[b].band.stride;
      turn_back(keys_[b].count, p_.kv_heads, static_cast<double>(stride - 1) / 2, stride, dk[b]);
      if (stride > 1) {
        const size_t at = (b - 1) * static_cast<size_t>(row());
        pool(stride, query_.data() + at, dk[b], dv[b], d, d.landmark_query.data() + at);
        continue;
      }
      for (size_t i = 0; i < k_.size(); ++i)
        d.k[i] += dk[b][i], d.v[i] += dv[b][i];
    }
    return d;
  }

 private:
  static std::vector<T> numbers(const StoredCases& file, const std::string& name) {
    const std::vector<double> values = file.read(name).values;
    return {values.begin(), values.end()};
  }
  int64_t row() const { return p_.kv_heads * p_.head_dim; }

  static void attention(const AttentionGradient<double>& back) { attention_backward_reference(back); }
  static void attention(const AttentionGradient<float>& back) {
    attention_forward(back.forward);
    attention_backward(back);
  }
  void turn_back(int64_t n, int64_t heads, double first, int64_t step, std::vector<double>& x) const {
    rotary_reference(n, heads, p_.head_dim, frequencies_, first, static_cast<double>(step), x.data(),
                     RotaryDirection::kBackward);
  }
  void turn_back(int64_t n, int64_t heads, double first, int64_t step, std::vector<float>& x) const {
    rotary(n, heads, p_.head_dim, frequencies_, first, static_cast<double>(step), x.data(),
           RotaryDirection::kBackward);
  }
  void pool(int64_t stride, const double* query, const std::vector<double>& d_kbar,
            const std::vector<double>& d_vbar, Gradients<double>& d, double* d_query) const {
    landmark_pool_backward_reference(p_.queries, p_.kv_heads, p_.head_dim, stride, query, k_.data(),
                                     v_.data(), d_kbar.data(), d_vbar.data(), d.k.data(), d.v.data(),
                                     d_query);
  }
  void pool(int64_t stride, const float* query, const std::vector<float>& d_kbar,
            const std::vector<float>& d_vbar, Gradients<float>& d, float* d_query) const {
    landmark_pool_backward({p_.kv_heads, p_.head_dim, stride, query}, p_.queries, k_.data(), v_.data(),
                           d_kbar.data(), d_vbar.data(), d.k.data(), d.v.data(), d_query);
  }

  Attention<T> p_;
  std::vector<T> d_out_, k_, v_, q_, query_, bias_, out_, lse_;
  std::vector<int64_t> doc_start_;
  std::vector<double> frequencies_;
  std::vector<std::vector<T>> band_k_, band_v_;
  std::vector<BandKeys<T>> keys_;
};

// What fp32 gradients have to keep, as a whole array in the 2-norm. A wrong term is of order 1.
constexpr double kFloat = 1e-4;

void expect_near(const std::vector<float>& got, const std::vector<double>& right, const std::string& what) {
  ASSERT_EQ(got.size(), right.size()) << what;
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(got[i] - right[i], 2);
    size += std::pow(right[i], 2);
  }
  EXPECT_LE(std::sqrt(error), kFloat * std::sqrt(size)) << what;
}

TEST(GradientCases, AreThoseOfAutograd) {
  const StoredCases cases("attention_cases.h5"), gradients("gradient_cases.h5");
  ASSERT_GE(gradients.names().size(), 6U);
  for (const std::string& name : gradients.names()) {
    const Gradients<double> exact = Problem<double>(cases, gradients, name).gradients();
    const Gradients<float> fp32 = Problem<float>(cases, gradients, name).gradients();
    const auto compare = [&](const char* what, const std::vector<double>& got,
                             const std::vector<float>& got_fp32) {
      const std::string place = name + "/" + what;
      const std::vector<double> right = gradients.read(place).values;
      expect_same(got, right, place);
      expect_near(got_fp32, right, place + " in fp32");
    };
    compare("d_q", exact.q, fp32.q);
    compare("d_k", exact.k, fp32.k);
    compare("d_v", exact.v, fp32.v);
    compare("d_landmark_query", exact.landmark_query, fp32.landmark_query);
    compare("d_landmark_bias", exact.landmark_bias, fp32.landmark_bias);
  }
}

}  // namespace
}  // namespace longhalo::testing
