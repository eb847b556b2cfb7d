# libgnnserve_cuda.so, where it can be built and is wanted. Nothing links it: it is loaded at run
# time, by processes that use a GPU. An install for this machine builds it where a GPU is at hand,
# a wheel only when told to (it would be the slowest part by far), everything else with nvcc.
set(_default OFF)
if(NOT DEFINED SKBUILD OR (SKBUILD_STATE STREQUAL "editable" AND EXISTS /dev/nvidiactl))
  find_program(GNNSERVE_NVCC nvcc PATHS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
  if(GNNSERVE_NVCC)
    set(_default ON)
  endif()
endif()
option(GNNSERVE_CUDA "Build the part that needs nvcc" ${_default})

# Kernels are not what the sanitizers are for, and nvcc does not know their flags.
if(GNNSERVE_CUDA AND NOT GNNSERVE_SANITIZE)
  include(CheckLanguage)
  if(GNNSERVE_NVCC AND NOT DEFINED CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${GNNSERVE_NVCC})
  endif()
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "GNNSERVE_CUDA is on, but there is no CUDA compiler (nvcc)")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # 90: also as PTX, for what comes after
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  add_library(gnnserve_cuda MODULE
    cuda/device.cu cuda/copies.cu cuda/gather.cu cuda/graph.cu cuda/partition.cu)
  target_include_directories(gnnserve_cuda PRIVATE include cuda)
  # Static, so that it loads where there is no driver, and beside any torch.
  set_target_properties(gnnserve_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(gnnserve_cuda PRIVATE --Werror=all-warnings)
endif()
