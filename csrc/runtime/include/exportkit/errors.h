// Forwards to the header in the source tree. An installation has the header itself here.
#pragma once

#include "../../../package/errors.h"
