"""Packages are timed beside the eager model, on references and with operators."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exportkit.arr_coc import model as arr_coc
from exportkit.arr_coc import ops
from exportkit.arr_coc.ops import SPECS
from exportkit.bench import packages
from exportkit.bench.packages import PackageOptions, bench_packages
from exportkit.bench.steps import StepsOf, parse_sizes
from exportkit.bench.timed_models import COMPILERS, NoOperators, OperatorCalledError, WithReferences
from exportkit.errors import SignatureMissingError, UsageError, WrongResultError
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.reference_model import ReferenceModel
from tests.artifacts import artifact
from tests.package.signers import signer

CPU = torch.device("cpu")
PATCHES = ReferenceModel("tests/export/export_models.py:patches")


@pytest.fixture(scope="module")
def package() -> Path:
    return artifact("arr-coc")


@pytest.fixture(scope="module")
def direct() -> Path:
    """Its model calls operators through torch.ops."""
    return artifact("patches")


def bench(*paths, **options):
    chosen = PackageOptions(**{"against": ["eager"], "seconds": 1e-3, **options})
    return list(bench_packages(paths, CPU, chosen, lambda step: None))


@pytest.mark.slow
def test_a_package_is_timed_beside_eager_on_references_and_with_operators(package):
    (row,) = bench(package, sizes=["batch=2,gh=4,gw=4"])
    assert [m.name for m in row.measurements] == ["exportkit", "eager", "eager with operators"]
    assert all(m.call.median > 0 for m in row.measurements)
    assert row.get("exportkit").load_ms > 0
    assert all(0 < m.error < 1e-5 for m in row.measurements)  # against float64
    assert row.limit is None


@pytest.mark.slow
def test_every_way_to_compile_is_timed_under_its_name(direct):
    (row,) = bench(direct, eager=PATCHES, against=list(COMPILERS), sizes=["batch=1,rows=2,columns=2"])
    assert [m.name for m in row.measurements] == ["exportkit", *COMPILERS]
    for name in COMPILERS:
        assert row.get(name).call is not None, row.get(name).note
    assert row.get("freezing").what.startswith("torch.compile with freezing of the eager model")


def test_a_model_with_irreplaceable_operators_is_timed_with_them_and_that_is_said(direct):
    rows = bench(direct, eager=PATCHES)
    with PackageReader(direct) as reader:
        assert len(rows) == sum(not edge_case_in(reader, case) for case in reader.manifest.cases)
    for row in rows:
        assert [m.name for m in row.measurements] == ["exportkit", "eager"]
        assert "through torch.ops" in row.get("eager").what


def test_a_package_is_timed_where_the_key_that_the_caller_names_has_signed_it(direct, tmp_path):
    path, release = Path(shutil.copy(direct, tmp_path / "signed.pt2")), signer(tmp_path)
    with pytest.raises(SignatureMissingError):
        bench(path, against=[], trust=Trust([release.public]))
    signature = sign_package(path, release.key)
    assert bench(path, against=[], trust=Trust([release.public]))
    elsewhere = signature.rename(tmp_path / "elsewhere.sig")
    assert bench(path, against=[], trust=Trust([release.public], elsewhere))


@pytest.mark.slow
def test_two_packages_are_compared_at_a_size_that_is_given(package, tmp_path):
    other = tmp_path / "other.pt2"
    other.write_bytes(package.read_bytes())
    with PackageReader(package) as reader:
        size = ",".join(f"{d.name}={d.min}" for d in reader.manifest.call.dimensions)
    (row,) = bench(package, other, sizes=[size])
    assert [m.name for m in row.measurements][:2] == ["exportkit", str(other)]
    assert row.size == size.replace(",", ", ")


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Changes what eager answered, by its names in the file of a case."""
    right = StepsOf.all

    def wrong(self):
        for steps in right(self):
            yield replace(steps, tensors={key: change(key, tensor) for key, tensor in steps.tensors.items()})

    monkeypatch.setattr(StepsOf, "all", wrong)


@pytest.mark.parametrize("against", [["eager"], []])
def test_results_are_judged_by_their_accuracy_not_by_their_dtypes_tolerance(direct, monkeypatch, against):
    """All that is expected is off by less than float32's tolerance and by more than eager."""
    monkeypatch.setattr(packages, "measure", lambda *args, **options: [])
    assert bench(direct, eager=PATCHES, against=against)
    monkeypatch.setattr(packages, "measure", lambda *args, **options: pytest.fail("timed"))

    def shifted(key, tensor):
        return tensor if ".input." in key or not tensor.is_floating_point() else tensor * (1 + 5e-5)

    changed(monkeypatch, shifted)
    with pytest.raises(WrongResultError, match="rms"):
        bench(direct, eager=PATCHES, against=against)


def test_large_inputs_rotate(direct, monkeypatch):
    calls = []

    def watched(alternatives, *args, **options):
        calls.extend(len(alternative.calls) for alternative in alternatives)
        assert all(alternative.before is None for alternative in alternatives)
        return []

    monkeypatch.setattr(packages, "measure", watched)
    bench(direct, eager=PATCHES, sizes=["batch=1,rows=2,columns=2"])
    assert calls == [4, 4]


@pytest.mark.parametrize("text", ["batch=2", "batch=2,rows=0,columns=1", "batch", "batch=2,x=3", "batch=9999"])
def test_a_size_that_means_nothing_says_what_does(direct, text):
    with PackageReader(direct) as reader:
        call = reader.manifest.call
    with pytest.raises(UsageError, match=r"Give batch \(from \d+ to \d+\), |Write --size batch=N,"):
        parse_sizes(text, call)


def test_references_replace_operators_only_while_they_are_entered():
    model = arr_coc.build().eval()
    args = torch.rand(1, 3, 64, 64), torch.randn(1, model.query_dim)
    references = WithReferences(SPECS.values())
    with torch.no_grad():
        expected = model(*args)
        for _ in range(2):
            with references, NoOperators({"arr_coc"}):
                actual = model(*args)
                assert SPECS["compute_entropy"].wrapper is ops.compute_entropy  # the operators themselves stay
        with NoOperators({"arr_coc"}), pytest.raises(OperatorCalledError, match="arr_coc::"):
            model(*args)
    torch.testing.assert_close(actual["relevance"], expected["relevance"])
