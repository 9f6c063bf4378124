"""Which target runs on which machine, and the reasons for the others."""

from __future__ import annotations

from typing import Any

import pytest

from exportkit.errors import ManifestConsistencyError, NoTargetError, UsageError
from exportkit.export.cpu_isas import cpu_isas_of
from exportkit.package.manifest import Library, Target
from exportkit.runtime.targets import (
    Host,
    host_cpu_isa,
    host_for,
    library_rejection,
    parse_device,
    pick,
    survey,
)
from tests.package import c_library
from tests.runtime import tiny
from tests.subprocesses import run_interpreter

V2 = ["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]
V3 = V2 + ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]
V4 = V3 + ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]

CPU_HOST = Host("linux-x86_64", "x86-64-v3", "2.13.0+cpu")
GRACE_HOST = Host("linux-aarch64", "armv8.2-a+dotprod+sve+bf16", "2.13.0+cu130", "13.0", ((9, 0),))
ALTRA_HOST = Host("linux-aarch64", "armv8.2-a+dotprod", "2.13.0")
H200_HOST = Host("linux-x86_64", "x86-64-v4", "2.11.0+cu130", "13.0", ((9, 0), (8, 0)))


def cpu(**changes: object) -> Target:
    plain = {"name": "cpu", "platform": "linux-x86_64", "cpu_isa": "x86-64-v3", "built_with_torch": "2.13.0+cpu"}
    return tiny.target(**{**plain, **changes})


def cuda(**changes: object) -> Target:
    plain = {"name": "cuda", "device": "cuda", "cuda_architecture": "sm_90", "built_with_cuda": "13.0"}
    return cpu(**{**plain, **changes})


# In the place of libc's: what reads /proc/cpuinfo is given another file.
OTHER_CPU = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static FILE* other(const char* name, const char* path, const char* mode) {
  FILE* (*real)(const char*, const char*) = dlsym(RTLD_NEXT, name);
  return real(strcmp(path, "/proc/cpuinfo") ? path : getenv("CPUINFO"), mode);
}
FILE* fopen(const char* path, const char* mode) { return other("fopen", path, mode); }
FILE* fopen64(const char* path, const char* mode) { return other("fopen64", path, mode); }
"""
LEVELS = {"x86-64": [], "x86-64-v2": V2, "x86-64-v3": V3, "x86-64-v4": V4}


@pytest.mark.skipif(host_cpu_isa() not in LEVELS, reason="not an x86-64")
def test_the_cpus_level_is_the_highest_of_which_it_has_every_flag(tmp_path):
    preloaded = c_library.build(tmp_path, OTHER_CPU, "-ldl", name="other.so")
    best = list(LEVELS).index(host_cpu_isa())  # the CPU itself is asked, too
    cases = [*((flags, level) for level, flags in LEVELS.items()), (V4[1:], "x86-64"), (V4[:-1], "x86-64-v3")]
    for flags, level in cases:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\n")
        said = run_interpreter(
            "from exportkit.runtime.targets import host_cpu_isa; print(host_cpu_isa())",
            cwd=tmp_path,
            LD_PRELOAD=str(preloaded),
            CPUINFO=str(tmp_path / "cpuinfo"),
        )
        assert list(LEVELS).index(said.strip()) == min(best, list(LEVELS).index(level)), flags


@pytest.mark.parametrize(
    "text", ["gpu", "", "cuda:", "cuda:-1", "cpu:0", "auto:1", "CUDA", "cuda:1 ", "mps", "cuda:1\n"]
)
def test_other_devices_are_refused(text):
    with pytest.raises(UsageError, match="auto, cpu, cuda or cuda:<index>"):
        parse_device(text)


def test_cuda_is_taken_before_the_cpu_where_both_run():
    targets = [cpu(), cuda()]
    assert pick(targets, "auto", H200_HOST).device == "cuda:0"
    assert pick(targets, "cpu", H200_HOST).device == "cpu"
    assert pick(targets, "cpu", H200_HOST).device_index == -1
    assert pick(targets, "auto", CPU_HOST).device == "cpu"


def arm(**changes: object) -> Target:
    return cpu(**{"platform": "linux-aarch64", "cpu_isa": "armv8-a", **changes})


def test_one_package_has_targets_of_both_platforms_and_each_host_takes_its_best():
    targets = [
        cpu(name="v3"),
        cuda(name="gpu"),
        arm(name="neon"),
        arm(name="dot", cpu_isa="armv8.2-a+dotprod"),
        arm(name="sve", cpu_isa="armv8.2-a+dotprod+sve+bf16"),
        cuda(name="grace", platform="linux-aarch64", cpu_isa="armv8-a"),
    ]
    fitting = survey(targets, "auto", GRACE_HOST).fitting
    assert [choice.target.name for choice in fitting] == ["grace", "sve", "dot", "neon"]
    assert pick(targets, "auto", ALTRA_HOST).target.name == "dot"
    assert pick(targets, "auto", ALTRA_HOST._replace(cpu_isa="armv8-a")).target.name == "neon"
    assert pick(targets, "auto", H200_HOST).target.name == "gpu"
    assert pick(targets, "auto", CPU_HOST).target.name == "v3"
    assert survey(targets, "cpu", ALTRA_HOST).rejected["sve"] == (
        "it needs a CPU with armv8.2-a+dotprod+sve+bf16, this CPU has armv8.2-a+dotprod"
    )


def test_a_level_of_one_platform_is_none_of_the_other():
    mixed = [cpu(cpu_isa="armv8-a"), arm(name="arm", cpu_isa="x86-64")]
    for host_, name, level in ((CPU_HOST, "cpu", "armv8-a"), (GRACE_HOST, "arm", "x86-64")):
        with pytest.raises(NoTargetError, match=f"{name}: its instruction set '{level}' is unknown on linux-"):
            pick(mixed, "cpu", host_)


def test_every_instruction_set_that_is_compiled_for_is_a_level_of_its_platform():
    for machine, best in (("x86_64", "x86-64-v4"), ("aarch64", "armv8.2-a+dotprod+sve+bf16")):
        isas = cpu_isas_of(machine)
        targets = [cpu(name=f"t{n}", platform=f"linux-{machine}", cpu_isa=isa) for n, isa in enumerate(isas)]
        found = survey(targets, "cpu", Host(f"linux-{machine}", best, "2.13.0"))
        assert [choice.target.cpu_isa for choice in found.fitting] == isas[::-1]


CPUS = [cpu(name="v3"), cpu(name="v4", cpu_isa="x86-64-v4"), cpu(name="any", cpu_isa=None)]
PTX, GPUS = [cuda(cuda_architecture="sm_80", cuda_ptx=True)], [cuda(name="new")]


@pytest.mark.parametrize(
    ("targets", "device", "machine", "name", "picked"),
    [
        (CPUS, "cpu", H200_HOST, "v4", "cpu"),
        (CPUS, "cpu", CPU_HOST, "v3", "cpu"),
        (CPUS, "cpu", Host("linux-x86_64", "x86-64", "2.13"), "any", "cpu"),
        ([cpu(name="b"), cpu(name="a")], "cpu", CPU_HOST, "b", "cpu"),
        ([cpu(needs_torch="2.11")], "auto", CPU_HOST._replace(torch="2.15.0a0+git1"), "cpu", "cpu"),
        ([*PTX, *GPUS], "auto", H200_HOST, "new", "cuda:0"),
        ([*PTX, *GPUS], "cuda:1", H200_HOST, "cuda", "cuda:1"),
        (PTX, "cuda", H200_HOST._replace(current_cuda=1), "cuda", "cuda:1"),
        (PTX, "cuda:0", H200_HOST._replace(current_cuda=1), "cuda", "cuda:0"),
    ],
)
def test_the_newest_code_that_runs_is_taken_and_the_first_of_equals(targets, device, machine, name, picked):
    choice = pick(targets, device, machine)
    assert (choice.target.name, choice.device) == (name, picked)


@pytest.mark.parametrize(
    ("target", "device", "machine", "reason"),
    [
        (cuda(), "cpu", H200_HOST, "it is for cuda, but device cpu was requested"),
        (cpu(), "cuda", H200_HOST, "it is for cpu, but device cuda was requested"),
        (cpu(platform="linux-aarch64"), "auto", CPU_HOST, "it is for linux-aarch64, this is linux-x86_64"),
        (cpu(needs_torch="2.14"), "auto", CPU_HOST, r"it needs torch 2.14 or newer, this is 2.13.0\+cpu"),
        (cpu(needs_torch="3.0"), "auto", CPU_HOST, "it needs torch 3.0 or newer"),
        (cpu(cpu_isa="x86-64-v4"), "auto", CPU_HOST, "it needs a CPU with x86-64-v4, this CPU has x86-64-v3"),
        (cpu(cpu_isa="x86-64-v9"), "auto", CPU_HOST, "its instruction set 'x86-64-v9' is unknown"),
        (cuda(cpu_isa="x86-64-v4"), "auto", CPU_HOST, "it needs a CPU with x86-64-v4"),
        (cuda(), "auto", CPU_HOST, r"it needs CUDA, this torch \(2.13.0\+cpu\) is a CPU build"),
        (cuda(built_with_cuda="12.8"), "auto", H200_HOST, "it was built with CUDA 12.8, this torch has CUDA 13.0"),
        (
            cuda(),
            "auto",
            Host("linux-x86_64", "x86-64-v4", "2.13", "13.0"),
            "it needs a CUDA device, and torch sees none",
        ),
        (cuda(), "cuda:2", H200_HOST, r"it cannot run on cuda:2, torch sees 2 CUDA device\(s\)"),
        (cuda(), "cuda:1", H200_HOST, "it has code for sm_90, cuda:1 is sm_80"),
        (cuda(cuda_ptx=True), "cuda:1", H200_HOST, "it has code for sm_90 and PTX, cuda:1 is sm_80"),
        (cuda(cuda_architecture="sm_80"), "cuda:0", H200_HOST, "it has code for sm_80, cuda:0 is sm_90"),
        (cuda(cuda_architecture="sm_80a", cuda_ptx=True), "cuda:0", H200_HOST, "it has code for sm_80a and PTX"),
        (cuda(cuda_architecture="gfx90a"), "cuda:0", H200_HOST, "its CUDA architecture 'gfx90a' is unknown"),
    ],
)
def test_a_target_that_does_not_run_here_is_refused_with_the_reason(target, device, machine, reason):
    with pytest.raises(
        NoTargetError, match=rf"no target of the package runs here \(device {device}\):\n  \w+: {reason}"
    ):
        pick([target], device, machine)


@pytest.mark.parametrize(
    ("architecture", "ptx", "capability"),
    [
        ("sm_90", False, (9, 0)),
        ("sm_90a", False, (9, 0)),
        ("sm_80", False, (8, 6)),
        ("sm_80", True, (8, 0)),
        ("sm_80", True, (9, 0)),
        ("sm_90", True, (12, 0)),
        ("sm_120", False, (12, 0)),
        ("sm_100f", False, (10, 3)),
    ],
)
def test_code_runs_on_its_architecture_and_ptx_on_later_ones(architecture, ptx, capability):
    machine = Host("linux-x86_64", "x86-64-v4", "2.13.0+cu130", "13.0", (capability,))
    choice = pick([cuda(cuda_architecture=architecture, cuda_ptx=ptx)], "auto", machine)
    native = architecture.rstrip("af")[3:-1] == str(capability[0])
    assert (choice.device, choice.fit) == ("cuda:0", "native" if native else "ptx")


@pytest.mark.parametrize(
    ("architecture", "capability"),
    [("sm_100a", (10, 3)), ("sm_103f", (10, 0)), ("sm_120a", (12, 1)), ("sm_90a", (10, 0)), ("sm_103", (10, 0))],
)
def test_code_for_one_architecture_is_chosen_on_no_other(architecture, capability):
    machine = Host("linux-x86_64", "x86-64-v4", "2.13.0+cu130", "13.0", (capability,))
    with pytest.raises(NoTargetError, match=f"it has code for {architecture}, cuda:0 is sm_"):
        pick([cuda(cuda_architecture=architecture)], "auto", machine)


def test_gpus_are_looked_for_only_where_a_target_might_run_there(monkeypatch):
    asked = []
    monkeypatch.setattr("exportkit.runtime.targets.host", lambda with_cuda: asked.append(with_cuda))
    both = [cpu(), cuda()]
    for targets, device in (([cpu()], "auto"), (both, "cpu"), (both, "auto"), ([cuda()], "cuda:1")):
        host_for(targets, device)
    assert asked == [False, False, True, True]


def test_a_package_without_compiled_code_says_what_it_is():
    with pytest.raises(NoTargetError, match=r"no compiled target(?s:.*)exportkit export"):
        pick([], "auto", CPU_HOST)


# --- libraries --------------------------------------------------------------------------------------------------------


def library(needs_torch: str = "2.11", torch_bound: str | None = None, **changes: Any) -> Library:
    plain = {"platform": "linux-x86_64", "needs_torch": needs_torch, "torch_bound": torch_bound}
    return tiny.library(b"", **{**plain, **changes})


def test_a_target_does_not_run_where_its_library_lacks_one_that_it_needs():
    libraries = [library(name="_C.abi3.so", needs=("GLIBC_2.34", "libc.so.6", "libcudart.so.99"))]
    reason = "its operator library '_C.abi3.so' needs 'libcudart.so.99', which this host does not have"
    assert survey([cpu(), cuda()], "cuda", H200_HOST, []).rejected.keys() == {"cpu"}
    with pytest.raises(NoTargetError, match=f"\n  cpu: {reason}\n  cuda: {reason}"):
        survey([cpu(), cuda()], "auto", H200_HOST, libraries)


def test_libraries_that_the_host_or_the_package_has_are_not_missed():
    libraries = [library(needs=("libc.so.6", "liby.so")), library(name="liby.so", needs=("GLIBCXX_3.4.99",))]
    assert pick([cpu()], "cpu", CPU_HOST, libraries).device == "cpu"


def test_what_a_library_for_another_device_or_platform_needs_is_not_asked_for():
    needy = library(device="cuda", needs=("libcudart.so.99",))
    assert survey([cpu()], "cpu", CPU_HOST, [needy]).rejected == {}
    elsewhere = library(needs=("libcudart.so.99",), platform="linux-aarch64")
    assert survey([cpu()], "cpu", CPU_HOST, [elsewhere]).rejected == {}


def test_a_need_that_is_a_path_is_not_opened(tmp_path):
    body = "#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { abort(); }"
    evil = c_library.build(tmp_path, body, name="libevil.so")
    with pytest.raises(NoTargetError, match=r"libevil\.so', which this host does not have"):
        pick([cpu()], "cpu", CPU_HOST, [library(needs=(str(evil),))])


def test_a_stable_library_works_from_its_torch_on():
    assert library_rejection(library("2.11", None), "2.11.0+cu130") is None
    assert library_rejection(library("2.11", None), "3.0.0") is None
    assert library_rejection(library("2.12", None), "2.11.0") == "it needs torch 2.12 or newer, this is 2.11.0"


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "3.13.0"])
def test_a_bound_library_works_with_its_minor_version_only(version):
    assert library_rejection(library("2.13", "2.13"), "2.13.4+cu130") is None
    reason = library_rejection(library("2.13", "2.13"), version)
    assert f"torch 2.13, which works with that minor version only; this is torch {version}" in reason


def test_what_is_no_version_is_the_packages_fault():
    with pytest.raises(ManifestConsistencyError, match="invalid version 'nightly'"):
        library_rejection(library("nightly", None), "2.13.0")
