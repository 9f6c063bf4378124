from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
import tritonclient.utils.shared_memory as client_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exportkit.serve.protocol.answer_body import encode_answer
from exportkit.serve.protocol.parameters import RegionSlice
from exportkit.serve.protocol.shared_memory import SharedMemory, input_of_region
from exportkit.serve.protocol.tensors import TensorSpec
from exportkit.serve.statuses import BadRequestError, NotOfferedError, NotServedError, TooLargeError
from tests.serve.protocol.messages import answer_of, described, parsed


@pytest.fixture
def name() -> Iterator[str]:
    """A name in /dev/shm under which a test puts something else than a file."""
    name = f"exportkit-{uuid.uuid4().hex}"
    yield name
    path = Path("/dev/shm") / name
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- registering ------------------------------------------------------------------------------------------------------


def test_regions_are_listed_as_triton_lists_them_and_forgotten(shared_file: Path) -> None:
    before, memory = _descriptors(), SharedMemory()
    memory.register_body("a", json.dumps({"key": f"/{shared_file.name}", "offset": 8, "byte_size": 16}).encode())
    memory.register_body("b", json.dumps({"key": shared_file.name, "byte_size": 4096}).encode())
    a = {"name": "a", "key": f"/{shared_file.name}", "offset": 8, "byte_size": 16}
    assert memory.status() == [a, {"name": "b", "key": shared_file.name, "offset": 0, "byte_size": 4096}]
    assert memory.status("a") == [a]
    memory.unregister("a")
    memory.unregister("unknown")
    assert [region["name"] for region in memory.status()] == ["b"]
    with pytest.raises(NotServedError, match="no region `a` is registered"):
        memory.status("a")
    memory.unregister()
    assert (memory.status(), _descriptors()) == ([], before)


@pytest.mark.parametrize(
    "key",
    [
        "", "/", ".", "..", "/..", "//name", "a/b", "/a/b", "../etc/passwd", "/../etc/passwd", "/etc/passwd",
        "/dev/shm/name", "name\0", "n" * 256, "é" * 200,
    ],
)  # fmt: skip
def test_only_plain_names_under_dev_shm_are_keys(key: str) -> None:
    with pytest.raises(BadRequestError, match="is not the name of shared memory"):
        SharedMemory().register("r", key, 0, 1)


def test_links_folders_pipes_and_what_is_missing_are_refused(name: str, shared_file: Path) -> None:
    path, before = Path("/dev/shm") / name, _descriptors()

    def assert_refused(words: str) -> None:
        with pytest.raises(BadRequestError, match=f"`/{name}` {words}"):
            SharedMemory().register("r", f"/{name}", 0, 1)

    assert_refused("cannot be opened: No such file")
    for target in ("/etc/hostname", str(shared_file)):
        path.symlink_to(target)
        assert_refused("cannot be opened: it is a symbolic link")
        path.unlink()
    os.mkfifo(path)
    assert_refused("is not a regular file")
    path.unlink()
    path.mkdir()
    assert_refused("cannot be opened: Is a directory")
    assert _descriptors() == before


@pytest.mark.parametrize(
    ("offset", "size", "words"),
    [
        (0, 4097, "has 4096 bytes, and 4097 are needed"),
        (4096, 1, "has 4096 bytes, and 4097 are needed"),
        (1 << 62, 1 << 61, "has 4096 bytes"),
        (-1, 1, "an offset is not negative"),
        (0, 0, "a size is at least 1"),
        (0, -1, "a size is at least 1"),
        (1 << 62, 1 << 62, "offset"),
        (10**300, 1, "offset"),
    ],
)
def test_a_region_that_leaves_its_file_is_refused(shared_file: Path, offset: int, size: int, words: str) -> None:
    before = _descriptors()
    with pytest.raises(BadRequestError, match=words):
        SharedMemory().register("r", shared_file.name, offset, size)
    assert _descriptors() == before


def test_a_name_is_registered_once_and_not_without_end(shared_file: Path) -> None:
    memory = SharedMemory()
    with pytest.raises(BadRequestError, match="name is empty"):
        memory.register("", shared_file.name, 0, 1)
    for number in range(256):
        memory.register(str(number), shared_file.name, 0, 1)
    with pytest.raises(BadRequestError, match="256 regions are registered"):
        memory.register("one more", shared_file.name, 0, 1)
    memory.unregister("0")
    with pytest.raises(BadRequestError, match="a region `1` is registered"):
        memory.register("1", shared_file.name, 0, 1)
    memory.close()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"key": "k"}', b'{"key": 1, "byte_size": 1}', b'{"key": "k", "byte_size": 1.5}', b"\xff",
        b'{"key": "k", "byte_size": 1, "size": 1}', b'{"key": "k", "byte_size": "1"}', b'{"a":' * 100_000,
    ],
)  # fmt: skip
def test_a_body_that_registers_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match=r"(?s)the body does not register a region.*byte_size"):
        SharedMemory().register_body("r", body)


# --- reading and writing ----------------------------------------------------------------------------------------------


@given(st.integers(0, 2048), st.integers(0, 2048), st.binary(max_size=2048))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_are_read_and_written_where_they_lie(
    region: SharedMemory, shared_file: Path, offset: int, size: int, data: bytes
) -> None:
    content = bytearray(os.urandom(4096))
    shared_file.write_bytes(content)
    where = RegionSlice("r", offset, size)
    if offset + size > 2048:
        with pytest.raises(BadRequestError, match="leave the region `r`, which has 2048 bytes"):
            region.read(where)
        with pytest.raises(BadRequestError, match="leave the region `r`, which has 2048 bytes"):
            region.write(where, memoryview(b""))
    else:
        assert region.read(where) == content[2048 + offset : 2048 + offset + size]
        if len(data) > size:
            with pytest.raises(BadRequestError, match=f"has {len(data)} bytes; {size} are offered in the region `r`"):
                region.write(where, memoryview(data))
        else:
            region.write(where, memoryview(data))
            content[2048 + offset : 2048 + offset + len(data)] = data
    assert shared_file.read_bytes() == content


def test_a_file_that_was_truncated_is_refused_and_not_made_longer(region: SharedMemory, shared_file: Path) -> None:
    os.truncate(shared_file, 2048 + 16)
    where = RegionSlice("r", 0, 17)
    with pytest.raises(BadRequestError, match="has 2064 bytes, and 2065 are needed"):
        region.read(where)
    with pytest.raises(BadRequestError, match="has 2064 bytes, and 2065 are needed"):
        region.write(where, memoryview(bytes(17)))
    assert shared_file.stat().st_size == 2048 + 16


def test_a_client_that_truncates_while_the_server_reads_and_writes_ends_nothing(shared_file: Path) -> None:
    size, stop = 1 << 20, threading.Event()
    os.truncate(shared_file, size)
    memory = SharedMemory()
    memory.register("r", shared_file.name, 0, size)

    def toggle() -> None:
        while not stop.is_set():
            os.truncate(shared_file, 10)
            os.truncate(shared_file, size)

    thread = threading.Thread(target=toggle)
    thread.start()
    whole, refusals = 0, []
    try:
        while whole < 50 or len(refusals) < 50:
            try:
                assert memory.read(RegionSlice("r", 0, size)).nbytes == size
                memory.write(RegionSlice("r", 0, size), memoryview(bytes(size)))
                whole += 1
            except BadRequestError as error:
                refusals.append(error.message)
    finally:
        stop.set()
        thread.join()
        memory.close()
    assert all("was truncated" in refusal or "are needed" in refusal for refusal in refusals)


def test_a_region_that_is_unregistered_while_it_is_read_gives_no_other_file(
    shared_file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path("/dev/shm") / name
    other.write_bytes(b"\2" * 4096)
    shared_file.write_bytes(b"\1" * 4096)
    before, memory, read = _descriptors(), SharedMemory(), os.preadv
    memory.register("r", shared_file.name, 0, 4096)

    def exchange() -> None:
        memory.unregister("r")
        memory.register("other", other.name, 0, 4096)  # gets the descriptor that is free now

    thread = threading.Thread(target=exchange)

    def preadv(*arguments: Any) -> int:
        thread.start()
        thread.join(0.1)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert memory.read(RegionSlice("r", 0, 4096)) == b"\1" * 4096
    thread.join()
    assert [region["name"] for region in memory.status()] == ["other"]
    memory.close()
    assert _descriptors() == before


def test_a_tensor_does_not_change_when_the_client_writes_again(region: SharedMemory, shared_file: Path) -> None:
    tensor = input_of_region(region, TensorSpec.of("x", "UINT8", [4]), RegionSlice("r", 0, 4))
    shared_file.write_bytes(b"\1" * 4096)
    assert tensor.data == bytes(4)


def test_a_region_stays_the_file_that_was_registered(region: SharedMemory, shared_file: Path) -> None:
    shared_file.unlink()
    shared_file.write_bytes(b"\1" * 4096)
    assert region.read(RegionSlice("r", 0, 4)) == bytes(4)


# --- in requests and answers ------------------------------------------------------------------------------------------


def _at(size: int, offset: int = 0, region: str = "r") -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }


@pytest.mark.parametrize(
    ("parameters", "shape", "words"),
    [
        (_at(8), [3], r"`x` \(FP32, shape \[3\]\) needs 12 bytes; 8 were given"),
        (_at(12, 2048), [3], "12 bytes from 2048 leave the region `r`"),
        (_at(12, -1), [3], "`shared_memory_offset` of the tensor `x` is not a whole number"),
        (_at(12, region="q"), [3], "no region `q` is registered"),
        (_at(12, region=""), [3], "`shared_memory_region` of the tensor `x` is not the name"),
        (_at(12) | {"binary_data_size": 12}, [3], "its data in two places"),
        ({"shared_memory_region": "r"}, [3], "`shared_memory_byte_size` of the tensor `x` is missing"),
        (_at(1 << 63), [1 << 61], "no memory can hold"),
    ],
)
def test_inputs_that_do_not_lie_in_their_region_are_refused(
    region: SharedMemory, parameters: dict[str, Any], shape: list[int], words: str
) -> None:
    with pytest.raises(BadRequestError, match=words):
        parsed({"inputs": [described(shape=shape, parameters=parameters)]}, shared_memory=region)


def test_the_regions_of_a_client_are_its_own(shared_file: Path) -> None:
    memory = SharedMemory()
    one, other = memory.of("one"), memory.of("other")
    one.register("r", f"/{shared_file.name}", 0, 8)
    assert [each["name"] for each in one.status()] == ["r"]
    assert other.status() == memory.status() == []
    other.unregister()
    other.register("r", f"/{shared_file.name}", 0, 4)
    assert (memory.of("one").largest, memory.of("other").largest, memory.of("").largest) == (8, 4, 0)
    memory.close()
    assert one.status() == []


def test_inputs_in_shared_memory_take_no_more_memory_than_a_request_may(region: SharedMemory) -> None:
    inputs = [described(f"x{number}", shape=[256], parameters=_at(1024)) for number in range(3)]
    assert len(parsed({"inputs": inputs}, shared_memory=region, max_bytes=3072).request.inputs) == 3
    with pytest.raises(
        TooLargeError, match="the inputs have more than 3071 bytes, which no request of this model needs"
    ):
        parsed({"inputs": inputs}, shared_memory=region, max_bytes=3071)


def test_a_server_without_shared_memory_says_so() -> None:
    with pytest.raises(NotOfferedError, match=r"(?s)not offer shared memory.*--shared-memory"):
        parsed({"inputs": [described(shape=[3], parameters=_at(12))]})


def test_a_bool_in_shared_memory_is_checked_too(region: SharedMemory, shared_file: Path) -> None:
    shared_file.write_bytes(b"\2" * 4096)
    with pytest.raises(BadRequestError, match="neither 0 nor 1"):
        parsed({"inputs": [described(shape=[3], datatype="BOOL", parameters=_at(3))]}, shared_memory=region)


def test_the_client_sends_and_receives_through_shared_memory(name: str) -> None:
    sent, returned = np.arange(12, dtype=np.float32), np.arange(6, dtype=np.int64)
    handle = client_memory.create_shared_memory_region("tensors", f"/{name}", 256)
    client_memory.set_shared_memory_region(handle, [sent], offset=16)
    memory = SharedMemory()
    memory.register("tensors", f"/{name}", 16, 240)
    tensor = client.InferInput("x", [3, 4], "FP32")
    tensor.set_shared_memory("tensors", sent.nbytes)
    wanted = client.InferRequestedOutput("y")
    wanted.set_shared_memory("tensors", 64, offset=112)
    header, length = client.InferenceServerClient.generate_request_body([tensor], outputs=[wanted])
    received = parsed(header, length=length, shared_memory=memory)
    assert received.request.inputs[0].data == sent.tobytes()
    length, parts = encode_answer(answer_of({"y": ("INT64", returned)}), received.forms, memory)
    result = client.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)
    parameters = {"shared_memory_region": "tensors", "shared_memory_offset": 112, "shared_memory_byte_size": 48}
    assert result.get_output("y") == {"name": "y", "datatype": "INT64", "shape": [6], "parameters": parameters}
    assert np.array_equal(client_memory.get_contents_as_numpy(handle, np.int64, [6], offset=128), returned)
    memory.close()
    with pytest.raises(BadRequestError, match="no region `tensors` is registered"):
        encode_answer(answer_of({"y": ("INT64", returned)}), received.forms, memory)
    client_memory.destroy_shared_memory_region(handle)
