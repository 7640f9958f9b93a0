// `longhalo tokenize`: text files to one HDF5 token file, and a token file back to text files. One process,
// no MPI.
#pragma once

#include <string>
#include <vector>

#include "telemetry/progress.hpp"

namespace longhalo {

/// Whether files that exist may be replaced.
enum class IfOutputExists { kError, kReplace };

struct TokenizeOptions {
  std::string model;                // Hugging Face directory with tokenizer.json or tokenizer.model
  std::vector<std::string> inputs;  // text files to encode; empty when decoding
  std::string decode;               // token file to decode; empty when encoding
  std::string output;               // the token file, or the folder for decoded texts
  IfOutputExists if_exists = IfOutputExists::kError;
  ProgressOptions progress;
};

/// Encodes `inputs` or decodes `decode`. Every output file appears whole or not at all; where a link stands
/// in its place, at the end of the link. Throws UserError for any fault of the inputs (each is looked at
/// before the work begins), a token file made with another tokenizer, an output that exists, one that is read
/// by this very job (whatever `if_exists` says), and a full disk.
void run_tokenize(const TokenizeOptions& options);

}  // namespace longhalo
