"""The clients of a server by their API keys, each with its limits and what it has used of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType

from exportkit.serve.statuses import LimitError, UnauthorizedError
from exportkit.serve.tenants.key_rules import KeyRules
from exportkit.serve.tenants.token_bucket import TokenBucket

Clock = Callable[[], float]

_INVALID = "the API key is no longer valid"


class Tenant:
    """A client. Its context is a request that is not over.

    Attributes:
        rules: What it may do.
        queue: By which name its requests share a queue with others'. Empty: there are no others.
        in_flight: Its requests that are not over.
        requests, rows, answered: How many it had: requests that were let in, rows, inferences that were answered.
        seconds: The time of the answered ones.
        refused: How many were refused, by the limit.
    """

    def __init__(self, rules: KeyRules, clock: Clock = time.monotonic) -> None:
        """Nothing is used yet."""
        self._clock = clock
        self.queue = ""
        self.in_flight = self.requests = self.rows = self.answered = 0
        self.seconds = 0.0
        self.refused: Counter[str] = Counter()
        self._gone = False
        self._set(rules)

    def _set(self, rules: KeyRules) -> None:
        self.rules = rules
        self._request_bucket = _bucket(rules.requests, rules.burst)
        self._row_bucket = _bucket(rules.rows, rules.burst)

    def change(self, rules: KeyRules | None) -> None:
        """The file was read again. What was used counts on, unless the limits are others; None: the key is gone."""
        self._gone = rules is None
        if rules is not None and rules != self.rules:
            self._set(rules)

    def ask(self) -> None:
        """Counts a request.

        Raises:
            LimitError: There were too many, or too many rows. It counts only as refused.
            UnauthorizedError: The key is no longer in the file.
        """
        if self._gone:
            raise UnauthorizedError(_INVALID)
        now, most = self._clock(), self.rules.in_flight
        self._check(self._request_bucket, "requests", now)
        self._check(self._row_bucket, "rows", now)
        if most is not None and self.in_flight >= most:
            self._refuse("in_flight", f"at most {most} requests at the same time", 0.0)
        if self._request_bucket is not None:
            self._request_bucket.take(now)
        self.requests += 1

    def take_rows(self, rows: int) -> None:
        """Counts the rows of a request that is about to run. Only now are they known.

        Raises:
            LimitError: Requests that came meanwhile took all that there were. So one request goes beyond at most.
        """
        self.check_rows()
        if self._row_bucket is not None:
            self._row_bucket.take(self._clock(), rows)
        self.rows += rows

    def check_rows(self) -> None:
        """Refuses what `take_rows` would refuse."""
        self._check(self._row_bucket, "rows", self._clock())

    def give_answer(self, seconds: float) -> None:
        """Counts an answered inference, and how long that took."""
        self.answered += 1
        self.seconds += seconds

    def begin(self) -> Tenant:
        """A request begins. Raises what `ask` raises."""
        self.ask()
        self.in_flight += 1
        return self

    def end(self) -> None:
        """It is over."""
        self.in_flight -= 1

    def __enter__(self) -> Tenant:
        """See `begin`."""
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `end`."""
        self.end()

    def _check(self, bucket: TokenBucket | None, what: str, now: float) -> None:
        if bucket is not None and (wait := bucket.wait(now)) > 0:
            self._refuse(what, f"{bucket.rate:g} {what} a second", wait)

    def _refuse(self, what: str, most: str, wait: float) -> None:
        self.refused[what] += 1
        raise LimitError(f"this API key may have {most}", hint="Try again later.", wait=wait)


class Tenants:
    """All clients, by the name that their rules give them."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """There are none."""
        self._clock = clock
        self._known: dict[str, Tenant] = {}

    def change(self, rules: Iterable[KeyRules]) -> None:
        """The clients are these from now on."""
        new = {each.client: each for each in rules}
        for client, tenant in self._known.items():
            tenant.change(new.get(client))
        self._known = {client: self._known.get(client) or Tenant(each, self._clock) for client, each in new.items()}
        for client, tenant in self._known.items():
            tenant.queue = client if len(self._known) > 1 else ""

    def get(self, client: str) -> Tenant | None:
        """Returns a client. None: nobody is named, because no key was asked for.

        Raises:
            UnauthorizedError: There is no such client, since the file was read again.
        """
        if not client:
            return None
        if client not in self._known:
            raise UnauthorizedError(_INVALID)
        return self._known[client]

    def labelled(self) -> list[Tenant]:
        """Returns those that metrics have."""
        return [tenant for tenant in self._known.values() if tenant.rules.label]


def _bucket(rate: float | None, burst: float) -> TokenBucket | None:
    return None if rate is None else TokenBucket(rate, rate * burst)
