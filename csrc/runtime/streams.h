// Streams of a device, whichever it is.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace exportkit {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Waits for what runs on the current stream. The CPU has none.
inline void wait_for_stream(c10::Device device) {
  if (!device.is_cpu()) current_stream(device).synchronize();
}

// Waits for all that runs on a device, unless it is broken or a capture forbids waiting.
inline void wait_for_device(c10::Device device) noexcept {
  if (device.is_cpu()) return;
  try {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  } catch (const std::exception&) {
  }
}

}  // namespace exportkit
