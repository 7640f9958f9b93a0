// RMSNorm, SwiGLU, embedding, sums over chunks and the search for what is not finite: each against its
// definition in fp64. What they make in fp8 and int8: row_kernels_fp8_test.cpp, row_kernels_int8_test.cpp.
#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/finite/first_not_finite.hpp"
#include "row_kernels_problem.hpp"

namespace longhalo::testing {
namespace {

class RowKernelsGpu : public GpuTest {};

TEST_F(RowKernelsGpu, Rmsnorm) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto x = normal_bf16(shape.n * shape.width, 1, 3);
    const auto weight = normal_floats(shape.width, 2);
    std::vector<double> right(x.size());
    rmsnorm_reference(shape.n, shape.width, doubles(x).data(), doubles(weight).data(), 1e-5, right.data());
    Guarded<BFloat16> in(shape.n * shape.width, stream()), out(shape.n * shape.width, stream());
    Guarded<float> w(shape.width, stream());
    in.put(x), w.put(weight);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, out.data());
    const auto got = out.values();
    // Half of the sum's error, the root's and two products', and the rounding of the result.
    expect_near(got, right, kBf16Unit + kRowSum + 8 * kFp32Unit, [](size_t) { return 0.0; });
    out.poison();
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, out.data());
    expect_same_bits(out.values(), got);
    rmsnorm(stream(), shape.n, shape.width, in.data(), w.data(), 1e-5F, in.data());
    expect_same_bits(in.values(), got);  // in place
  }
}

TEST_F(RowKernelsGpu, Swiglu) {
  for (const RowShape& shape : kRowShapes) {
    SCOPED_TRACE(::testing::Message() << "n " << shape.n << ", width " << shape.width);
    const auto gate_up = gates_and_ups(shape);
    const auto wide = doubles(gate_up);
    std::vector<double> right(static_cast<size_t>(shape.n * shape.width));
    swiglu_reference(shape.n, shape.width, wide.data(), right.data());
    Guarded<BFloat16> in(shape.n * 2 * shape.width, stream()), out(shape.n * shape.width, stream());
    in.put(gate_up);
    swiglu(stream(), shape.n, shape.width, in.data(), out.data());
    const auto got = out.values();
    // Below exp(-87) silu may have become 0: |g| e^g < 1e-35 there, and |up| < 50.
    expect_near(got, right, kBf16Unit + kSilu, [](size_t) { return 5e-34; });
    out.poison();
    swiglu(stream(), shape.n, shape.width, in.data(), out.data());
    expect_same_bits(out.values(), got);
  }
}

TEST_F(RowKernelsGpu, NoRowsAreNoWork) {
  Guarded<BFloat16> x(64, stream()), out(64, stream());
  Guarded<float> weight(64, stream());
  Guarded<int64_t> first(1, stream());
  rmsnorm(stream(), 0, 64, x.data(), weight.data(), 1e-5F, out.data());
  swiglu(stream(), 0, 32, x.data(), out.data());
  embedding(stream(), 0, 64, nullptr, x.data(), out.data());
  first_not_finite(stream(), 0, 64, x.data(), first.data());
  for (BFloat16 value : out.values())
    EXPECT_EQ(value.bits, 0xffff);
  EXPECT_EQ(first.values()[0], 0);
}

TEST_F(RowKernelsGpu, EmbeddingCopiesRows) {
  for (const RowShape& shape : kRowShapes) {
    constexpr int32_t kVocabulary = 53;
    const auto table = normal_bf16(kVocabulary * shape.width, 8);
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < shape.n; ++i)
      tokens.push_back(static_cast<int32_t>((kVocabulary - 1 + i * 17) % kVocabulary));
    Guarded<BFloat16> rows(kVocabulary * shape.width, stream()), x(shape.n * shape.width, stream());
    Guarded<int32_t> chosen(shape.n, stream());
    rows.put(table), chosen.put(tokens);
    embedding(stream(), shape.n, shape.width, chosen.data(), rows.data(), x.data());
    std::vector<BFloat16> right;
    for (int32_t token : tokens)
      right.insert(right.end(), table.begin() + token * shape.width,
                   table.begin() + (token + 1) * shape.width);
    expect_same_bits(x.values(), right);
  }
}

TEST_F(RowKernelsGpu, TheFirstRowThatIsNotFiniteIsFound) {
  for (const RowShape& shape : {RowShape{1, 8}, RowShape{517, 24}, RowShape{301, 4096}, RowShape{3, 40960}}) {
    const auto clean = normal_bf16(shape.n * shape.width, 9, 100);
    Guarded<BFloat16> x(shape.n * shape.width, stream());
    Guarded<int64_t> first(1, stream());
    const auto find = [&](const std::vector<BFloat16>& rows) {
      x.put(rows);
      first.poison();
      first_not_finite(stream(), shape.n, shape.width, x.data(), first.data());
      return first.values()[0];
    };
    EXPECT_EQ(find(clean), shape.n);
    for (float fault : {kNan, kInfinity, -kInfinity, 0x1p65F}) {  // the square of the last overflows
      for (int64_t row : {int64_t{0}, shape.n / 2, shape.n - 1}) {
        auto rows = clean;
        for (int64_t later = row; later < shape.n; later += 2)
          rows[static_cast<size_t>((later + 1) * shape.width - 1)] = to_bfloat16(fault);
        EXPECT_EQ(find(rows), row) << fault;
      }
    }
  }
}

TEST_F(RowKernelsGpu, ChunkSumsAddTileAfterTile) {
  struct Case {
    int64_t n, hidden, first_token, chunk_tokens, tile;
  };
  for (const Case& c : {Case{1, 8, 0, 1, 1}, Case{1000, 24, 0, 256, 300}, Case{777, 576, 200, 256, 128},
                        Case{513, 4096, 3, 7, 513}, Case{300, 136, 0, 1 << 30, 64}, Case{65, 8, 5, 1, 65}}) {
    SCOPED_TRACE(::testing::Message() << "n " << c.n << ", chunks of " << c.chunk_tokens);
    const auto x = normal_bf16(c.n * c.hidden, 10);
    const int64_t chunks = (c.first_token + c.n - 1) / c.chunk_tokens + 1;
    std::vector<double> right(static_cast<size_t>(chunks * c.hidden), 0.25), sizes(right.size(), 0.25);
    for (int64_t i = 0; i < c.n; ++i) {
      for (int64_t column = 0; column < c.hidden; ++column) {
        const auto at = static_cast<size_t>((c.first_token + i) / c.chunk_tokens * c.hidden + column);
        const double value = to_float(x[static_cast<size_t>(i * c.hidden + column)]);
        right[at] += value, sizes[at] += std::abs(value);
      }
    }
    Guarded<BFloat16> in(c.n * c.hidden, stream());
    Guarded<double> sums(chunks * c.hidden, stream());
    in.put(x);
    const auto run = [&] {
      sums.put(std::vector<double>(right.size(), 0.25));
      for (int64_t at = 0; at < c.n; at += c.tile)
        add_chunk_sums(stream(), std::min(c.tile, c.n - at), c.hidden, in.data() + at * c.hidden,
                       c.first_token + at, c.chunk_tokens, sums.data());
      return sums.values();
    };
    const auto got = run();
    const double count = static_cast<double>(std::min(c.n, c.chunk_tokens));
    for (size_t at = 0; at < right.size(); ++at)
      ASSERT_NEAR(got[at], right[at], count * 0x1p-53 * sizes[at]) << "element " << at;
    expect_same_bits(run(), got);
  }
}

}  // namespace
}  // namespace longhalo::testing
