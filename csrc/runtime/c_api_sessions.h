// The sessions of the C interface.
#pragma once

#include "exportkit/exportkit.h"

namespace exportkit {

// Closes the sessions of a model that was closed.
void close_sessions(exportkit_model model);

}  // namespace exportkit
