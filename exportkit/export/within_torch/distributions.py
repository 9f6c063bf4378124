"""Traces distributions without the checks that read their arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.distributions import Distribution

from exportkit.export.within_torch.torch_internals import replaced


def unchecked_distributions() -> AbstractContextManager[None]:
    """Leaves these checks out where a model does not ask for them, as torch.compile does."""
    return replaced(Distribution, "_validate_args", lambda _: False)
