"""The files in deploy/ have the form that their readers ask for, and their commands are ours."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from exportkit.cli.app import group
from exportkit.deployment import triton
from exportkit.package.manifest import FORMAT_VERSION

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check_arguments(arguments: list[str]) -> dict[str, Any]:
    """The options that `exportkit serve` reads from these arguments. Files need not exist."""
    command = group.get_command(click.Context(group), "serve")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type = click.Path()
    with command.make_context("serve", list(arguments)) as context:
        return context.params


def check_triton_arguments(arguments: list[str]) -> dict[str, Any]:
    """What Triton makes of these arguments."""
    values = dict(argument.removeprefix("--").split("=") for argument in arguments)
    timeout = float(values.get("exit-timeout-secs", 30))
    return {"port": int(values.get("http-port", 8000)), "drain_seconds": timeout}


def check_pod(
    pod: dict[str, Any],
    container: dict[str, Any],
    check: Callable[[list[str]], dict[str, Any]] = check_arguments,
) -> None:
    """What holds for every pod of ours: little authority, and time to drain."""
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    values = {variable["name"]: variable["value"] for variable in container["env"]}
    given = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument) for argument in container["args"]]
    options = check(given)
    assert options["port"] in {port["containerPort"] for port in container["ports"]}
    stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert options["drain_seconds"] + float(stop[1]) < pod.get("terminationGracePeriodSeconds", 60)
    assert values["OMP_NUM_THREADS"] == container["resources"]["limits"]["cpu"]
    paths = {"livenessProbe": "/v2/health/live", "readinessProbe": "/v2/health/ready"}
    assert {name: container[name]["httpGet"]["path"] for name in paths} == paths


@pytest.mark.parametrize("folder", ["kubernetes", "kserve", "triton"])
def test_the_manifests_fit_the_schemas_of_kubernetes(folder: str):
    """Of a serving runtime, which Kubernetes does not know, its pod does."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = [each for file in sorted((DEPLOY / folder).glob("*.yaml")) for each in documents(f"{folder}/{file.name}")]
    runtimes = [each["spec"] for each in found if each["kind"] == "ServingRuntime"]
    pods = [{key: spec[key] for key in ("containers", "volumes")} for spec in runtimes]
    known = [each for each in found if "kserve" not in each["apiVersion"]]
    known += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod} for pod in pods]
    assert known
    for document in known:
        for version in ("1.30", "1.34"):
            validate.validate(document, version, strict=True)
        document["spec"]["unknown"] = 1  # the check can fail
        with pytest.raises(validate.ValidationError):
            validate.validate(document, "1.34", strict=True)


@pytest.mark.parametrize(
    ("file", "check"), [("kubernetes/exportkit", check_arguments), ("triton/kubernetes", check_triton_arguments)]
)
def test_the_kubernetes_manifest_is_one_of_ours(file: str, check: Callable[[list[str]], dict[str, Any]]):
    deployment, service, budget = documents(f"{file}.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_pod(pod, container, check)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    assert [*selectors, budget["spec"]["selector"]["matchLabels"]] == [labels] * 3
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in container["ports"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["cache"] == "/cache"  # EXPORTKIT_CACHE of the image
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]


@pytest.mark.parametrize(("folder", "check"), [("kserve", check_arguments), ("triton", check_triton_arguments)])
def test_the_serving_runtime_is_one_of_ours(folder: str, check: Callable[[list[str]], dict[str, Any]]):
    (runtime,), (service,) = documents(f"{folder}/servingruntime.yaml"), documents(f"{folder}/inferenceservice.yaml")
    (container,) = runtime["spec"]["containers"]
    predictor = service["spec"]["predictor"]
    check_pod({"terminationGracePeriodSeconds": predictor["terminationGracePeriodSeconds"]}, container, check)
    assert container["name"] == "kserve-container"
    model, (offered,) = predictor["model"], runtime["spec"]["supportedModelFormats"]
    assert model["modelFormat"] == {key: offered[key] for key in ("name", "version")}
    assert offered["version"] == str(FORMAT_VERSION)
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


# --- the images -------------------------------------------------------------------------------------------------------


def instructions(folder: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / folder / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            instruction, _, rest = line.partition(" ")
            yield instruction, rest.strip()


def final_stage(folder: str) -> dict[str, str]:
    found = list(instructions(folder))
    return dict(found[max(i for i, (kind, _) in enumerate(found) if kind == "FROM") :])


@pytest.mark.parametrize("folder", ["docker", "triton"])
def test_the_images_copy_only_what_is_there_and_what_may_be_sent(folder: str):
    sent = [line.removeprefix("!") for line in (DEPLOY / folder / "Dockerfile.dockerignore").read_text().splitlines()]
    allowed = [pattern for pattern in sent if pattern and not pattern.startswith(("#", "*"))]
    stages = {rest.split(" AS ")[1] for kind, rest in instructions(folder) if kind == "FROM" and " AS " in rest}
    copied = []
    for kind, rest in instructions(folder):
        words = shlex.split(rest)
        if kind == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif kind == "COPY":
            copied += words[:-1]
        elif kind == "RUN":
            assert not re.search(r"build-essential|g\+\+|gcc|cmake|curl|wget", rest)
    assert sorted(copied) == sorted(allowed)
    for source in copied:
        assert source == "dist/exportkit-*.whl" or (ROOT / source).exists()
    assert re.search(r"--dist-dir|dist", (ROOT / "Makefile").read_text())
    assert fnmatch.fnmatch("dist/exportkit-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl", "dist/exportkit-*.whl")


def test_the_image_runs_our_command_as_a_plain_user():
    final = final_stage("docker")
    assert final["USER"] == "10001:10001"
    command = [*json.loads(final["ENTRYPOINT"]), *json.loads(final["CMD"])]
    assert command[:2] == ["exportkit", "serve"]
    options = check_arguments(command[2:])
    assert f"{options['port']} {options['grpc_port'] or 8001}" == final["EXPOSE"]
    check = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert f":{options['port']}/v2/health/live" in check[2]
    assert all(rest.split()[0].endswith("-slim-bookworm") for kind, rest in instructions("docker") if kind == "FROM")


def test_the_image_of_triton_starts_it_as_exportkit_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    final = final_stage("triton")
    assert final["USER"] == "10001:10001"
    (tmp_path / "tritonserver").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "tritonserver").chmod(0o755)
    monkeypatch.setattr(triton, "_backends", lambda: Path("/opt/exportkit/backends"))
    monkeypatch.setattr(triton.secrets, "token_hex", lambda size: "secret")
    wanted = triton.triton_command(Path("/models")).arguments
    command = [*json.loads(final["ENTRYPOINT"]), *json.loads(final["CMD"])]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_KEY": "secret"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == sorted(option for option in wanted[1:] if "address" not in option)
    del environment["TRITON_KEY"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(re.findall(r"exportkit-key=[-0-9a-f]{36}$", done.stdout, re.MULTILINE)) == 2
