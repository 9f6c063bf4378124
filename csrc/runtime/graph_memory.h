// Tensors for the comparison of a graph with a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/recorder.h"

namespace exportkit {

using Tensors = std::vector<at::Tensor>;

// The same sizes, strides and dtypes, without values, on a device.
Tensors like(const Tensors& tensors, c10::Device device);
// The same, contiguous, with unused memory behind each: the end of one is not the beginning of another.
Tensors apart_like(const Tensors& tensors);

// Whether tensors have the sizes, strides and dtypes of others.
bool laid_out_as(const Tensors& tensors, const Tensors& others);

// Memory that contains all elements of a tensor, and nothing of other tensors if it is dense.
Span span_of(const at::Tensor& tensor);
std::vector<Span> spans_of(const Tensors& tensors);

void set_zero(const Tensors& tensors);
// Numbers from 0 to 1 that differ, whatever the state of random generators; integers are 0, which is an index.
void set_example(const Tensors& tensors);
// The memory of new tensors may hold the right answer, of an earlier run.
void set_noise(const Tensors& tensors);
// A copy with the same values, but examples for tensors that are zero: these look like memory that nobody has read.
Tensors tellable(const Tensors& tensors);

// Whether a bit of a contiguous tensor is set.
bool any_bit(const at::Tensor& tensor);
bool same_bits(const at::Tensor& one, const at::Tensor& other);

}  // namespace exportkit
