// In the source tree; the file itself is installed in this one's place.
#pragma once

#include "../../../package/errors.h"
