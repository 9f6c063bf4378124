"""Plans which troublesome values are drawn anew for the comparison with eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exportkit.package.archive import PackageReader
from exportkit.package.case_files import trouble_in, troubled_inputs
from exportkit.sizes import case_label


@dataclass(frozen=True)
class TroublePlan:
    """A call with troublesome values.

    Attributes:
        label: The sizes and the trouble, such as "batch=2; ties in x".
        sizes: The sizes, by dimension.
        kinds: The kind of trouble, by input.
    """

    label: str
    sizes: Mapping[str, int]
    kinds: Mapping[str, str]


def plan_trouble(reader: PackageReader, method: str, most: int) -> list[TroublePlan]:
    """Returns the trouble of a method's recorded cases: export saw that every right kernel answers the same to it.

    Args:
        reader: The artifact.
        method: A method without state.
        most: The greatest number of calls.
    """
    found: dict[str, TroublePlan] = {}
    for case in reader.manifest.cases:
        if [call.method for call in case.calls] != [method] or not (trouble := trouble_in(reader, case)):
            continue
        plan = TroublePlan(case_label(case, trouble), case.calls[0].sizes, troubled_inputs(trouble))
        found.setdefault(trouble, plan)
    return list(found.values())[:most]
