// SmolLM2-135M-Instruct on GPUs against the CPU, both through the engine that a job drives: a licence of some
// thousand tokens, most of which a query sees through landmarks only, on one rank and on two (which share a
// GPU where there is one).
//
// Greedy answers are judged by teacher forcing. Two answers that differ in one token have nothing in common
// after it, so both engines go on from the CPU's tokens, and each step asks for the most likely next one. It
// may be another one than the CPU's only where the CPU's lead over it is less than bf16 may move: a
// tie-break, which is counted.
//
// How far bf16 may move: hidden states err by bf16_bound() of themselves if every rounding errs as much as it
// can, by 1/sqrt(3) of that if the errors are spread evenly. Logits are products with hidden states, so one
// moves by this share of their spread over the vocabulary (a shift of all logits says nothing and is left
// out), and a difference of two by sqrt(2) times that. The former holds for one row, the latter for the mean
// over many.
#include <algorithm>
#include <iostream>

#include "core/text.hpp"
#include "dataset/documents.hpp"
#include "device_model_fixture.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/cuda_engine.hpp"
#include "model/prefill.hpp"
#include "real_model.hpp"
#include "tokenizer/chat_template.hpp"
#include "tokenizer/tokenizer.hpp"

namespace longhalo::testing {
namespace {

using test::kRealModel;
using test::session;

const std::filesystem::path kText = "/usr/share/common-licenses/GPL-3";
constexpr int64_t kTextTokens = 4001;  // a multiple of nothing
constexpr int64_t kAnswerTokens = 64;
constexpr size_t kBlock = 128;  // tokens whose scores are judged together
const AttentionPattern kPattern = AttentionPattern::window_and_landmarks(512, 64);
constexpr const char* kPrompts[] = {
    "What is this document, and who is it for?",
    "What must someone do who distributes a modified version?",
    "Summarise in two sentences: what does this document say about warranty?",
};

struct Step {
  int32_t token;              // the CPU's choice
  std::vector<float> logits;  // the CPU's, by which it was chosen [V]
};

struct Answer {
  std::vector<int32_t> prompt;
  std::vector<Step> steps;
};

// What is left when `engine` has read the text; scores on rank 0. Belongs to the engine.
struct ReadText {
  std::vector<float> scores;
  std::unique_ptr<DocumentContext> context;
};

// The text, and what the CPU makes of it.
struct Reference {
  ModelConfig config;
  std::vector<int32_t> tokens;  // [opening of the chat template | text]
  std::vector<float> scores;    // on rank 0
  std::vector<Answer> answers;  // of this rank's prompts
  double spread = 0;            // of the logits, root mean square over all steps
};

double deviation(std::span<const float> values) {
  double sum = 0, squares = 0;
  for (const float value : values) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  const auto count = static_cast<double>(values.size());
  return std::sqrt(std::max(0.0, squares / count - sum / count * (sum / count)));
}

double root_mean_square(std::span<const float> values) {
  double squares = 0;
  for (const float value : values)
    squares += static_cast<double>(value) * value;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

std::vector<float> difference(std::span<const float> a, std::span<const float> b) {
  check(a.size() == b.size(), "what is compared has one length");
  std::vector<float> result(a.size());
  std::transform(a.begin(), a.end(), b.begin(), result.begin(), std::minus<>());
  return result;
}

double perplexity(std::span<const float> scores) {
  double sum = 0;
  for (const float score : scores.subspan(1))  // the first token has nothing before it
    sum += score;
  return std::exp(-sum / static_cast<double>(scores.size() - 1));
}

// Collective.
ReadText read_text(const MpiSession& ranks, Engine& engine, std::span<const int32_t> tokens) {
  const ShardPlan shards =
      plan_shards(engine.config(), engine.pattern(), static_cast<int64_t>(tokens.size()), ranks.ranks());
  const std::unique_ptr<Reading> reading = engine.read(shards, engine.default_tile());
  reading->prefill(tokens, KeepContext::kYes);
  reading->require_finite();
  std::vector<float> scores = reading->scores(tokens);
  return {std::move(scores), reading->take_context()};
}

Answer greedy_answer(Continuation& continuation, std::vector<int32_t> prompt,
                     std::span<const int32_t> end_tokens) {
  Answer answer{std::move(prompt), {}};
  continuation.extend(answer.prompt);
  for (int64_t i = 0; i < kAnswerTokens; ++i) {
    const std::span<const float> logits = continuation.logits();
    answer.steps.push_back({continuation.most_likely(), {logits.begin(), logits.end()}});
    const int32_t token = answer.steps.back().token;
    if (std::find(end_tokens.begin(), end_tokens.end(), token) != end_tokens.end()) break;
    continuation.extend(std::span(&token, 1));
  }
  return answer;
}

Reference made_on_cpu() {
  set_kernel_threads(session().ranks() == 1 ? 2 : 1);  // a test has two processors
  Reference made;
  made.config = read_model_config(kRealModel);
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(kRealModel);
  const ChatTemplate chat = ChatTemplate::load(kRealModel);
  made.tokens = tokenizer->encode(chat.place("", kPrompts[0]).before_document, SpecialTokens::kParse);
  const std::vector<int32_t> document = tokenizer->encode(read_document(kText).text, SpecialTokens::kAsText);
  made.tokens.insert(made.tokens.end(), document.begin(), document.end());
  check(std::ssize(made.tokens) >= kTextTokens, "the text is long enough");
  made.tokens.resize(static_cast<size_t>(kTextTokens));

  const std::unique_ptr<Engine> engine = make_cpu_engine(session(), made.config, kPattern);
  engine->load_weights({kRealModel, 0, {1, {}}});
  ReadText text = read_text(session(), *engine, made.tokens);
  made.scores = std::move(text.scores);
  double squares = 0, steps = 0;
  for (size_t i = static_cast<size_t>(session().rank()); i < std::size(kPrompts);
       i += static_cast<size_t>(session().ranks())) {
    std::vector<int32_t> prompt =
        tokenizer->encode(chat.place("", kPrompts[i]).after_document, SpecialTokens::kParse);
    made.answers.push_back(
        greedy_answer(*engine->continue_from(*text.context), std::move(prompt), made.config.eos_ids));
    for (const Step& step : made.answers.back().steps) {
      squares += std::pow(deviation(step.logits), 2);
      steps += 1;
    }
  }
  made.spread = std::sqrt(squares / steps);
  return made;
}

class RealModelGpu : public RankTest {
 protected:
  void SetUp() override {
    RankTest::SetUp();
    if (IsSkipped()) return;
    if (const std::string why = test::why_no_real_model(); !why.empty()) GTEST_SKIP() << why;
    if (!std::filesystem::exists(kText))
      GTEST_SKIP() << "no text at " << kText << ": the package base-files of Debian and Ubuntu has it";
  }
  // Made when first asked for, on all ranks at once.
  static const Reference& cpu() {
    static const Reference made = made_on_cpu();
    return made;
  }
  static double bound() { return bf16_bound(cpu().config); }

  static std::unique_ptr<Engine> loaded(const MpiSession& ranks, Precision precision) {
    std::unique_ptr<Engine> engine =
        make_cuda_engine(ranks, std::make_unique<Device>(device().info().index),
                         ranks.ranks() == 1 ? TransportChoice::kStaged : TransportChoice::kAuto, cpu().config,
                         kPattern, precision);
    engine->load_weights({kRealModel, 0, {1, {}}, cpu().tokens});  // as a job has them: its document
    return engine;
  }
};

// `bound`: of a row's logits, as a share of their spread. A score is a logit less a mean of logits.
void expect_scores(std::span<const float> own, std::span<const float> expected, double spread, double bound) {
  const std::vector<float> moved = difference(own.subspan(1), expected.subspan(1));
  const double allowed = std::sqrt(2) * bound * spread;
  EXPECT_LE(root_mean_square(moved), allowed / std::sqrt(3));
  // Every block by itself too: one that misses its halo would drown in the others.
  for (size_t at = 0; at < moved.size(); at += kBlock) {
    const size_t count = std::min(kBlock, moved.size() - at);
    EXPECT_LE(root_mean_square(std::span(moved).subspan(at, count)), allowed) << "from token " << at + 1;
  }
}

void expect_perplexity(std::string_view precision, double own, double expected, double share) {
  std::cout << "perplexity: " << own << " in " << precision << " on CUDA, " << expected << " on the CPU\n";
  EXPECT_NEAR(own / expected, 1, share);
}

// The steps of one rank's answers.
struct Tally {
  int64_t steps = 0;
  int64_t close = 0;   // steps at which bf16 may choose another token
  int64_t broken = 0;  // and did
  double squares = 0;  // of what logits moved by, in their spread
};

// The CPU's lead over the token that comes next.
double lead(const Step& step) {
  float second = -std::numeric_limits<float>::infinity();
  for (size_t v = 0; v < step.logits.size(); ++v)
    if (v != static_cast<size_t>(step.token)) second = std::max(second, step.logits[v]);
  return static_cast<double>(step.logits[static_cast<size_t>(step.token)]) - second;
}

void judge(Continuation& cuda, const Answer& answer, double bound, Tally& tally) {
  cuda.extend(answer.prompt);
  for (const Step& step : answer.steps) {
    const int32_t chosen = cuda.most_likely();
    const double spread = deviation(step.logits);
    const double moved = deviation(difference(cuda.logits(), step.logits)) / spread;
    EXPECT_LE(moved, bound) << "step " << &step - answer.steps.data();
    const double may_move = std::sqrt(2) * bound * spread;
    tally.steps += 1;
    tally.close += lead(step) <= may_move ? 1 : 0;
    tally.squares += moved * moved;
    if (chosen != step.token) {
      const double lead_over_it = static_cast<double>(step.logits[static_cast<size_t>(step.token)]) -
                                  step.logits[static_cast<size_t>(chosen)];
      EXPECT_LE(lead_over_it, may_move)
          << "step " << &step - answer.steps.data() << ": " << chosen << " instead of " << step.token;
      std::cout << text("rank ", session().rank(), ": tie-break at step ", &step - answer.steps.data(),
                        ": token ", chosen, " instead of ", step.token, ", which leads by ", lead_over_it,
                        "; bf16 may move ", may_move, "\n");
      tally.broken += 1;
    }
    cuda.extend(std::span(&step.token, 1));
  }
}

TEST_F(RealModelGpu, ScoresAndGreedyTokensAreThoseOfTheCpu) {
  const std::unique_ptr<Engine> engine = loaded(session(), Precision::kBf16);
  const ReadText read = read_text(session(), *engine, cpu().tokens);
  if (session().is_root()) {
    ASSERT_EQ(read.scores.size(), cpu().scores.size());
    expect_scores(read.scores, cpu().scores, cpu().spread, bound());
    expect_perplexity("bf16", perplexity(read.scores), perplexity(cpu().scores), 0.005);
  } else {
    EXPECT_TRUE(read.scores.empty());
  }

  Tally tally;
  for (const Answer& answer : cpu().answers)
    judge(*engine->continue_from(*read.context), answer, bound(), tally);
  const double moved = std::sqrt(tally.squares / static_cast<double>(tally.steps));
  std::cout << text("rank ", session().rank(), ": of ", tally.steps, " steps ", tally.close, " are close, ",
                    tally.broken, " of them chose another token; logits moved by ", moved,
                    " of their spread\n");
  EXPECT_LE(moved, bound() / std::sqrt(3));
  // The CPU's token is the likelier one at a close step too: at most half of them, and two standard
  // deviations of such a count, go another way.
  const auto close = static_cast<double>(tally.close);
  EXPECT_LE(static_cast<double>(tally.broken), close / 2 + std::sqrt(close));
  EXPECT_LT(4 * tally.close, tally.steps) << "answers of ties alone say little";
}

TEST_F(RealModelGpu, OneRankAndSeveralAgree) {
  if (session().ranks() == 1) GTEST_SKIP() << "is about several ranks";
  const std::vector<float> together =
      read_text(session(), *loaded(session(), Precision::kBf16), cpu().tokens).scores;
  const std::vector<float> alone = test::made_by_root<float>([] {
    const MpiSession self(MPI_COMM_SELF);
    return read_text(self, *loaded(self, Precision::kBf16), cpu().tokens).scores;
  });
  if (!session().is_root()) return;
  ASSERT_EQ(together.size(), alone.size());
  expect_scores(together, alone, cpu().spread, std::sqrt(2) * bound());  // both err
  expect_perplexity("bf16, on one rank", perplexity(alone), perplexity(cpu().scores), 0.005);
}

// docs/performance.md has what the roundings cost this small model on several texts.
TEST_F(RealModelGpu, EightBitsKeepThePerplexity) {
  if (device().info().major < 9) GTEST_SKIP() << "fp8 products need compute capability 9.0";
  for (const auto& [precision, most] :
       {std::pair(Precision::kFp8, 0.03), std::pair(Precision::kInt8, 0.01)}) {
    if (precision == Precision::kInt8 && !device().info().is_hopper()) continue;
    const std::unique_ptr<Engine> engine = loaded(session(), precision);
    const ReadText read = read_text(session(), *engine, cpu().tokens);
    if (!session().is_root()) continue;
    ASSERT_EQ(read.scores.size(), cpu().scores.size());
    expect_perplexity(name_of(precision), perplexity(read.scores), perplexity(cpu().scores), most);
    // What tells them from bf16, whose roundings are a fraction of theirs.
    const std::vector<float> moved =
        difference(std::span(read.scores).subspan(1), std::span(cpu().scores).subspan(1));
    EXPECT_GT(root_mean_square(moved),
              bound() * cpu().spread / std::sqrt(3) / (precision == Precision::kInt8 ? 4 : 1));
    // Perplexity is chance to a part; this is not: in fp8 0.20 nats with weights fitted to tokens, 0.30
    // without.
    EXPECT_LT(root_mean_square(moved), 0.25);
  }
}

}  // namespace
}  // namespace longhalo::testing
