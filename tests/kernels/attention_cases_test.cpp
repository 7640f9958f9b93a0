// The fp64 reference, and the fp32 kernel, on the cases of data/attention_cases.h5, whose answers come from
// the definition in numpy (data/README.md lists the datasets).
#include <gtest/gtest.h>
#include <hdf5.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention_problem.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo::testing {
namespace {

const std::string kPath = std::string(LONGHALO_SOURCE_DIR) + "/data/attention_cases.h5";

class Cases : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = H5Fopen(kPath.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
    ASSERT_GE(file_, 0) << kPath;
    H5G_info_t info;
    ASSERT_GE(H5Gget_info(file_, &info), 0);
    for (hsize_t g = 0; g < info.nlinks; ++g) {
      char name[128];
      ASSERT_GT(
          H5Lget_name_by_idx(file_, ".", H5_INDEX_NAME, H5_ITER_INC, g, name, sizeof(name), H5P_DEFAULT), 0);
      names_.emplace_back(name);
    }
    ASSERT_GE(names_.size(), 10U);
  }
  void TearDown() override {
    if (file_ >= 0) {
      EXPECT_GE(H5Fclose(file_), 0);
    }
  }

  bool has(const std::string& name) { return H5Lexists(file_, name.c_str(), H5P_DEFAULT) > 0; }

  struct Array {
    std::vector<hsize_t> shape;
    std::vector<double> values;
    int64_t side(size_t axis) const { return static_cast<int64_t>(shape[axis]); }
  };
  Array read(const std::string& name) {
    Array array;
    array.shape = shape(name);
    array.values.resize(count(array.shape));
    read_into(name, H5T_NATIVE_DOUBLE, array.values.data());
    return array;
  }
  std::vector<int64_t> read_whole_numbers(const std::string& name) {
    std::vector<int64_t> values(count(shape(name)));
    read_into(name, H5T_NATIVE_INT64, values.data());
    return values;
  }
  double theta(const std::string& group) {
    double value = 0;
    const hid_t attribute = H5Aopen_by_name(file_, group.c_str(), "theta", H5P_DEFAULT, H5P_DEFAULT);
    EXPECT_GE(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), 0) << group;
    EXPECT_GE(H5Aclose(attribute), 0);
    return value;
  }

  std::vector<std::string> names_;

 private:
  static size_t count(const std::vector<hsize_t>& shape) {
    size_t product = 1;
    for (hsize_t side : shape)
      product *= side;
    return product;
  }
  std::vector<hsize_t> shape(const std::string& name) {
    const hid_t dataset = H5Dopen2(file_, name.c_str(), H5P_DEFAULT);
    const hid_t space = H5Dget_space(dataset);
    std::vector<hsize_t> sides(static_cast<size_t>(std::max(0, H5Sget_simple_extent_ndims(space))));
    EXPECT_GE(H5Sget_simple_extent_dims(space, sides.data(), nullptr), 0) << name;
    EXPECT_GE(H5Sclose(space), 0);
    EXPECT_GE(H5Dclose(dataset), 0);
    return sides;
  }
  void read_into(const std::string& name, hid_t type, void* to) {
    const hid_t dataset = H5Dopen2(file_, name.c_str(), H5P_DEFAULT);
    EXPECT_GE(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, to), 0) << name;
    EXPECT_GE(H5Dclose(dataset), 0);
  }

  hid_t file_ = -1;
};

std::vector<float> downcast(const std::vector<double>& x) {
  return {x.begin(), x.end()};
}

// Both sides are fp64 and sum the same few hundred terms in other orders: 1e-12 is thousands of roundings.
constexpr double kDouble = 1e-12;

void expect_same(const std::vector<double>& got, const std::vector<double>& right, const std::string& what) {
  ASSERT_EQ(got.size(), right.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == right[i]) continue;  // -infinity too
    ASSERT_LE(std::abs(got[i] - right[i]), kDouble * (1 + std::abs(right[i]))) << what << " element " << i;
  }
}

TEST_F(Cases, ReferenceAttentionAgrees) {
  for (const std::string& name : names_) {
    const Array q = read(name + "/q_rotated"), out = read(name + "/out"), lse = read(name + "/lse");
    const std::vector<int64_t> bands = read_whole_numbers(name + "/bands");
    std::vector<Array> k, v;
    for (size_t b = 0; b < bands.size() / 3; ++b) {
      k.push_back(read(name + "/band" + std::to_string(b) + "/k"));
      v.push_back(read(name + "/band" + std::to_string(b) + "/v"));
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
    if (has(name + "/landmark_bias")) bias = read(name + "/landmark_bias").values;
    if (has(name + "/doc_start")) doc_start = read_whole_numbers(name + "/doc_start");
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

TEST_F(Cases, ReferenceRotaryAndPoolingAgree) {
  for (const std::string& name : names_) {
    Array q = read(name + "/q");
    const Array k = read(name + "/k"), v = read(name + "/v");
    const int64_t n = q.side(0), heads = q.side(1), d = q.side(2), kv_heads = k.side(1);
    const std::vector<double> frequencies = rotary_frequencies(d, theta(name));
    rotary_reference(n, heads, d, frequencies, 0, 1, q.values.data());
    expect_same(q.values, read(name + "/q_rotated").values, name + " rotated q");

    const std::vector<int64_t> bands = read_whole_numbers(name + "/bands");
    std::vector<double> queries;
    if (has(name + "/landmark_query")) queries = read(name + "/landmark_query").values;
    for (size_t b = 0; b < bands.size() / 3; ++b) {
      const std::string band = name + "/band" + std::to_string(b);
      const Array right_k = read(band + "/k"), right_v = read(band + "/v");
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
