"""Holds an operator to the contract."""

from __future__ import annotations

from collections.abc import Sequence

from exportkit.contract.findings import OperatorReport
from exportkit.contract.subject import Subject


def check_operator(subject: Subject, only: Sequence[str] = ()) -> OperatorReport:
    """Runs the checks on an operator, in this process.

    A kernel may crash the process: `exportkit ops check` calls this in a child process.

    Args:
        subject: The operator and the calls to try.
        only: The checks to run, by name. Empty: all.

    Returns:
        What each check found. A finding has the smallest of the calls that shows it.
    """
    raise NotImplementedError
