#pragma once

#include <cstddef>
#include <cstdint>

namespace exportkit {

// The CRC-32 of zip archives. To go on from earlier data, pass its CRC-32 as `before`; pass 0 to begin.
uint32_t crc32(uint32_t before, const void* data, size_t size);

}  // namespace exportkit
