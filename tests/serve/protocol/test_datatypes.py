from __future__ import annotations

import numpy as np
import pytest
import torch
from tritonclient.utils import triton_to_np_dtype

from exportkit.package.dtypes import DTYPES
from exportkit.serve.protocol.datatypes import datatype_of, dtype_of, item_size
from exportkit.serve.statuses import BadRequestError, NotOfferedError
from tests.serve.protocol.messages import NUMPY


@pytest.mark.parametrize("datatype", NUMPY)
def test_a_datatype_is_torchs_and_the_clients(datatype: str) -> None:
    dtype = getattr(torch, dtype_of(datatype))
    assert torch.empty(1, dtype=dtype).element_size() == item_size(datatype)
    assert datatype_of(dtype_of(datatype)) == datatype
    assert np.dtype(triton_to_np_dtype(datatype)) == np.dtype(NUMPY[datatype])
    assert torch.empty(1, dtype=dtype).element_size() == NUMPY[datatype](0).nbytes


def test_dtypes_of_packages_have_a_datatype_or_are_refused_by_name() -> None:
    refused = {dtype for dtype in DTYPES if dtype.startswith(("complex", "float8"))}
    for dtype in DTYPES - refused:
        assert dtype_of(datatype_of(dtype)) == dtype
    for dtype in refused:
        with pytest.raises(NotOfferedError, match=rf"no datatype for {dtype}; .*float32"):
            datatype_of(dtype)


def test_text_and_unknown_datatypes_are_refused_by_name() -> None:
    with pytest.raises(NotOfferedError, match="BYTES is for text"):
        dtype_of("BYTES")
    with pytest.raises(BadRequestError, match=r"no datatype `fp32`; allowed are BOOL, .*FP64"):
        item_size("fp32")
