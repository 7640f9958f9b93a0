// What `longhalo bench gemm` measures and how it checks it, for the CPU and for CUDA.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "bench/bench_report.hpp"
#include "config/config.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {

/// c [rows, outputs] (+)= a [rows, inputs] w [outputs, inputs]^T.
struct Product {
  const char* name;
  int64_t rows, outputs, inputs;
  Accumulate accumulate = Accumulate::kOverwrite;
  double flops() const {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(outputs) * static_cast<double>(inputs);
  }
};

/// The product that bench.outputs and bench.inputs name; empty where they name none.
std::vector<Product> named_product(const Config::Bench& bench);
/// The products of a layer of an 8B model (D 4096, H 32, H_kv 8, d 128, F 14336) for bench.tokens tokens.
std::vector<Product> layer_products(const Config::Bench& bench);

BenchTable product_table();

/// (result, exact value) of one entry of c.
using ProductEntry = std::function<std::pair<double, double>(int64_t row, int64_t output)>;

/// Relative Frobenius error of 64 entries, drawn by a fixed seed; infinite where the result is not
/// finite.
double sampled_product_error(const Product& product, const ProductEntry& entry);

}  // namespace longhalo
