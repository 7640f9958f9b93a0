// Writes configs/reference.yaml: longhalo_write_reference <file>.
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "config/config.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: longhalo_write_reference <file>\n";
    return EXIT_FAILURE;
  }
  std::ofstream file(argv[1], std::ios::binary);
  file << longhalo::reference_yaml();
  file.close();
  if (!file) {
    std::cerr << argv[1] << " cannot be written\n";
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
