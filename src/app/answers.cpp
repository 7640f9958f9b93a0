#include "app/answers.hpp"

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "core/clock.hpp"
#include "storage/checksum.hpp"

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

// The last step of splitmix64 (Steele, Lea, Flood 2014): each bit of the input changes about half of them.
uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

uint64_t seed_of_answer(int64_t seed, std::string_view document, std::string_view prompt) {
  // The lengths keep apart what stands in the one or in the other.
  const std::array<uint64_t, 3> head{static_cast<uint64_t>(seed), document.size(), prompt.size()};
  Checksum64 sum;
  sum.update_values(std::span<const uint64_t>(head));
  for (const std::string_view part : {document, prompt})
    sum.update(std::as_bytes(std::span(part)));
  return mixed(sum.value());
}

std::vector<Answer> answer_prompts(const MpiSession& session, Engine& engine, const DocumentContext& context,
                                   const Sequence& sequence, const Work& work, const GenerateOptions& options,
                                   const ProgressOptions& progress) {
  const std::vector<int64_t>& wanted = work.prompts;
  const auto ranks = static_cast<size_t>(session.ranks());
  const auto rank = static_cast<size_t>(session.rank());
  const Stopwatch watch;
  Json own = Json::array();
  if (rank < wanted.size()) {
    const auto queries = static_cast<int64_t>((wanted.size() - rank + ranks - 1) / ranks);
    Progress shown("answering", queries * options.max_new_tokens, ProgressUnit::kTokens, progress);
    for (size_t i = rank; i < wanted.size(); i += ranks) {
      GenerateOptions of_query = options;
      of_query.seed = work.seeds[i];
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
