// Stands in for CUDA's own header where a C++ compiler builds what needs no kernels: its functions
// are pointers, found at run time in the CUDA runtime that torch has loaded. Types and numbers are
// those of CUDA 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>

// CUDA's names and its C style are meant.
enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum { cudaHostRegisterPortable = 1, cudaStreamCaptureModeThreadLocal = 1 };
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;

// FUNCTION(name, parameters): each returns a cudaError_t.
#define GNNSERVE_CUDA_FUNCTIONS(FUNCTION)                                                      \
    FUNCTION(cudaGetLastError, ())                                                             \
    FUNCTION(cudaSetDevice, (int))                                                             \
    FUNCTION(cudaMalloc, (void**, std::size_t))                                                \
    FUNCTION(cudaHostRegister, (void*, std::size_t, unsigned))                                 \
    FUNCTION(cudaHostUnregister, (void*))                                                      \
    FUNCTION(cudaHostGetDevicePointer, (void**, void*, unsigned))                              \
    FUNCTION(cudaStreamBeginCapture, (cudaStream_t, int))                                      \
    FUNCTION(cudaStreamEndCapture, (cudaStream_t, cudaGraph_t*))                               \
    FUNCTION(cudaStreamWaitEvent, (cudaStream_t, cudaEvent_t, unsigned))                       \
    FUNCTION(cudaGraphInstantiate, (cudaGraphExec_t*, cudaGraph_t, unsigned long long))        \
    FUNCTION(cudaGraphDestroy, (cudaGraph_t))                                                  \
    FUNCTION(cudaGraphLaunch, (cudaGraphExec_t, cudaStream_t))                                 \
    FUNCTION(cudaGraphExecDestroy, (cudaGraphExec_t))                                          \
    FUNCTION(cudaEventCreateWithFlags, (cudaEvent_t*, unsigned))                               \
    FUNCTION(cudaEventRecord, (cudaEvent_t, cudaStream_t))                                     \
    FUNCTION(cudaEventQuery, (cudaEvent_t))                                                    \
    FUNCTION(cudaEventSynchronize, (cudaEvent_t))                                              \
    FUNCTION(cudaMemcpyAsync, (void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t)) \
    FUNCTION(cudaMemsetAsync, (void*, int, std::size_t, cudaStream_t))

#define GNNSERVE_CUDA_POINTER(name, parameters) static cudaError_t(*name) parameters = nullptr;
GNNSERVE_CUDA_FUNCTIONS(GNNSERVE_CUDA_POINTER)
#undef GNNSERVE_CUDA_POINTER
static const char* (*cudaGetErrorString)(cudaError_t) = nullptr;
