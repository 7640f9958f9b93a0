// The gradient of an attention problem: the kernel's answer after its own forward pass, and the fp64
// reference's with the error that fp32 may make.
#pragma once

#include <vector>

#include "attention_problem.hpp"
#include "kernels/attention/attention_backward.hpp"

namespace longhalo::testing {

struct GradientAnswer {
  std::vector<float> dq;
  std::vector<std::vector<float>> dk, dv;  // [bands]
  std::vector<float> d_bias;
};

/// attention_forward(), then attention_backward() on what it left, by calls on `portion` queries each that
/// add to the same dk and dv. dq is NaN before, the others are 0.
GradientAnswer run_backward(const AttentionProblem& problem, const std::vector<float>& d_out,
                            int64_t portion = kUnlimited);

/// The same in fp64, and what rounding may change: absolute, in the 2-norm for each row of d numbers.
struct GradientJudgement {
  std::vector<double> dq, dq_error;                             // [n, H, d], [n, H]
  std::vector<std::vector<double>> dk, dk_error, dv, dv_error;  // [bands]: [count, H_kv, d], [count, H_kv]
  std::vector<double> d_bias, d_bias_error;                     // [H]
};
/// `unit`: the relative error with which a kernel also rounds out, the weights, the gradients of scores and
/// dq, if it does.
GradientJudgement judge_backward(const AttentionProblem& problem, const std::vector<float>& d_out,
                                 double unit = 0);

/// Adds GoogleTest failures for what rounding does not explain.
void expect_right(const AttentionProblem& problem, const GradientAnswer& answer,
                  const GradientJudgement& right);

}  // namespace longhalo::testing
