"""Plans what is compared with eager: sequences of the methods with state, and calls of each other method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exportkit.package.manifest import Manifest
from exportkit.sizes import SizePlan, label_of, plan_sizes
from exportkit.verify.options import VerifyOptions


@dataclass(frozen=True)
class EagerPlan:
    """What is called, and at which sizes: a method without state, or sequences (None). Labels begin with `name`."""

    method: str | None
    sizes: SizePlan
    name: str

    def label(self, sizes: Mapping[str, int]) -> str:
        """Returns such as "batch=2", or "embed: batch=2"."""
        return self.labelled(label_of(sizes))

    def labelled(self, what: str) -> str:
        """Puts the name of the plan before a label."""
        return f"{self.name}: {what}" if self.name else what


def plan_eager(manifest: Manifest, options: VerifyOptions) -> tuple[EagerPlan, ...]:
    """Plans `options.shapes` sequences of the methods with state, and as many calls of each other method."""
    plans = []
    count, limits = options.shapes, {"seed": options.seed, "max_bytes": options.max_input_bytes}
    several = len(manifest.methods) > 1
    if any(method.state for method in manifest.methods):
        from exportkit.export.record.sequences import session_call

        sizes = plan_sizes(session_call(manifest.methods), count, **limits)
        plans.append(EagerPlan(None, sizes, "a session"))
    for method in manifest.methods:
        if not method.state:
            sizes = plan_sizes(method.call, count, **limits)
            plans.append(EagerPlan(method.name, sizes, method.name if several else ""))
    return tuple(plans)
