"""The Triton kernels. Importing this module needs Triton.

Kernels named `_rows` hold whole rows in registers, so the row length must be known when they are compiled. Kernels
named `_long_row` process one row of any length in blocks. All compute in float32, or in float64 for float64. A kernel's
arguments in capitals are compile-time constants.
"""

import triton
import triton.language as tl


@triton.jit
def upcast(value):
    """Converts all dtypes except float64 to float32."""
    if value.dtype == tl.float64:
        return value
    else:
        return value.to(tl.float32)


@triton.jit
def softmax_rows(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    value = upcast(tl.load(x + row * columns + column, mask=inside, other=-float("inf")))
    power = tl.exp(value - tl.max(value, 1, keep_dims=True))
    # tl.max may ignore a NaN, but the sum includes it, so the whole row becomes NaN.
    tl.store(out + row * columns + column, power / tl.sum(power, 1, keep_dims=True), mask=inside)


@triton.jit
def softmax_long_row(x, out, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    highest = upcast(tl.load(x + start + column, mask=column < columns, other=-float("inf")))
    finite = tl.where(highest == -float("inf"), 0.0, highest)  # if all values are -inf, subtract nothing
    total = tl.exp(highest - finite)
    for first in range(BLOCK, columns, BLOCK):
        value = upcast(tl.load(x + start + first + column, mask=first + column < columns, other=-float("inf")))
        higher = tl.maximum(highest, value)
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + tl.exp(value - finite)
        highest = higher
    row_highest = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - row_highest), 0)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        value = upcast(tl.load(x + start + first + column, mask=inside))
        tl.store(out + start + first + column, tl.exp(value - row_highest) / total, mask=inside)


@triton.jit
def softmax_grad_rows(grad, output, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    y = upcast(tl.load(output + row * columns + column, mask=inside, other=0.0))
    g = upcast(tl.load(grad + row * columns + column, mask=inside, other=0.0))
    tl.store(out + row * columns + column, y * (g - tl.sum(y * g, 1, keep_dims=True)), mask=inside)


@triton.jit
def softmax_grad_long_row(grad, output, out, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    y = upcast(tl.load(output + start + column, mask=column < columns, other=0.0))
    product = y * upcast(tl.load(grad + start + column, mask=column < columns, other=0.0))
    for first in range(BLOCK, columns, BLOCK):
        inside = first + column < columns
        y = upcast(tl.load(output + start + first + column, mask=inside, other=0.0))
        product += y * upcast(tl.load(grad + start + first + column, mask=inside, other=0.0))
    mean = tl.sum(product, 0)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        y = upcast(tl.load(output + start + first + column, mask=inside))
        g = upcast(tl.load(grad + start + first + column, mask=inside))
        tl.store(out + start + first + column, y * (g - mean), mask=inside)


@triton.jit
def magnitude_bits(value):
    """Returns |value| as an integer with the same order. NaN is above infinity; a maximum of floats would lose NaN."""
    if value.dtype == tl.float64:
        return tl.abs(value).to(tl.int64, bitcast=True)
    else:
        return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def one_for_all(row_sum, SHAPE: tl.constexpr):
    """Makes the copies of a sum of squares equal in all threads, by taking the largest copy.

    If a thread has one element of a row, its square and the first addition become one fused operation, rounded once.
    Its neighbour's square was rounded before it was passed on. So the copies of the sum may differ in the last bit, and
    which copy reaches memory would be random.
    """
    bits = tl.max(magnitude_bits(tl.broadcast_to(row_sum, SHAPE)), 1, keep_dims=True)
    return bits.to(row_sum.dtype, bitcast=True)


@triton.jit
def row_scale(highest_bits, mean_square, like, EPS: tl.constexpr):
    """Returns 1 / rms and the scale of a row from the bits of its highest |x weight|."""
    inverse_rms = tl.rsqrt(mean_square + EPS)
    highest = highest_bits.to(like.dtype, bitcast=True)
    highest = tl.where(highest == 0, highest, highest * inverse_rms)  # 0 stays 0 if 1 / rms is infinite
    scale = (highest / 127).to(tl.float32)
    return inverse_rms, tl.where(scale < 1.1754943508222875e-38, 0.0, scale)


@triton.jit
def quantize(weighted, inverse_rms, scale):
    """Returns round(y / scale), ties to even, as int8; zeros if the scale is zero or not finite."""
    steps = weighted * inverse_rms * (1 / tl.where(scale > 0, scale, 1.0).to(weighted.dtype))
    steps = tl.where((scale > 0) & (scale < float("inf")), steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    # Adding 1.5 * 2^23, or 2^52 in float64, removes the fraction by rounding.
    if steps.dtype == tl.float64:
        return ((steps + 6755399441055744.0) - 6755399441055744.0).to(tl.int8)
    else:
        return ((steps + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def rms_norm_quantize_rows(
    x, weight, out, scales, rows, columns, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    value = upcast(tl.load(x + row * columns + column, mask=inside, other=0.0))
    weighted = value * upcast(tl.load(weight + column, mask=column < columns, other=0.0))
    mean_square = one_for_all(tl.sum(value * value, 1, keep_dims=True), (ROWS, BLOCK)) / columns
    inverse_rms, scale = row_scale(tl.max(magnitude_bits(weighted), 1, keep_dims=True), mean_square, value, EPS)
    tl.store(out + row * columns + column, quantize(weighted, inverse_rms, scale), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def rms_norm_quantize_long_row(x, weight, out, scales, columns, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    column = tl.arange(0, BLOCK)
    value = upcast(tl.load(x + start + column, mask=column < columns, other=0.0))
    square = value * value
    bits = magnitude_bits(value * upcast(tl.load(weight + column, mask=column < columns, other=0.0)))
    for first in range(BLOCK, columns, BLOCK):
        inside = first + column < columns
        value = upcast(tl.load(x + start + first + column, mask=inside, other=0.0))
        square += value * value
        weighted = value * upcast(tl.load(weight + first + column, mask=inside, other=0.0))
        bits = tl.maximum(bits, magnitude_bits(weighted))
    inverse_rms, scale = row_scale(tl.max(bits, 0), tl.sum(square, 0) / columns, value, EPS)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        value = upcast(tl.load(x + start + first + column, mask=inside, other=0.0))
        weighted = value * upcast(tl.load(weight + first + column, mask=inside, other=0.0))
        tl.store(out + start + first + column, quantize(weighted, inverse_rms, scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def add_elements(a, b, out, count, BLOCK: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    total = upcast(tl.load(a + element, mask=inside)) + upcast(tl.load(b + element, mask=inside))
    tl.store(out + element, total, mask=inside)
