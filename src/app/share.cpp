#include "app/share.hpp"

namespace longhalo {
namespace {

template <class T>
void share_vector(const MpiSession& session, std::vector<T>& values) {
  values.resize(static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(values.size()))));
  broadcast_bytes(session, values.data(), static_cast<int64_t>(values.size() * sizeof(T)), 0);
}

}  // namespace

Sequence share_sequence(const MpiSession& session, Sequence sequence) {
  share_vector(session, sequence.tokens);
  sequence.document_begin = broadcast_count(session, sequence.document_begin);
  sequence.document_bytes = broadcast_count(session, sequence.document_bytes);
  sequence.predicted_bytes = broadcast_count(session, sequence.predicted_bytes);
  sequence.prompts.resize(
      static_cast<size_t>(broadcast_count(session, static_cast<int64_t>(sequence.prompts.size()))));
  for (std::vector<int32_t>& prompt : sequence.prompts)
    share_vector(session, prompt);
  return sequence;
}

std::vector<int32_t> share_tokens(const MpiSession& session, std::vector<int32_t> tokens) {
  share_vector(session, tokens);
  return tokens;
}

Work share_work(const MpiSession& session, Work work) {
  for (bool* flag : {&work.score, &work.embed, &work.score_array, &work.embed_array})
    *flag = broadcast_count(session, *flag ? 1 : 0) != 0;
  share_vector(session, work.prompts);
  share_vector(session, work.seeds);
  return work;
}

}  // namespace longhalo
