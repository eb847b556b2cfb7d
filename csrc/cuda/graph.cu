// The kernels along edges; see graph_api.cuh.
#include "graph_api.cuh"
