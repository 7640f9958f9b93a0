#include "device/graph.hpp"

#include "core/error.hpp"
#include "device/cuda_check.hpp"

namespace longhalo {

Graph::Graph(cudaStream_t stream, const std::function<void()>& queue) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  cudaGraph_t graph = nullptr;
  try {
    queue();
  } catch (...) {  // leave the stream usable
    log_cuda_failure(cudaStreamEndCapture(stream, &graph), "ending a capture");
    if (graph != nullptr) log_cuda_failure(cudaGraphDestroy(graph), "destroying a graph");
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream, &graph), "ending a capture");
  const cudaError_t code = cudaGraphInstantiate(&executable_, graph, 0);
  log_cuda_failure(cudaGraphDestroy(graph), "destroying a graph");
  check_cuda(code, "instantiating a graph");
}

Graph::~Graph() {
  if (executable_ != nullptr) log_cuda_failure(cudaGraphExecDestroy(executable_), "destroying a graph");
}

void Graph::launch(cudaStream_t stream) const {
  check(!empty(), "a graph is captured before it is launched");
  check_cuda(cudaGraphLaunch(executable_, stream), "launching a graph");
}

}  // namespace longhalo
