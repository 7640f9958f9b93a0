# Every library LongHalo stands on, as an imported target. scripts/setup.sh installs the Debian packages.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(MPI REQUIRED COMPONENTS C)
target_compile_definitions(MPI::MPI_C INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX) # the C interface alone
find_package(CLI11 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)

set(HDF5_PREFER_PARALLEL OFF)
find_package(HDF5 REQUIRED COMPONENTS C)
if(HDF5_IS_PARALLEL)
  message(FATAL_ERROR "Found the MPI flavour of HDF5 (${HDF5_C_LIBRARIES}), which is not thread-safe and is not "
                      "used here. Install the serial one (Debian: libhdf5-dev) or set HDF5_ROOT to it.")
endif()
add_library(longhalo_hdf5 INTERFACE)
target_include_directories(longhalo_hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(longhalo_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
# Tokenizers: what is missing is left out of the build, and loading such a tokenizer says so.
pkg_check_modules(PCRE2 IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC IMPORTED_TARGET libutf8proc)
pkg_check_modules(SENTENCEPIECE IMPORTED_TARGET sentencepiece)
if(NOT TARGET yaml-cpp::yaml-cpp) # before yaml-cpp 0.8
  add_library(yaml-cpp::yaml-cpp ALIAS yaml-cpp)
endif()

# CUDA: AUTO uses it where a toolkit is found, ON insists, OFF leaves it out.
set(LONGHALO_CUDA AUTO CACHE STRING "Build the CUDA device path: AUTO, ON or OFF")
set_property(CACHE LONGHALO_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT LONGHALO_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LONGHALO_CUDA is '${LONGHALO_CUDA}'; it is one of AUTO, ON, OFF")
endif()
set(LONGHALO_HAVE_CUDA OFF)
if(NOT LONGHALO_CUDA STREQUAL OFF)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(LONGHALO_HAVE_CUDA ON)
  elseif(LONGHALO_CUDA STREQUAL ON)
    message(FATAL_ERROR "LONGHALO_CUDA=ON but no CUDA compiler was found. Put nvcc on PATH, set "
                        "CMAKE_CUDA_COMPILER, or configure with LONGHALO_CUDA=OFF.")
  endif()
endif()
message(STATUS "LongHalo: CUDA ${LONGHALO_HAVE_CUDA} (LONGHALO_CUDA=${LONGHALO_CUDA})")
