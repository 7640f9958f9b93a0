#include "app/answers.hpp"

#include <memory>
#include <nlohmann/json.hpp>

#include "core/clock.hpp"

namespace longhalo {
namespace {

using Json = nlohmann::json;

// Answers travel to rank 0 as JSON: a few kilobytes once a document.
Json to_json(const Answer& answer) {
  return {{"tokens", answer.generation.tokens},
          {"end", answer.generation.finish_reason == FinishReason::kEndToken},
          {"first", answer.generation.first_token_seconds},
          {"seconds", answer.generation.seconds},
          {"since_start", answer.first_token_seconds}};
}

Answer from_json(const Json& json, int rank) {
  Answer answer;
  answer.generation.tokens = json.at("tokens").get<std::vector<int32_t>>();
  answer.generation.finish_reason =
      json.at("end").get<bool>() ? FinishReason::kEndToken : FinishReason::kLength;
  answer.generation.first_token_seconds = json.at("first").get<double>();
  answer.generation.seconds = json.at("seconds").get<double>();
  answer.first_token_seconds = json.at("since_start").get<double>();
  answer.rank = rank;
  return answer;
}

}  // namespace

std::vector<Answer> answer_prompts(const MpiSession& session, Engine& engine, const DocumentContext& context,
                                   const Sequence& sequence, std::span<const int64_t> wanted,
                                   const GenerateOptions& options, const ProgressOptions& progress) {
  const auto ranks = static_cast<size_t>(session.ranks());
  const auto rank = static_cast<size_t>(session.rank());
  const Stopwatch watch;
  Json own = Json::array();
  if (rank < wanted.size()) {
    const auto queries = static_cast<int64_t>((wanted.size() - rank + ranks - 1) / ranks);
    Progress shown("answering", queries * options.max_new_tokens, ProgressUnit::kTokens, progress);
    for (size_t i = rank; i < wanted.size(); i += ranks) {
      GenerateOptions of_query = options;
      of_query.seed +=
          static_cast<uint64_t>(wanted[i]);  // a prompt's answer depends on its number, not on its rank
      const std::unique_ptr<Continuation> continuation = engine.continue_from(context);
      Answer answer;
      const double waited = watch.seconds();
      answer.generation = generate(*continuation, sequence.prompts[static_cast<size_t>(wanted[i])],
                                   engine.config().eos_ids, of_query, [&] { shown.add(1); });
      answer.first_token_seconds = waited + answer.generation.first_token_seconds;
      own.push_back(to_json(answer));
    }
  }

  const std::vector<std::string> gathered = gather_text(session, own.dump());
  std::vector<Answer> answers(session.is_root() ? wanted.size() : 0);
  for (size_t from = 0; from < gathered.size(); ++from) {
    const Json list = Json::parse(gathered[from]);
    for (size_t k = 0; k < list.size(); ++k)
      answers[from + k * ranks] = from_json(list[k], static_cast<int>(from));
  }
  return answers;
}

}  // namespace longhalo
