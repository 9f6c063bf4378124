"""The protocol's parameters, which HTTP and gRPC share: of a request, of an input, and of an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exportkit.serve.protocol.inference import InferRequest, InputTensor


@dataclass(frozen=True)
class RegionSlice:
    """Where a tensor lies in a registered region of shared memory: `size` bytes from `offset`, in bytes."""

    region: str
    offset: int
    size: int


@dataclass(frozen=True)
class OutputForm:
    """The form in which an output is returned: in `region`, else as binary data, else as JSON."""

    binary: bool
    region: RegionSlice | None = None


@dataclass(frozen=True)
class OutputForms:
    """The form of each output. `default` is for those that the request does not name."""

    default: OutputForm
    named: Mapping[str, OutputForm]

    def of(self, name: str) -> OutputForm:
        """Returns the form of an output."""
        return self.named.get(name, self.default)


def region_slice(name: str, parameters: Mapping[str, Any]) -> RegionSlice | None:
    """Returns where in shared memory the parameters of the tensor `name` say that it lies; None: they do not.

    Raises:
        BadRequestError: Only some of the three parameters are there, or their values are wrong.
    """
    raise NotImplementedError


def output_form(name: str, parameters: Mapping[str, Any], default: OutputForm) -> OutputForm:
    """Returns the form that the parameters of a requested output ask for. Unknown parameters are ignored.

    Raises:
        BadRequestError: A value is wrong.
        NotOfferedError: `classification` is asked for.
    """
    raise NotImplementedError


def checked_request(
    inputs: Sequence[InputTensor], outputs: Sequence[str] | None, id: str, parameters: Mapping[str, Any]
) -> InferRequest:
    """Returns a request, with `priority` and `timeout` (microseconds) of its parameters. Custom ones are ignored.

    Raises:
        BadRequestError: A name is there twice, or a parameter's value is wrong, or its name is reserved.
        NotOfferedError: The request belongs to a sequence.
    """
    raise NotImplementedError
