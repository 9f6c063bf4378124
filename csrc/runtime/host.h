// Describes this machine, so that targets can be compared with it.
#pragma once

#include <string>

#include "package/targets.h"

namespace exportkit {

// `with_cuda` includes the GPUs, which initialises CUDA.
Host this_host(bool with_cuda);

// The version of the running torch, such as "2.13.0".
std::string running_torch();

}  // namespace exportkit
