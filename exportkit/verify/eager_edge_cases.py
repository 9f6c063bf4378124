"""Plans which edge values are drawn anew for the comparison with eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in, edge_inputs
from exportkit.sizes import case_label


@dataclass(frozen=True)
class EdgeCasePlan:
    """A call with edge values.

    Attributes:
        label: The sizes and the edge values, such as "batch=2; ties in x".
        sizes: The sizes, by dimension.
        kinds: The kind of edge values, by input.
    """

    label: str
    sizes: Mapping[str, int]
    kinds: Mapping[str, str]


def plan_edge_cases(reader: PackageReader, method: str, most: int) -> list[EdgeCasePlan]:
    """Returns the edge values of a method's recorded cases: export saw that right kernels agree on them.

    Args:
        reader: The artifact.
        method: A method without state.
        most: The greatest number of calls.
    """
    found: dict[str, EdgeCasePlan] = {}
    for case in reader.manifest.cases:
        if [call.method for call in case.calls] != [method] or not (edge_case := edge_case_in(reader, case)):
            continue
        plan = EdgeCasePlan(case_label(case, edge_case), case.calls[0].sizes, edge_inputs(edge_case))
        found.setdefault(edge_case, plan)
    return list(found.values())[:most]
