# Switches CUDA on for a build: nvcc as a compiler beside the C++ compiler, the shared runtime, a log of what ptxas says.
#
# Included at the top level, for it enables a language. setup.py decides beforehand whether there is an nvcc that fits.
# NCCL is not looked for: torch's copy is loaded at run time.
if(HPCOMM_SANITIZE)
  message(FATAL_ERROR "HPCOMM_SANITIZE and HPCOMM_USE_CUDA exclude each other: HPCOMM_FAKE_CUDA is there for sanitizers.")
endif()
# Machine code for A100, H100 and B200, and PTX of the newest, from which the driver compiles for GPUs to come.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100")
endif()
# One C++ compiler for everything; CXX may be two words ("ccache g++"), of which CMake keeps the second elsewhere.
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX} AND NOT CMAKE_CXX_COMPILER_ARG1)
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()

enable_language(CUDA)
# The runtime that torch has loaded already. A static one would have state of its own.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_FLAGS_RELEASE "-O2 -DNDEBUG")
find_package(CUDAToolkit REQUIRED)
message(STATUS "CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")

# Registers, spills and shared memory of every kernel go to <build>/ptxas/<file>.log instead of the screen.
set(CMAKE_CUDA_COMPILER_LAUNCHER
  sh "${CMAKE_CURRENT_SOURCE_DIR}/cmake/ptxas_log.sh" "${CMAKE_CURRENT_BINARY_DIR}/ptxas" ${CMAKE_CUDA_COMPILER_LAUNCHER})
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>")
