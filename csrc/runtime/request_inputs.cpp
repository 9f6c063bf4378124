#include "runtime/request_inputs.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/c_api_errors.h"
#include "runtime/dlpack_tensors.h"
#include "runtime/inputs.h"

namespace exportkit {
namespace {

using Parts = std::vector<const RequestInput*>;  // the same input of several requests

bool on_cpu(const exportkit_piece& piece) {
  return piece.device.device_type == kDLCPU || piece.device.device_type == kDLCUDAHost;
}

at::Tensor view_at(const void* data, at::IntArrayRef sizes, at::TensorOptions options) {
  try {
    return at::from_blob(const_cast<void*>(data), sizes, options);
  } catch (const c10::Error& error) {  // such as a pointer that CUDA does not know
    throw Error(errors::kInput, "memory cannot be used on " + options.device().str() + ": " +
                                    first_line(error.what_without_backtrace()));
  }
}

std::vector<int64_t> joined_sizes(const Parts& parts) {
  std::vector<int64_t> sizes = parts.front()->sizes;
  for (size_t i = 1; i < parts.size(); ++i) sizes[0] += parts[i]->sizes[0];
  return sizes;
}

// The one piece that is the whole input, where the device can read it; else null.
const exportkit_piece* whole_piece(const Parts& parts, c10::Device device) {
  if (parts.size() != 1) return nullptr;
  for (const exportkit_piece& piece : parts.front()->pieces) {
    if (piece.size != parts.front()->bytes) continue;
    const auto address = reinterpret_cast<uintptr_t>(piece.data);
    const bool aligned = address % alignment_on(device, c10::elementSize(parts.front()->dtype)) == 0;
    return aligned && on_cpu(piece) == device.is_cpu() ? &piece : nullptr;
  }
  return nullptr;
}

template <class Use>
void for_each_piece(const Parts& parts, const Use& use) {
  uint64_t place = 0;
  for (const RequestInput* part : parts) {
    for (const exportkit_piece& piece : part->pieces) {
      if (piece.size > 0) use(piece, place);
      place += piece.size;
    }
  }
}

at::Tensor join_on_cpu(const Parts& parts, at::IntArrayRef sizes, uint64_t bytes, at::Tensor& kept) {
  if (!kept.defined() || kept.nbytes() < bytes) {
    kept = at::Tensor();  // both need not be there at a time
    kept = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  }
  char* const to = static_cast<char*>(kept.mutable_data_ptr());
  for_each_piece(
      parts, [&](const exportkit_piece& piece, uint64_t place) { std::memcpy(to + place, piece.data, piece.size); });
  return at::from_blob(to, sizes, at::TensorOptions(parts.front()->dtype));
}

// What is on the CPU is put together in pinned memory, which torch uses again when the copies from it have ended.
// Pieces that follow one another there are copied at once.
at::Tensor join_on_gpu(const Parts& parts, at::IntArrayRef sizes, uint64_t bytes, c10::Device device,
                       DeviceCopies& copies) {
  const auto whole = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  at::Tensor staged;
  uint64_t begin = 0, end = 0;  // of what is staged and not copied yet
  const auto part = [](const at::Tensor& tensor, uint64_t first, uint64_t size) {
    return tensor.narrow(0, static_cast<int64_t>(first), static_cast<int64_t>(size));
  };
  const auto copy_staged = [&] {
    if (begin < end) part(whole, begin, end - begin).copy_(part(staged, begin, end - begin), /*non_blocking=*/true);
    begin = end;
  };
  for_each_piece(parts, [&](const exportkit_piece& piece, uint64_t place) {
    if (piece.device.device_type != kDLCPU) {
      copy_staged();
      const at::Tensor to = part(whole, place, piece.size);
      if (on_cpu(piece)) {
        to.copy_(bytes_at(piece.data, piece.size, c10::kCPU), /*non_blocking=*/true);
      } else {
        bytes_at(piece.data, piece.size, device);
        copies.add(to.mutable_data_ptr(), piece.data, piece.size);
      }
      begin = end = place + piece.size;
      return;
    }
    if (!staged.defined()) {
      staged = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).pinned_memory(true));
    }
    if (begin == end) begin = place;
    std::memcpy(static_cast<char*>(staged.mutable_data_ptr()) + place, piece.data, piece.size);
    end = place + piece.size;
  });
  copy_staged();
  return whole.view(parts.front()->dtype).view(sizes);
}

at::Tensor join(const Parts& parts, c10::Device device, at::Tensor& kept, DeviceCopies& copies) {
  const std::vector<int64_t> sizes = joined_sizes(parts);
  const auto options = at::TensorOptions(parts.front()->dtype).device(device);
  uint64_t bytes = 0;
  for (const RequestInput* part : parts) bytes += part->bytes;
  if (bytes == 0) return at::empty(sizes, options);
  if (const exportkit_piece* piece = whole_piece(parts, device)) return view_at(piece->data, sizes, options);
  return device.is_cpu() ? join_on_cpu(parts, sizes, bytes, kept) : join_on_gpu(parts, sizes, bytes, device, copies);
}

constexpr uint64_t kWord = sizeof(int64_t);

bool in_words(const void* address, uint64_t bytes) {
  return (reinterpret_cast<uintptr_t>(address) | bytes) % kWord == 0;
}

}  // namespace

at::Tensor bytes_at(const void* data, uint64_t bytes, c10::Device device) {
  return view_at(data, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
}

RequestInput read_input(const exportkit_request_input& given, const std::string& name, c10::Device device) {
  const at::ScalarType dtype = dtype_of(given.dtype, name);
  auto [sizes, bytes] = row_major(given.shape, given.ndim, dtype, name);
  if (given.piece_count > 0) not_null(given.pieces, ("the pieces of `" + name + "`").c_str());
  const std::span pieces(given.pieces, given.piece_count);
  unsigned __int128 given_bytes = 0;
  for (const exportkit_piece& piece : pieces) {
    device_of(piece.device, name, device);
    if (piece.size > 0) not_null(piece.data, ("the data of a piece of `" + name + "`").c_str());
    given_bytes += piece.size;
  }
  if (given_bytes != bytes) {
    const bool huge = given_bytes > UINT64_MAX;
    throw Error(errors::kInput, "`" + name + "` is " + dtype_name(dtype) + shape_text(sizes) + ", which has " +
                                    std::to_string(bytes) + " bytes; its " + std::to_string(pieces.size()) +
                                    " pieces have " + (huge ? "more than " : "") +
                                    std::to_string(huge ? UINT64_MAX : static_cast<uint64_t>(given_bytes)));
  }
  return {dtype, std::move(sizes), bytes, pieces};
}

std::vector<at::Tensor> joined(const std::vector<const std::vector<RequestInput>*>& requests, c10::Device device,
                               std::vector<at::Tensor>& kept) {
  const size_t inputs = requests.front()->size();
  kept.resize(inputs);
  std::vector<at::Tensor> together;
  DeviceCopies copies(device);
  Parts parts;
  for (size_t i = 0; i < inputs; ++i) {
    parts.clear();
    for (const auto* request : requests) parts.push_back(&(*request)[i]);
    together.push_back(join(parts, device, kept[i], copies));
  }
  copies.begin();
  return together;
}

void DeviceCopies::begin() {
  if (copies_.empty()) return;
  const bool words = std::ranges::all_of(
      copies_, [](const Copy& copy) { return in_words(copy.to, copy.bytes) && in_words(copy.from, copy.bytes); });
  const auto options = at::TensorOptions(words ? at::kLong : at::kByte).device(device_);
  const auto view = [&](const void* data, uint64_t bytes) {
    const auto size = static_cast<int64_t>(words ? bytes / kWord : bytes);
    return at::for_blob(const_cast<void*>(data), {size}).options(options).target_device(device_).make_tensor();
  };
  std::vector<at::Tensor> to, from;
  for (const Copy& copy : copies_) {
    to.push_back(view(copy.to, copy.bytes));
    from.push_back(view(copy.from, copy.bytes));
  }
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
  copies_.clear();
}

}  // namespace exportkit
