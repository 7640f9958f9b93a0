// Keys and values on their way to attention: rotated keys, landmarks and open segments of prefill and of
// decode, against the fp64 definitions and against the CPU's pooling fed in the same portions.
#include "kernels/landmark_pool/rotate_and_pool.hpp"

#include <memory>

#include "gpu_test.hpp"
#include "guarded.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/rotary/rotary.hpp"

namespace longhalo::testing {
namespace {

enum class Query { kMean, kLearned, kMixed };  // kMixed: every second band has a learned query

struct Case {
  int64_t n, first_token, kv_heads, head_dim;
  std::vector<int64_t> strides;
  Query query;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "n " << c.n << " from " << c.first_token << ", H_kv " << c.kv_heads << ", d " << c.head_dim
      << ", strides";
  for (int64_t stride : c.strides)
    out << ' ' << stride;
  return out << ", query " << static_cast<int>(c.query);
}

// first_token is a multiple of every stride.
const std::vector<Case> kPrefills{
    {1, 0, 1, 64, {1}, Query::kLearned},
    {5, 0, 2, 16, {1}, Query::kMean},
    {0, 600, 2, 64, {300}, Query::kMean},
    {129, 0, 3, 64, {16}, Query::kMean},
    {127, 0, 5, 128, {128}, Query::kLearned},
    {1000, 9'999'900, 8, 128, {300}, Query::kMean},
    {1000, 9'999'900, 8, 128, {300}, Query::kLearned},
    {4099, 9'998'336, 8, 128, {2048}, Query::kMean},
    {4099, 9'998'336, 2, 64, {2048}, Query::kLearned},
    {999, 0, 1, 256, {333}, Query::kMean},
    {1201, 6 * 7 * 300, 2, 128, {300, 7}, Query::kMixed},
    {2500, 0, 4, 64, {2048, 64, 48, 1}, Query::kMixed},
    {700, 0, 40, 32, {257}, Query::kLearned},
    {700, 0, 33, 128, {64}, Query::kMean},  // more heads than a block takes
    {333, 0, 17, 128, {64}, Query::kLearned},
    {300, 0, 2, 64, {100'000}, Query::kMean},  // nothing completes
    {24'700, 0, 1, 16, {3}, Query::kLearned},  // more pieces than the workspace holds at once
    {3, 12, 2, 64, {}, Query::kMean},          // no band: rotation alone
};

struct Sequence {
  explicit Sequence(const Case& c)
      : kv(normal_bf16(c.n * 2 * c.kv_heads * c.head_dim, 1)),
        frequencies(rotary_frequencies(c.head_dim, 500'000)) {
    for (size_t band = 0; band < c.strides.size(); ++band)
      queries.push_back(c.query == Query::kLearned || (c.query == Query::kMixed && band % 2 == 0)
                            ? normal_floats(c.kv_heads * c.head_dim, 2 + static_cast<unsigned>(band))
                            : std::vector<float>());
    const int64_t half_row = c.kv_heads * c.head_dim;
    for (int64_t i = 0; i < c.n; ++i)
      for (int64_t at = 0; at < 2 * half_row; ++at)
        (at < half_row ? k : v).push_back(to_float(kv[static_cast<size_t>(i * 2 * half_row + at)]));
  }
  std::vector<BFloat16> kv;                 // [n, 2, H_kv, d]
  std::vector<float> k, v;                  // [n, H_kv, d]
  std::vector<std::vector<float>> queries;  // a band's u, or empty
  std::vector<double> frequencies;
};

// Device memory of one call: landmark rows between guard zones, one row more than complete.
struct DeviceBand {
  DeviceBand(const Case& c, size_t band, const Sequence& sequence, cudaStream_t stream)
      : rows(c.n / c.strides[band]),
        landmarks((rows + 1) * 2 * c.kv_heads * c.head_dim, stream),
        open(pool_state_floats(c.kv_heads, c.head_dim), stream),
        query(to_device<float>(sequence.queries[band], "u", stream)),
        target{c.strides[band], query.data(), landmarks.data(), c.first_token / c.strides[band],
               open.data()} {}
  int64_t rows;
  Guarded<BFloat16> landmarks;
  Guarded<float> open;
  DeviceBuffer<float> query;
  PoolTarget target;
};

struct Prefilled {
  std::vector<BFloat16> kv;
  std::vector<std::vector<BFloat16>> landmarks;
  std::vector<std::vector<float>> open;
};

class RotateAndPoolTest : public GpuTest {
 protected:
  static Prefilled prefill(const Case& c, const Sequence& sequence) {
    Guarded<BFloat16> kv(c.n * 2 * c.kv_heads * c.head_dim, stream());
    kv.put(sequence.kv);
    std::vector<std::unique_ptr<DeviceBand>> bands;
    std::vector<PoolTarget> targets;
    for (size_t band = 0; band < c.strides.size(); ++band) {
      bands.push_back(std::make_unique<DeviceBand>(c, band, sequence, stream()));
      targets.push_back(bands.back()->target);
    }
    const auto frequencies = to_device<double>(sequence.frequencies, "frequencies", stream());
    const RotateAndPool keys{c.kv_heads, c.head_dim, frequencies.data(), targets};
    Guarded<uint8_t> workspace(rotate_and_pool_workspace(keys, c.n), stream());
    rotate_and_pool(stream(), keys, c.n, c.first_token, kv.data(), workspace.data());
    workspace.values();  // for its guards
    Prefilled result;
    result.kv = kv.values();
    for (const auto& band : bands)
      result.landmarks.push_back(band->landmarks.values()), result.open.push_back(band->open.values());
    return result;
  }
};

// Rounding of the fp32 work before the last rounding, as a multiple of the largest |x| that is averaged: a
// score is a sum of d products (the CPU's test has the bound), its exponential errs by 6 units of each unit
// of its size; a weighted sum of `stride` numbers, in lanes and pieces; the rotation adds 2^-22 + 8 units for
// both of a pair.
double pooling_error(const Case& c, const Sequence& s, size_t band) {
  const auto d = static_cast<double>(c.head_dim);
  double score = 0, longest_k = 0;
  if (!s.queries[band].empty()) {
    double squares = 0;
    for (float u : s.queries[band])
      squares += u * u;
    for (size_t at = 0; at < s.k.size(); at += static_cast<size_t>(c.head_dim)) {
      double of_key = 0;
      for (size_t i = at; i < at + static_cast<size_t>(c.head_dim); ++i)
        of_key += s.k[i] * s.k[i];
      longest_k = std::max(longest_k, of_key);
    }
    score = std::sqrt(squares * longest_k / d);
  }
  const auto tokens = static_cast<double>(std::min(c.strides[band], c.n));
  return kFp32Unit * (2 * (d + 8) * score + 2 * tokens + 64) + 2 * (0x1p-22 + 8 * kFp32Unit);
}

double largest_of(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (const auto* x : {&a, &b})
    for (float value : *x)
      largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

void expect_rotated(const Case& c, const Sequence& s, const std::vector<BFloat16>& got) {
  const int64_t half_row = c.kv_heads * c.head_dim, half = c.head_dim / 2;
  const auto before = doubles(s.kv);
  std::vector<double> right = before;
  for (int64_t i = 0; i < c.n; ++i)
    rotary_reference(1, c.kv_heads, c.head_dim, s.frequencies, static_cast<double>(c.first_token + i), 1,
                     right.data() + i * 2 * half_row);
  expect_near(got, right, kBf16Unit, [&](size_t at) {
    const int64_t column = static_cast<int64_t>(at) % (2 * half_row);
    if (column >= half_row) return -kBf16Unit * std::abs(right[at]);  // a value: not a bit may change
    const size_t other =
        column % c.head_dim < half ? at + static_cast<size_t>(half) : at - static_cast<size_t>(half);
    return (0x1p-22 + 8 * kFp32Unit) * (std::abs(before[at]) + std::abs(before[other]));
  });
}

void expect_landmarks(const Case& c, const Sequence& s, size_t band, const std::vector<BFloat16>& got) {
  const int64_t half_row = c.kv_heads * c.head_dim, stride = c.strides[band], rows = c.n / stride;
  const auto size = static_cast<size_t>(rows * half_row);
  std::vector<double> kbar(size), vbar(size), right;
  const auto u = doubles(s.queries[band]);
  landmark_pool_reference(c.n, c.kv_heads, c.head_dim, stride, u.empty() ? nullptr : u.data(),
                          doubles(s.k).data(), doubles(s.v).data(), kbar.data(), vbar.data());
  rotary_reference(rows, c.kv_heads, c.head_dim, s.frequencies,
                   static_cast<double>(c.first_token) + static_cast<double>(stride - 1) / 2,
                   static_cast<double>(stride), kbar.data());
  for (int64_t g = 0; g < rows; ++g) {
    right.insert(right.end(), kbar.begin() + g * half_row, kbar.begin() + (g + 1) * half_row);
    right.insert(right.end(), vbar.begin() + g * half_row, vbar.begin() + (g + 1) * half_row);
  }
  const double error = pooling_error(c, s, band) * largest_of(s.k, s.v);
  const auto written = static_cast<std::ptrdiff_t>(right.size());
  expect_near(std::vector<BFloat16>(got.begin(), got.begin() + written), right, kBf16Unit,
              [&](size_t) { return error; });
  for (auto at = got.begin() + written; at != got.end(); ++at)
    ASSERT_EQ(at->bits, 0xffff) << "a segment that is not complete has no landmark";
}

// `state` is the CPU's. Sums may be scaled to another maximum, so they are compared as weights relative to
// theirs.
void expect_open(const Case& c, const Sequence& s, size_t band, const LandmarkPoolState& state,
                 const std::vector<float>& got) {
  const auto heads = static_cast<size_t>(c.kv_heads), d = static_cast<size_t>(c.head_dim);
  const double error = 2 * pooling_error(c, s, band);  // the CPU's and the GPU's
  const double largest = largest_of(s.k, s.v);
  for (size_t h = 0; h < heads; ++h) {
    const double m = got[h], l = got[heads + h];
    if (state.tokens == 0) {
      ASSERT_EQ(got[h], state.m[h]);  // -infinity
      ASSERT_EQ(l, 0);
    } else {
      const double shrink = std::exp(static_cast<double>(state.m[h]) - m);
      ASSERT_NEAR(l, state.l[h] * shrink, error * state.l[h] * shrink);
      for (size_t i = 0; i < d; ++i) {
        const double bound = error * largest * state.l[h] * shrink;
        ASSERT_NEAR(got[2 * heads + h * d + i], state.k_sum[h * d + i] * shrink, bound);
        ASSERT_NEAR(got[2 * heads + (heads + h) * d + i], state.v_sum[h * d + i] * shrink, bound);
      }
      continue;
    }
    for (size_t i = 0; i < d; ++i) {
      ASSERT_EQ(got[2 * heads + h * d + i], 0);
      ASSERT_EQ(got[2 * heads + (heads + h) * d + i], 0);
    }
  }
}

// The CPU's pooling over tokens [0, n) in the given portions.
LandmarkPoolState cpu_state(const Case& c, const Sequence& s, size_t band,
                            const std::vector<int64_t>& portions) {
  const int64_t row = c.kv_heads * c.head_dim;
  const LandmarkPool pool{c.kv_heads, c.head_dim, c.strides[band],
                          s.queries[band].empty() ? nullptr : s.queries[band].data()};
  LandmarkPoolState state(c.kv_heads, c.head_dim);
  std::vector<float> kbar(static_cast<size_t>((c.n / c.strides[band] + 1) * row)), vbar = kbar;
  int64_t at = 0;
  for (int64_t portion : portions) {
    landmark_pool(pool, portion, s.k.data() + at * row, s.v.data() + at * row, state, kbar.data(),
                  vbar.data());
    at += portion;
  }
  return state;
}

TEST_F(RotateAndPoolTest, PrefillAgreesWithTheDefinitions) {
  for (const Case& c : kPrefills) {
    SCOPED_TRACE(::testing::Message() << c);
    const Sequence s(c);
    const Prefilled got = prefill(c, s);
    expect_rotated(c, s, got.kv);
    for (size_t band = 0; band < c.strides.size(); ++band) {
      expect_landmarks(c, s, band, got.landmarks[band]);
      expect_open(c, s, band, cpu_state(c, s, band, {c.n}), got.open[band]);
    }
    const Prefilled again = prefill(c, s);
    expect_same_bits(again.kv, got.kv);
    for (size_t band = 0; band < c.strides.size(); ++band) {
      expect_same_bits(again.landmarks[band], got.landmarks[band]);
      expect_same_bits(again.open[band], got.open[band]);
    }
  }
}

TEST_F(RotateAndPoolTest, WithoutAQueryWholeNumbersAreExact) {
  Case c{3 * 256 + 5, 512, 2, 64, {256}, Query::kMean};
  Sequence s(c);
  const int64_t half_row = c.kv_heads * c.head_dim;
  for (int64_t i = 0; i < c.n; ++i)
    for (int64_t at = 0; at < 2 * half_row; ++at)
      s.kv[static_cast<size_t>(i * 2 * half_row + at)] =
          to_bfloat16(static_cast<float>(i / 256 * 2 + i % 2 + at % 3));
  const Prefilled got = prefill(c, s);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t at = 0; at < half_row; ++at)
      ASSERT_EQ(to_float(got.landmarks[0][static_cast<size_t>((g * 2 + 1) * half_row + at)]),
                static_cast<float>(g * 2) + 0.5F + static_cast<float>((half_row + at) % 3));
}

TEST_F(RotateAndPoolTest, ALandmarkHasTheSameBitsWhereverACallBegins) {
  for (Query query : {Query::kMean, Query::kLearned}) {
    const Case whole{3 * 600 + 77, 0, 4, 128, {300, 200}, query};
    const Sequence s(whole);
    const Prefilled all = prefill(whole, s);
    const int64_t row = 2 * whole.kv_heads * whole.head_dim;
    Case part = whole;
    part.first_token = 600, part.n = whole.n - 600;
    Sequence rest = s;
    rest.kv.erase(rest.kv.begin(), rest.kv.begin() + 600 * row);
    const Prefilled later = prefill(part, rest);
    expect_same_bits(later.kv, std::vector<BFloat16>(all.kv.begin() + 600 * row, all.kv.end()));
    for (size_t band = 0; band < 2; ++band) {
      const int64_t before = 600 / whole.strides[band];
      expect_same_bits(
          later.landmarks[band],
          std::vector<BFloat16>(all.landmarks[band].begin() + before * row, all.landmarks[band].end()));
      expect_same_bits(later.open[band], all.open[band]);
    }
  }
}

struct Decode {
  Decode(Case whole, int64_t tokens_before, std::vector<int64_t> tokens_of_calls)
      : c(std::move(whole)), prefilled(tokens_before), portions(std::move(tokens_of_calls)) {}
  Case c;
  int64_t prefilled;              // tokens before the first append
  std::vector<int64_t> portions;  // together with `prefilled`: n
};

const std::vector<Decode> kDecodes{
    {{40, 0, 2, 64, {7}, Query::kLearned}, 10, std::vector<int64_t>(30, 1)},
    {{40, 0, 2, 64, {7, 1, 16}, Query::kMixed}, 3, {1, 1, 5, 30}},
    {{700, 0, 8, 128, {300}, Query::kMean}, 299, {1, 1, 299, 100}},
    {{4097, 0, 8, 128, {64, 2048}, Query::kMixed}, 2000, {8, 2088, 1}},
    {{130, 0, 33, 16, {33}, Query::kLearned}, 0, {1, 129}},
    {{50, 0, 1, 256, {48}, Query::kLearned}, 47, {1, 1, 1}},
    {{9, 0, 4, 64, {}, Query::kMean}, 4, {1, 4}},
};

enum class Replay { kLaunch, kGraph };  // kGraph: the portions of one token by one captured graph

class AppendKeys : public RotateAndPoolTest {
 protected:
  template <class Work>
  static cudaGraphExec_t capture(const Work& work) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
    work();
    check_cuda(cudaStreamEndCapture(stream(), &graph), "ending a capture");
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return executable;
  }

  static Prefilled run(const Decode& decode, const Sequence& s, Replay replay) {
    const Case& c = decode.c;
    const int64_t row = 2 * c.kv_heads * c.head_dim;
    const int64_t first_row = std::min<int64_t>(2, decode.prefilled);  // rows are a window on the sequence
    Guarded<BFloat16> rows((c.n - first_row) * row, stream()), new_kv(c.n * row, stream());
    Guarded<int64_t> position(1, stream());
    const auto frequencies = to_device<double>(s.frequencies, "frequencies", stream());
    std::vector<std::unique_ptr<DeviceBand>> bands;
    std::vector<PoolTarget> targets;
    for (size_t band = 0; band < c.strides.size(); ++band) {
      bands.push_back(std::make_unique<DeviceBand>(c, band, s, stream()));
      targets.push_back(bands.back()->target);
    }
    const RotateAndPool keys{c.kv_heads, c.head_dim, frequencies.data(), targets};
    Guarded<BFloat16> kv(decode.prefilled * row, stream());
    kv.put(std::span(s.kv).first(static_cast<size_t>(decode.prefilled * row)));
    Guarded<uint8_t> workspace(rotate_and_pool_workspace(keys, decode.prefilled), stream());
    rotate_and_pool(stream(), keys, decode.prefilled, 0, kv.data(), workspace.data());
    copy_async(rows.data(), kv.data() + first_row * row, (decode.prefilled - first_row) * row, stream());

    cudaGraphExec_t graph = nullptr;
    int64_t at = decode.prefilled;
    for (int64_t portion : decode.portions) {
      position.put(std::vector<int64_t>{at});
      new_kv.put(std::span(s.kv).subspan(static_cast<size_t>(at * row), static_cast<size_t>(portion * row)));
      const auto append = [&] {
        append_keys(stream(), keys, portion, position.data(), new_kv.data(), rows.data(), first_row);
      };
      if (replay == Replay::kGraph && portion == 1) {
        if (graph == nullptr) graph = capture(append);
        check_cuda(cudaGraphLaunch(graph, stream()), "cudaGraphLaunch");
      } else {
        append();
      }
      at += portion;
    }
    EXPECT_EQ(at, c.n) << "the portions make up the sequence";
    Prefilled result;
    result.kv = rows.values();
    for (const auto& band : bands)
      result.landmarks.push_back(band->landmarks.values()), result.open.push_back(band->open.values());
    if (graph != nullptr) check_cuda(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
    return result;
  }
};

TEST_F(AppendKeys, AgreesWithTheDefinitionsInAnyPortions) {
  for (const Decode& decode : kDecodes) {
    const Case& c = decode.c;
    SCOPED_TRACE(::testing::Message() << c << ", prefilled " << decode.prefilled);
    const Sequence s(c);
    const Prefilled got = run(decode, s, Replay::kLaunch);

    Case window = c;
    window.first_token = std::min<int64_t>(2, decode.prefilled);
    window.n = c.n - window.first_token;
    Sequence seen = s;
    seen.kv.erase(seen.kv.begin(), seen.kv.begin() + window.first_token * 2 * c.kv_heads * c.head_dim);
    expect_rotated(window, seen, got.kv);
    std::vector<int64_t> portions{decode.prefilled};
    portions.insert(portions.end(), decode.portions.begin(), decode.portions.end());
    for (size_t band = 0; band < c.strides.size(); ++band) {
      expect_landmarks(c, s, band, got.landmarks[band]);
      expect_open(c, s, band, cpu_state(c, s, band, portions), got.open[band]);
    }

    for (Replay replay : {Replay::kLaunch, Replay::kGraph}) {
      const Prefilled again = run(decode, s, replay);
      expect_same_bits(again.kv, got.kv);
      for (size_t band = 0; band < c.strides.size(); ++band) {
        expect_same_bits(again.landmarks[band], got.landmarks[band]);
        expect_same_bits(again.open[band], got.open[band]);
      }
    }
  }
}

}  // namespace
}  // namespace longhalo::testing
