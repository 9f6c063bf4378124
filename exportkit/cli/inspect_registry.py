"""`exportkit inspect` of a package in a registry: what its manifest says, without the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exportkit.cli.describe import input_rows, library_text, output_rows, target_text
from exportkit.cli.output import print_json, print_table, printable
from exportkit.progress import bytes_text
from exportkit.registry.oci_reference import RegistryReference

if TYPE_CHECKING:
    from exportkit.package.manifest import Manifest
    from exportkit.registry.referrers import FoundSignature
    from exportkit.registry.registry_client import RegistryOptions


def inspect_in_registry(reference: RegistryReference, options: RegistryOptions, *, as_json: bool) -> None:
    """Prints what a registry has under a reference. The package's file is not fetched, and signatures are not checked.

    Raises:
        ExportkitError: The artifact is not a package, or the registry cannot be reached.
    """
    import msgspec

    from exportkit.package.manifest import decode_manifest
    from exportkit.registry.blob_download import fetch_small
    from exportkit.registry.oci_artifact import fetch_package
    from exportkit.registry.referrers import fetch_signatures
    from exportkit.registry.registry_client import RegistryClient

    client = RegistryClient(reference, "pull", options)
    artifact = fetch_package(client, reference)
    manifest = decode_manifest(fetch_small(client, artifact.config))
    found = fetch_signatures(client, artifact.digest)
    sha256 = artifact.layer.digest.removeprefix("sha256:")
    if as_json:
        print_json(
            {
                "reference": str(reference.at(artifact.digest)),
                "file": {"size": artifact.layer.size, "sha256": sha256},
                "annotations": artifact.annotations,
                "signatures": [{"artifact": one.digest, "kind": one.suffix} for one in found],
                "manifest": msgspec.to_builtins(manifest),
            }
        )
        return
    click.echo(printable(f"{manifest.name} {manifest.version}"))
    print_table(
        [
            ("artifact", str(reference.at(artifact.digest))),
            ("file", f"{bytes_text(artifact.layer.size)}, not fetched"),
            ("sha256", sha256),
            *_signature_rows(found),
            ("made by", f"exportkit {manifest.provenance.exportkit}, torch {manifest.provenance.torch}"),
        ]
    )
    _print_manifest(manifest)


def _signature_rows(found: list[FoundSignature]) -> Iterator[tuple[str, str]]:
    for one in found:
        yield "signature", f"{one.suffix} in {one.digest}; `exportkit pull --public-key` checks it"
    if not found:
        yield "signature", "none in the registry"


def _print_manifest(manifest: Manifest) -> None:
    for method in manifest.methods:
        called = "" if len(manifest.methods) == 1 else f" of method {printable(method.name)}"
        click.echo(f"\nInputs{called}")
        print_table(list(input_rows(method.call)) or [("no tensors",)])
        click.echo(f"\nResults{called}")
        print_table(list(output_rows(method, manifest.cases)) or [("no tensors",)])
    click.echo("\nTargets")
    print_table([(target.name, target_text(target)) for target in manifest.targets])
    if manifest.libraries:
        click.echo("\nLibraries")
        print_table([(Path(one.record).name, library_text(one)) for one in manifest.libraries])
