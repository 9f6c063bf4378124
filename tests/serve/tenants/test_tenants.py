"""What the file of keys says of each client, and what a client may do by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.errors import UsageError
from exportkit.serve.operations.api_keys import ApiKeys
from exportkit.serve.statuses import LimitError, UnauthorizedError
from exportkit.serve.tenants.key_rules import KeyRules
from exportkit.serve.tenants.tenants import Tenant, Tenants

KEY, OTHER = "0123456789abcdef0123", "another-key-of-a-client"


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.touch(0o600)
    return path


def rules(file: Path, text: str) -> list[KeyRules]:
    file.write_text(text)
    return ApiKeys(file).rules


def refusal(tenant: Tenant) -> LimitError:
    with pytest.raises(LimitError) as refused:
        tenant.begin()
    return refused.value


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_line_says_what_a_key_may_do(file: Path) -> None:
    line = f"{KEY}  label=vision requests=5 rows=2.5e3 burst=3\tin-flight=7 models=net,notes.add"
    (found,) = rules(file, line)
    assert (found.label, found.requests, found.rows, found.burst, found.in_flight) == ("vision", 5, 2500, 3, 7)
    assert found.models == {"net", "notes.add"}
    assert KEY not in repr(found)
    (found,) = rules(file, KEY)
    assert found == KeyRules(found.client)
    assert not found.counted


def test_keys_of_one_label_are_one_client(file: Path) -> None:
    one, other, third = rules(file, f"{KEY} label=a rows=2\n{OTHER} rows=2 label=a\nthird-key-of-nobody-else label=b")
    assert one == other
    assert one.client != third.client
    first, second = rules(file, f"{KEY}\n{OTHER}")
    assert first.client != second.client


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("secret-of-somebody", "line 1 of .* has something behind its key that is no limit"),
        ("# a comment", "is no limit"),
        ("limit=5", "is no limit"),
        ("requests=", "line 1 of .*: requests is a number above 0, got ''"),
        ("requests=0", "a number above 0, got '0'"),
        ("requests=-1", "a number above 0"),
        ("rows=nan", "a number above 0"),
        ("rows=inf", "a number above 0"),
        ("burst=many", "a number above 0"),
        ("in-flight=0", "a whole number above 0"),
        ("in-flight=1.5", "a whole number above 0"),
        ("in-flight=99999999999999999999", "a whole number above 0"),
        ("label=", "letters, digits"),
        ("label=a/b", "letters, digits"),
        (f"label={'x' * 65}", "up to 64 letters"),
        ("models=", "names with commas"),
        ("models=a,,b", "names with commas"),
        ("rows=5 rows=6", "has rows twice"),
    ],
)
def test_what_is_not_understood_is_refused(file: Path, words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        rules(file, f"{KEY} {words}")
    assert KEY not in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "label=NAME" in str(refused.value) or "twice" in says


def test_contradictions_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match=r"lines 1 and 3 of .* have the label a and different limits"):
        rules(file, f"{KEY} label=a rows=2\n\n{OTHER} label=a")
    with pytest.raises(UsageError, match=r"lines 1 and 2 of .* have the same key and different limits"):
        rules(file, f"{KEY}\n{KEY} rows=2")
    many = "".join(f"key-of-client-number-{number} label=c{number}\n" for number in range(1025))
    with pytest.raises(UsageError, match="has 1025 labels, and at most 1024 may be"):
        rules(file, many)


@pytest.mark.parametrize(
    ("models", "package", "name", "sees"),
    [
        (None, "net", "net", True),
        ({"net"}, "net", "net", True),
        ({"net"}, "net", "net.add", True),
        ({"net"}, "net.two", "net.two", False),
        ({"net.add"}, "net", "net.add", True),
        ({"net.add"}, "net", "net", False),
        ({"net.add"}, "net", "net.addition", False),
        ({"net"}, "network", "network", False),
    ],
)
def test_which_models_a_key_is_for(models: set[str] | None, package: str, name: str, sees: bool) -> None:
    assert KeyRules("c", models=None if models is None else frozenset(models)).sees(package, name) is sees


# --- a client ---------------------------------------------------------------------------------------------------------


def test_requests_a_second(clock: Clock) -> None:
    tenant = Tenant(KeyRules("c", requests=0.5, burst=4), clock)
    for _ in range(2):
        tenant.begin()
    refused = refusal(tenant)
    assert refused.message == "this API key may have 0.5 requests a second"
    assert (refused.status, refused.code, refused.retry_after) == (429, "RESOURCE_EXHAUSTED", 2)
    clock.now += 0.5
    assert refusal(tenant).retry_after == 2
    clock.now += refusal(tenant).retry_after
    tenant.begin()
    assert (tenant.requests, tenant.refused) == (3, {"requests": 3})


def test_rows_are_paid_for_before_the_next_request(clock: Clock) -> None:
    tenant = Tenant(KeyRules("c", rows=10), clock)
    tenant.begin()
    tenant.take_rows(30)  # what it had and two seconds more
    assert refusal(tenant).retry_after == 3
    clock.now += 2
    assert refusal(tenant).retry_after == 1
    clock.now += 0.1
    tenant.begin()
    assert (tenant.requests, tenant.rows, tenant.refused) == (2, 30, {"rows": 2})


def test_of_several_that_were_let_in_only_one_goes_beyond_its_rows(clock: Clock) -> None:
    tenant = Tenant(KeyRules("c", rows=10), clock)
    for _ in range(3):
        tenant.begin()
    tenant.take_rows(9)
    tenant.take_rows(500)
    with pytest.raises(LimitError):
        tenant.take_rows(1)
    assert tenant.rows == 509


def test_requests_in_flight(clock: Clock) -> None:
    tenant = Tenant(KeyRules("c", in_flight=2, requests=100), clock)
    with tenant, tenant:
        refused = refusal(tenant)
        assert (refused.message, refused.retry_after) == (
            "this API key may have at most 2 requests at the same time",
            1,
        )
    assert tenant.in_flight == 0
    with tenant:
        assert tenant.in_flight == 1


def test_a_refusal_uses_nothing_up(clock: Clock) -> None:
    tenant = Tenant(KeyRules("c", requests=1, rows=1, in_flight=1), clock)
    with tenant:
        tenant.take_rows(1)
        for _ in range(100):
            refusal(tenant)
    clock.now += 1
    with tenant:
        pass


# --- all clients ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_read_again_leaves_what_was_used(clock: Clock) -> None:
    tenants = Tenants(clock)
    limited = KeyRules("c", label="a", requests=1)
    tenants.change([limited])
    tenant = tenants.get("c")
    assert tenant is not None
    assert tenant.queue == ""  # it shares with nobody
    tenant.begin()
    tenants.change([limited, KeyRules("d")])
    assert tenants.get("c") is tenant
    refusal(tenant)
    assert tenant.queue == "c"
    tenants.change([KeyRules("c", label="a", requests=5)])
    tenant.begin()
    assert [each.rules.label for each in tenants.labelled()] == ["a"]


def test_a_key_that_is_gone_asks_for_nothing_more(clock: Clock) -> None:
    tenants = Tenants(clock)
    tenants.change([KeyRules("c")])
    tenant = tenants.get("c")
    assert tenant is not None
    tenants.change([KeyRules("d")])
    with pytest.raises(UnauthorizedError):
        tenants.get("c")
    with pytest.raises(UnauthorizedError):  # of a stream that it has open
        tenant.begin()
    assert tenants.get("") is None
