"""Models are loaded, exchanged and unloaded while requests go on; names of requests never become paths."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exportkit.errors import ExportkitError, NotAnArchiveError, SignatureMissingError, UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.revocation import revoke
from exportkit.package.signing import sign_package
from exportkit.runtime.model import Model
from exportkit.serve.batching.pending import BatchLimits
from exportkit.serve.engine.folder import newest_last, packages_in, single_package
from exportkit.serve.engine.loading import load_replicas
from exportkit.serve.engine.repository import Repository
from exportkit.serve.queries import Queries
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, NotServedError
from tests.package.signers import signer, write_policy
from tests.serve.engine import rows
from tests.serve.engine.asking import equal, only, request, serving, tensors, until


def states(repository: Repository) -> list[tuple[str, str, str]]:
    return [(entry.name, entry.version, entry.state) for entry in repository.index()]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "models"


# --- names ------------------------------------------------------------------------------------------------------------


def test_packages_are_found_by_name_and_version(folder):
    for path in ("a.pt2", "b/1/model.pt2", "b/10/model.pt2", "b/2/other.pt2", "c d.pt2", ".hidden.pt2", "e/model.pt2"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    assert [(each.name, each.version) for each in packages_in(folder)] == [("a", None), ("b", "1"), ("b", "10")]


def test_a_package_is_served_by_its_own_name_wherever_it_lies(rows_package, folder):
    folder.mkdir()
    shutil.copy(rows_package, folder / "model.pt2")
    assert [each.name for each in (single_package(folder / "model.pt2"), *packages_in(folder))] == ["rows", "rows"]


def test_versions_are_sorted_as_people_do():
    versions = ["1.9", "1.9-rc", "1.10", "2", "010", "9" * 5000, "a", "²"]
    shuffled = random.Random(0).sample(versions, len(versions))
    assert sorted(shuffled, key=newest_last) == versions


def test_two_packages_of_one_name_are_refused(folder, tmp_path):
    (folder / "a" / "1").mkdir(parents=True)
    (folder / "a" / "1" / "model.pt2").touch()
    options = [
        ServeOptions(packages=(tmp_path / "a.pt2", tmp_path / "other" / "a.pt2")),
        ServeOptions(packages=(tmp_path / "a.pt2",), repository=folder),
    ]
    for each in options:
        with pytest.raises(UsageError, match="would both be served as a"):
            Repository(each)


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_nothing_is_ready_before_it_is_loaded(rows_package):
    repository = Repository(ServeOptions((rows_package,)))
    assert not repository.ready
    assert states(repository) == [("rows", "", "LOADING")]
    with pytest.raises(NotReadyError, match="loading"):
        repository.model("rows")
    with pytest.raises(NotServedError, match="no model is named other"):
        repository.model("other")
    await repository.open()
    assert repository.ready
    assert states(repository) == [("rows", "1", "READY")]
    with pytest.raises(NotServedError, match="the model rows has no version 2"):
        repository.model("rows", "2")
    assert repository.model("rows", "1") is repository.model("rows")
    assert only(repository).counted.load_seconds > 0
    await repository.drain()


async def test_a_package_that_cannot_be_loaded_raises_its_own_error(tmp_path):
    path = tmp_path / "broken.pt2"
    path.write_bytes(b"no archive")
    repository = Repository(ServeOptions((path,)))
    with pytest.raises(NotAnArchiveError, match=r"broken\.pt2"):
        await repository.open()
    (entry,) = repository.index()
    assert entry.state == "UNAVAILABLE"
    assert "archive" in entry.reason
    assert not repository.ready


async def test_a_package_that_answers_its_recorded_case_wrongly_is_not_served(tmp_path):
    package = rows.write(tmp_path / "rows.pt2", rows.example(2), wrong=0.5)
    with pytest.raises(BackendError, match=r"recorded case 0 wrongly on cpu: sum: 6 of 6 elements differ"):
        await serving(package).__aenter__()


async def test_a_runner_that_cannot_begin_is_an_error_of_loading(rows_package, monkeypatch):
    """Simulated: the device gives no stream."""

    def broken(self):
        raise RuntimeError("no stream")

    async with serving(rows_package) as repository:
        before = only(repository)
        monkeypatch.setattr(Model, "use_own_stream", broken)
        await repository.unload("rows")
        with pytest.raises(BackendError, match="the model rows cannot be loaded: no stream"):
            await repository.load("rows", {})
        assert not before.ready
        assert states(repository) == [("rows", "1", "UNAVAILABLE")]
        monkeypatch.undo()
        await repository.load("rows", {})
        await only(repository).infer(request(rows.example(1)))


async def test_every_runner_is_warm_before_the_model_is_ready(rows_package, monkeypatch):
    calls, run_requests = [], Model.run_requests

    def watched(self, *given):
        calls.append(threading.current_thread().name)
        return run_requests(self, *given)

    monkeypatch.setattr(Model, "run_requests", watched)
    async with serving(rows_package, runners=3) as repository:
        assert calls.count("exportkit runner") == 3
        assert only(repository).counted.executions == 0


async def test_signatures_are_demanded(rows_package, tmp_path):
    package = tmp_path / "signed.pt2"
    shutil.copy(rows_package, package)
    mine = signer(tmp_path)
    options = {"public_keys": (mine.public,), "warm_up": False}
    with pytest.raises(SignatureMissingError):
        await serving(package, **options).__aenter__()
    sign_package(package, mine.key)
    async with serving(package, **options) as repository:
        assert repository.ready


async def test_a_model_that_is_revoked_is_unloaded_when_it_is_loaded_again(rows_package, tmp_path, monkeypatch):
    package = Path(shutil.copy(rows_package, tmp_path / "rows.pt2"))
    lists = [{"list": "revoked.json", "minimum_sequence": 1}]
    policy = write_policy(tmp_path / "policy.json", require_signature=False, revocations=lists)
    revoke(tmp_path / "revoked.json", {}, {})
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    async with serving(package, warm_up=False) as repository:
        with PackageReader(package) as reader:
            digest = reader.manifest_sha256
        policy.chmod(0o666)
        with pytest.raises(BackendError, match="may be written to by other users"):
            await repository.load("rows", {})
        assert repository.ready  # what runs goes on: a bad policy says nothing of this model
        policy.chmod(0o644)
        revoke(tmp_path / "revoked.json", {}, {digest: "wrong weights"})
        with pytest.raises(BackendError, match=r"revoked by .*wrong weights"):
            await repository.load("rows", {})
        (entry,) = repository.index()
        assert entry.state == "UNAVAILABLE"
        assert "wrong weights" in entry.reason
        with pytest.raises(BackendError, match="revoked by"):
            await repository.load("rows", {})


# --- exchanging -------------------------------------------------------------------------------------------------------


async def test_a_package_is_exchanged_without_losing_a_request(tmp_path):
    """Clients ask without a pause."""
    package = rows.write(tmp_path / "rows.pt2", rows.example(2))
    stop, answers = False, 0
    async with serving(package, batch=BatchLimits(max_rows=8)) as repository:

        async def client():
            nonlocal answers
            while not stop:
                model = repository.model("rows")
                inputs = rows.example(2)
                with model.admit(200):
                    await asyncio.sleep(0)  # the body arrives, while the model may be exchanged
                    answer = await model.infer(request(inputs))
                assert equal(tensors(answer), rows.answer(inputs))
                answers += 1

        clients = [asyncio.ensure_future(client()) for _ in range(4)]
        first = held = only(repository)
        for version in ("2", "3"):
            rows.write(package, rows.example(2), version=version)
            await repository.load("rows", {})
            assert only(repository).version == version
        stop = True
        await asyncio.gather(*clients)
        inputs = rows.example(1)
        late = await held.infer(request(inputs))  # by one who looked the model up before
        with held.admit(10):
            pass
    assert answers > 4
    assert late.version == "3"
    assert equal(tensors(late), rows.answer(inputs))
    assert not first.ready
    assert first.counted.failures == {}


def runners() -> int:
    return sum(thread.name == "exportkit runner" for thread in threading.enumerate())


@pytest.fixture
def no_circles():
    """What a model has in memory goes although nobody looks for circles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_an_exchange_does_not_wait_for_a_slow_client_and_leaves_nothing_behind(tmp_path, no_circles):
    package = rows.write(tmp_path / "rows.pt2", rows.example(2))
    async with serving(package) as repository:
        first = only(repository)
        with first.admit(100):  # the body is on its way
            os.utime(package, ns=(1, 1))
            await repository.load("rows", {})
            assert only(repository) is not first
            inputs = rows.example(1)
            assert equal(tensors(await first.infer(request(inputs))), rows.answer(inputs))
            gone = weakref.ref(first)
            del first
        await until(lambda: gone() is None)
        assert runners() == 1
    assert runners() == 0


async def test_the_same_version_goes_on_counting(tmp_path):
    package = rows.write(tmp_path / "rows.pt2", rows.example(2))
    async with serving(package, warm_up=False) as repository:
        await only(repository).infer(request(rows.example(1)))
        before = only(repository)
        await repository.load("rows", {})
        assert only(repository) is before  # nothing has changed
        os.utime(package, ns=(1, 1))
        await repository.load("rows", {})
        assert only(repository) is not before
        await only(repository).infer(request(rows.example(1)))
        assert only(repository).counted.success.count == 2


async def test_a_package_that_cannot_be_loaded_leaves_the_old_one_serving(tmp_path):
    package = rows.write(tmp_path / "rows.pt2", rows.example(2))
    async with serving(package, warm_up=False) as repository:
        before = only(repository)
        package.unlink()
        package.write_bytes(b"no archive")
        with pytest.raises(BackendError, match="the model rows cannot be loaded"):
            await repository.load("rows", {})
        assert only(repository) is before
        assert repository.ready
        await before.infer(request(rows.example(1)))


async def test_the_log_says_what_was_loaded_from_where_what_failed_and_what_was_unloaded(tmp_path):
    package, lines = rows.write(tmp_path / "rows.pt2", rows.example(2), version="0"), []
    async with serving(package, warm_up=False, report=lines.append) as repository:
        rows.write(package, rows.example(2), version="2")
        await repository.load("rows", {})
        package.unlink()
        package.write_bytes(b"no archive")
        with pytest.raises(BackendError):
            await repository.load("rows", {})
        await repository.unload("rows")
    first, second, failed, unloaded = lines  # and no line of the end
    assert first == f"model rows, version 0, on cpu, from {package}"
    assert second == f"model rows, version 2, on cpu, from {package}, in place of version 0"
    assert failed.startswith(f"error: the model rows is not loaded from {package}: ")
    assert failed.endswith("archive; version 2 goes on")
    assert unloaded == "model rows, version 2, is unloaded"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (BatchLimits(max_rows=32, max_queued_bytes=34), []),
        (BatchLimits(max_rows=33), ["--max-batch 33 is never reached by rows: a batch has at most 32 rows"]),
        (
            BatchLimits(max_queued_bytes=33),
            ["--max-queue-bytes 33 refuses every request of rows, whose inputs have at least 34 bytes"],
        ),
    ],
)
async def test_limits_that_a_model_never_meets_are_warned_of(rows_package, limits, said):
    lines = []
    async with serving(rows_package, batch=limits, report=lines.append):
        assert lines[1:] == [f"warning: {line}" for line in said]


async def test_versions_come_and_go(rows_package, folder):
    def put(version):
        (folder / "rows" / version).mkdir(parents=True)
        shutil.copy(rows_package, folder / "rows" / version / "model.pt2")

    put("9")
    async with serving(repository=folder, warm_up=False) as repository:
        nine = repository.model("rows")
        assert nine.version == "9"  # the folder's, not the manifest's
        put("10")
        with pytest.raises(NotServedError):
            repository.model("rows", "10")
        assert states(repository) == [("rows", "9", "READY"), ("rows", "10", "UNAVAILABLE")]
        await repository.load("rows", {})
        assert repository.model("rows").version == "10"
        assert repository.model("rows", "9") is nine
        assert Queries(repository).metadata("rows", "9")["versions"] == ["9", "10"]
        assert [model.version for model in repository.models()] == ["9", "10"]
        shutil.rmtree(folder / "rows" / "10")
        await repository.load("rows", {})
        assert repository.model("rows") is nine
        await repository.unload("rows")
        assert states(repository) == [("rows", "9", "UNAVAILABLE")]
        with pytest.raises(NotReadyError, match="unloaded"):
            repository.model("rows")
        with pytest.raises(NotReadyError):
            await nine.infer(request(rows.example(1)))
        with pytest.raises(NotServedError):
            await repository.unload("rows")
        assert repository.ready
        put("11")
        await repository.load("rows", {})
        assert repository.model("rows").version == "11"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"file:1/model.pt2": "UEsDBA=="}, "code of a stranger"),
        ({"config": "{}"}, "comes from its package, but for the weights"),
        ({"config": '{"max_batch_size": 8}'}, "comes from its package, but for the weights"),
        (
            {"config": '{"parameters": {"weights": {"string_value": "../x.safetensors"}}}'},
            "no weights '../x.safetensors'",
        ),
        ({"config": 3}, "comes from its package, but for the weights"),
        ({"config": "[" * 100_000}, "comes from its package, but for the weights"),
        ({"config": "{}", "weights": "there.safetensors"}, "both given"),
        ({"other": 1}, "`other` is not a parameter"),
        ({"weights": 3}, "must be the name of a file"),
        ({"weights": "../secret.safetensors"}, "no weights"),
        ({"weights": "/etc/passwd"}, "no weights"),
        ({"weights": "outside.safetensors"}, "no weights"),
        ({"weights": "missing.safetensors"}, "beside the package rows: there.safetensors"),
    ],
)
async def test_parameters_that_are_not_allowed_are_refused(rows_package, folder, tmp_path, parameters, message):
    folder.mkdir()
    shutil.copy(rows_package, folder / "rows.pt2")
    save_file({"x": torch.zeros(1)}, folder / "there.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (folder / "outside.safetensors").symlink_to(tmp_path / "secret.safetensors")
    async with serving(repository=folder, warm_up=False) as repository:
        before = only(repository)
        with pytest.raises(BadRequestError) as refusal:
            await repository.load("rows", parameters)
        with pytest.raises(NotServedError):
            await repository.load("../models/rows", {})
        assert only(repository) is before
    assert message in refusal.value.message


async def test_draining_does_not_wait_for_a_load_and_drops_what_it_brings(rows_package, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    loaded = []

    def slow(*args):
        began.set()
        go_on.wait(60)
        loaded.append(load_replicas(*args))
        return loaded[0]

    async with serving(rows_package, warm_up=False) as repository:
        monkeypatch.setattr("exportkit.serve.engine.repository.load_replicas", slow)
        await repository.unload("rows")
        loading = asyncio.ensure_future(repository.load("rows", {}))
        await asyncio.to_thread(began.wait, 60)
        assert states(repository) == [("rows", "1", "LOADING")]
        await repository.drain()
        go_on.set()
        with pytest.raises(ExportkitError, match="drains"):
            await loading
        assert repository.models() == []
    assert not loaded[0].replicas[0].alive
