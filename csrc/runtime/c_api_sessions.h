// The sessions of the C interface.
#pragma once

#include <memory>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"

namespace exportkit {

struct OpenSession {
  exportkit_model model;
  Model of;
  Session session;
};

// SessionClosedError if there is none.
std::shared_ptr<OpenSession> find_session(exportkit_session handle);

// Closes the sessions of a model that was closed.
void close_sessions(exportkit_model model);

}  // namespace exportkit
