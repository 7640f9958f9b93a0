// The pre-tokenizer of a byte-level BPE: cuts a text into pieces inside which merges happen.
//
// A list of stages, each cutting every piece of the stage before. Digits and the built-in pattern of
// ByteLevel are the same kind of stage as Split, so this is all there is. Pieces stay bytes; the byte
// alphabet is never written.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_cursor.hpp"
#include "tokenizer/pattern.hpp"

namespace longhalo {

/// What becomes of the matches of a pattern and of the text between them.
enum class SplitBehavior {
  kIsolated,            ///< each match and each gap is a piece
  kRemoved,             ///< each gap is a piece, matches are dropped
  kContiguous,          ///< like isolated, with neighbouring matches joined
  kMergedWithPrevious,  ///< a match joins the gap before it
  kMergedWithNext,      ///< a match joins the gap after it
};

/// Takes the pieces in order. A piece is valid during the call only.
class PieceSink {
 public:
  virtual void piece(std::string_view bytes) = 0;

 protected:
  ~PieceSink() = default;
};

class PreTokenizer {
 public:
  /// Reads the value of "pre_tokenizer", which must end in a ByteLevel stage. Throws UserError.
  explicit PreTokenizer(const JsonCursor& description);

  /// Cuts valid UTF-8. Time is linear in the text for the patterns in use.
  void cut(std::string_view text, MatchScratch& scratch, PieceSink& sink) const {
    run(0, text, scratch, sink);
  }

 private:
  struct Stage {
    bool add_prefix_space = false;
    std::optional<Pattern> pattern;  // none: pieces pass unchanged
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;  // gaps count as matches and matches as gaps
  };

  void add_stages(const JsonCursor& description);
  void add_split(const JsonCursor& description);
  void run(size_t stage, std::string_view text, MatchScratch& scratch, PieceSink& sink) const;
  void run_isolated(size_t stage, std::string_view text, MatchScratch& scratch, PieceSink& sink) const;

  std::vector<Stage> stages_;
  bool ends_in_byte_level_ = false;
};

}  // namespace longhalo
