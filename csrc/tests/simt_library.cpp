// The C functions of graph_api.cuh and gather.cuh with the device's kernels run on the host.
// Python's tests load it in place of libgnnserve_cuda.so.
#include "gather.cuh"
#include "graph_api.cuh"
