"""Says what to install where a part that serving needs is missing."""

from __future__ import annotations

from importlib.util import find_spec

from exportkit.errors import HostError

_SERVE = ("uvicorn", "httptools", "uvloop", "starlette", "prometheus_client", "grpc", "google.protobuf")
_TRACES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_installed(*, traces: bool) -> None:
    """Imports nothing.

    Args:
        traces: Whether traces are asked for.

    Raises:
        HostError: A package is missing. The hint says what installs it.
    """
    for extra, modules in [("serve", _SERVE), *([("traces", _TRACES)] if traces else [])]:
        for module in modules:
            if not _is_there(module):
                what = "`--traces` needs" if extra == "traces" else "`exportkit serve` needs"
                raise HostError(
                    f"{what} the Python package {module}, which is not installed",
                    hint=f"Run `pip install 'exportkit[{extra}]'`.",
                )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
