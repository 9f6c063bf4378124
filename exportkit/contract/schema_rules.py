"""Which operator schemas the stable ABI, torch.export and AOTInductor take, and what to write instead of the others."""

from __future__ import annotations

from torch import FunctionSchema

from exportkit.contract.findings import Finding


def schema_findings(schema: FunctionSchema | str) -> tuple[Finding, ...]:
    """Finds what is wrong with a schema, without calling the operator.

    Args:
        schema: A schema, or its text, such as "my_ops::scale(Tensor x, float by) -> Tensor".

    Returns:
        One finding for each argument or result that cannot be taken, with what to write instead as its hint.

    Raises:
        UsageError: The text is not a schema.
    """
    raise NotImplementedError
