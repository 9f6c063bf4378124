// This machine, as targets are held against it.
#pragma once

#include <string>

#include "package/targets.h"

namespace exportkit {

// Asking for its GPUs initialises CUDA, so that is done only where it matters.
Host this_host(bool with_cuda);

// Of the torch that runs, such as "2.13.0".
std::string running_torch();

}  // namespace exportkit
