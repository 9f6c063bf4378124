"""Compares the elements of tensors, of every dtype that a package can hold, with NumPy alone."""

from __future__ import annotations

from exportkit.package.dtypes import ITEM_BYTES, values_of


def greatest_difference(dtype: str, a: bytes, b: bytes) -> float:
    """Returns the greatest absolute difference of the elements of two tensors, or of two chunks of them.

    Two NaNs are equal, and an infinity equals itself. The difference is inf where only one of both is NaN or infinite.

    Args:
        dtype: torch's name of the dtype.
        a: Elements of the first tensor.
        b: As many elements of the second tensor.
    """
    import numpy as np

    if not a:
        return 0.0
    if not dtype.startswith(("float", "bfloat", "complex")):
        kind = np.dtype("uint8" if dtype == "bool" else dtype)
        one, other = np.frombuffer(a, kind), np.frombuffer(b, kind)
        # The difference of two int64 may not fit into int64, but it does fit into uint64, in which it wraps around.
        unsigned = np.dtype(f"uint{8 * kind.itemsize}")
        wide, low = np.where(one > other, one, other).view(unsigned), np.where(one > other, other, one).view(unsigned)
        return float((wide - low).max())
    with np.errstate(all="ignore"):
        # The real and the imaginary parts of complex elements are compared one by one.
        first, second = (
            each.view(each.real.dtype).astype(np.float64) for each in (values_of(dtype, a), values_of(dtype, b))
        )
        difference = np.abs(first - second)
    difference[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())


def in_order(content: bytes, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Returns dense elements with these strides in the order of the indices."""
    import numpy as np

    size = ITEM_BYTES[dtype]
    kind = np.dtype(f"V{size}")
    if not content:
        return content
    view = np.ndarray(shape, kind, content, strides=tuple(size * stride for stride in strides))
    return np.ascontiguousarray(view).tobytes()
