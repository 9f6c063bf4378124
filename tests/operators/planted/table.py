"""What is wrong with each planted operator, and which check must say so with drawn calls alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures import stable_library

FOLDER = Path(__file__).parent
PYTHON = FOLDER / "in_python.py"


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        operator: The operator that has it, without the namespace.
        truth: What is wrong.
        checks: The checks of which one must find it. Empty: drawn calls do not show it.
    """

    operator: str
    truth: str
    checks: tuple[str, ...]


PLANTED = (
    # ends and tails
    Planted("row_sum_from_one", "a sum lacks its first element", ("influence",)),
    Planted("row_sum_short", "a sum lacks its last element", ("influence",)),
    Planted("rows_short", "the last row is left zero", ("batch",)),
    Planted("sum_tail", "a sum lacks the tail after whole vectors", ("own-float64",)),
    Planted("vector_tail", "the tail after whole vectors is copied", ("batch",)),
    Planted("grain_tail", "tails of threads' shares are left zero", ("large",)),
    Planted("narrow_index", "a row's index has 16 bits", ("large",)),
    Planted("fixed_buffer", "a row is copied into a buffer of 256", ("crash",)),
    # memory
    Planted("flat_strides", "strides are not looked at", ("strides",)),
    Planted("aligned_only", "loads are aligned downwards", ("strides",)),
    Planted("peels_two", "at most two elements precede an aligned address", ("strides",)),
    Planted("channels_as_they_lie", "channels last are read, and written contiguous", ("strides",)),
    Planted("tail_not_written", "the last elements are not written", ("determinism",)),
    Planted("sum_from_garbage", "a sum starts at whatever is in memory", ("determinism",)),
    Planted("k_unchecked", "k may be greater than a row", ("strides", "determinism", "crash")),
    Planted("index_unchecked", "an index may lead beyond the rows", ("refuses-alike",)),
    Planted("weight_length_unchecked", "a weight may be shorter than a row", ("strides", "refuses-alike", "crash")),
    Planted("weight_of_one", "a weight of size 1 is read as a row", ("refuses-alike",)),
    Planted("weight_as_float", "a float64 weight is read as float32", ("own-float64",)),
    Planted("empty_row", "an empty row is a division by zero", ("crash",)),
    Planted("leaking", "scratch memory is not freed", ("leak",)),
    # other calls
    Planted("racing_sum", "threads add to the same sums", ("large",)),
    Planted("static_scratch", "scratch memory is static", ("large",)),
    Planted("static_scratch_for_long_rows", "scratch memory is static for long rows", ("large",)),
    Planted("cached_by_address", "a factor is looked up by the address of x", ("determinism",)),
    Planted("one_answer", "answers share memory", ("aliasing",)),
    Planted("holds_its_argument", "the last argument is kept", ("kept-inputs",)),
    # numbers
    Planted("narrow_sum", "sums are taken in 16 bits", ("own-float64",)),
    Planted("float_in_double", "float64 is computed in float32", ("own-float64",)),
    Planted("softmax_not_shifted", "a softmax does not subtract the greatest", ("own-float64",)),
    Planted("cancelling_variance", "a variance cancels", ("own-float64",)),
    Planted("max_without_nan", "the greatest of a row drops NaN", ("nan",)),
    Planted("clamp_without_nan", "a clamp drops NaN", ("nan",)),
    Planted("zero_without_sign", "-0 becomes 0", ()),
    Planted("wrong_constant", "a factor is 0.5005, not 0.5", ()),
    Planted("scale_of_the_batch", "a row is scaled by all rows", ("batch",)),
    # arguments
    Planted("bias_ignored", "the optional bias is not added", ("influence",)),
    Planted("last_ignored", "the last tensor of a list is not added", ("influence",)),
    Planted("same_tensor", "an argument is returned", ("aliasing",)),
    Planted("part_of_the_other", "an output is a part of another", ("aliasing",)),
    Planted("halves_its_argument", "an argument is written to", ("mutation",)),
    # fake kernels
    Planted("fake_dtype", "the fake has another dtype", ("fake-dtype",)),
    Planted("fake_strides", "the fake keeps strides, the kernel does not", ("fake-layouts",)),
    Planted("transposed_answer", "the fake of a transposed answer is contiguous", ("fake-strides",)),
    Planted("fake_device", "the fake has another device", ("fake-device",)),
    Planted("fake_batch", "the fake has a batch of one", ("fake-shape",)),
    Planted("fake_int", "the fake fixes a size with int()", ("exports", "opcheck-dynamic")),
    Planted("fake_rounding", "the fake pads where nothing is missing", ("fake-shape",)),
    Planted("fake_promotion", "the fake does not promote dtypes", ("refuses-alike",)),
    # gradients
    Planted("gradient_without_incoming", "the incoming gradient is ignored", ("gradcheck",)),
    Planted("gradient_factor", "a gradient has a factor too many", ("gradcheck",)),
    Planted("gradient_not_summed", "the gradient of a broadcast weight is not summed", ("gradient-form",)),
    Planted("gradient_of_one_alone", "the weight has no gradient", ()),
    Planted("gradient_flag", "the flag is not looked at in the backward", ("gradcheck",)),
    Planted("gradient_of_gradient", "the second derivative is wrong", ("second-derivative",)),
    Planted("gradient_strides", "the incoming gradient is taken for contiguous", ("gradient-strides",)),
    Planted("gradient_dtype", "the gradient of a 16-bit tensor is float32", ("gradient-form",)),
    Planted("gradient_factor_float32", "without float64: 5 % too much", ("gradcheck",)),
    Planted("gradient_sign_float32", "without float64: the wrong sign", ("gradcheck",)),
    Planted("gradient_term_float32", "without float64: a term is missing", ("gradcheck",)),
)
"""Each fault."""

RIGHT = (
    "right_row_sum", "right_half", "right_softmax", "right_weighted", "right_sine", "right_sine_float32",
    "right_norm_float32",
)  # fmt: skip
"""Operators without a fault, near those that have one."""


def library() -> Path:
    """Builds the kernels."""
    shared = hashlib.sha256((FOLDER / "shared.h").read_bytes()).hexdigest()[:16]
    return stable_library.build(FOLDER / "kernels.cpp", None, f"-I{FOLDER}", f"-DSHARED_{shared}", name="planted")
