"""Packages in registries of containers, as OCI artifacts: `exportkit push`, `pull`, and `inspect` and `serve` of them.

    oci_reference       oci://host/name:tag@sha256:...
    docker_credentials  the user's password for a registry, from docker's configuration
    authorization       what a registry asks for before it answers: a password, or a token for one
    registry_client     requests: TLS, redirects, limits, repetition
    oci_artifact        the manifests, and what a package's must have
    image               packages as images, for what mounts images
    blob_upload         blobs by pieces, and on from where it was cut
    blob_download       likewise, hashed while it comes
    referrers           the signatures of a package
    push, pull          both directions
    pulled_packages     packages in the cache, for `exportkit serve`

Nothing here imports torch, or runs anything of a package. docs/adr/0061-registries.md says what is decided.
"""
