"""Sends requests to one repository of a registry.

What a registry answers is a stranger's: every body has a limit, a redirect is followed a few times, from https only to
https, and credentials go to the registry itself and to the authority that it names, but to no host that it redirects
to. Content is trusted by its digest alone, which the callers check.
"""

from __future__ import annotations

import contextlib
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from exportkit.errors import HostError, RegistryError, UsageError
from exportkit.registry.authorization import Authorization
from exportkit.registry.oci_reference import RegistryReference, is_loopback

try:
    import urllib3
except ModuleNotFoundError as missing:
    raise HostError("registries need urllib3", hint="Run `pip install 'exportkit[registry]'`.") from missing

TransportError = urllib3.exceptions.HTTPError  # the request may be sent again; urllib3 wraps what the system reports

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_MAX_SMALL = 4 << 20  # bytes of a manifest, by the specification's advice, and of every other small answer
_BLOCK = 256 << 10  # bytes that are sent at once
_LONGEST_WAIT = 30.0
_TIMEOUT = urllib3.Timeout(connect=20, read=120)  # a registry may check gigabytes before it answers
_HUB, _HUB_SERVER = "docker.io", "registry-1.docker.io"


@dataclass(frozen=True)
class RegistryOptions:
    """How registries are reached.

    Attributes:
        plain_http: Whether without TLS. None: only a registry on this machine (a loopback address).
        authorities: A PEM file with the authorities that sign its certificate, besides the system's.
        attempts: How often a request without any progress is sent.
        first_wait: Seconds before the second attempt; before each further one twice as many.
    """

    plain_http: bool | None = None
    authorities: Path | None = None
    attempts: int = 5
    first_wait: float = 0.5


class Answer(NamedTuple):
    """A small answer."""

    status: int
    headers: Mapping[str, str]
    content: bytes


Body = Callable[[], Any]
"""Makes what is sent, from its beginning: bytes, or an object with `read`."""


class RegistryClient:
    """Speaks with the repository that a reference names. One thread uses it."""

    def __init__(self, reference: RegistryReference, actions: str, options: RegistryOptions) -> None:
        """Connects when the first request is sent.

        Args:
            reference: Whose repository.
            actions: What a token is asked for: `pull`, or `pull,push`.
            options: How it is reached.

        """
        self.reference, self.options = reference, options
        host, name = reference.host, reference.name
        if host == _HUB:
            host, name = _HUB_SERVER, name if "/" in name else f"library/{name}"
        plain = is_loopback(host) if options.plain_http is None else options.plain_http
        self._plain_allowed = plain
        self._origin = f"{'http' if plain else 'https'}://{host}".lower()
        self._root = f"{self._origin}/v2/{name}/"
        self._pools: dict[tuple[str, str | None], urllib3.PoolManager] = {}
        self._authorization = Authorization(reference.host, f"repository:{name}:{actions}", self._fetch)

    def url(self, path: str) -> str:
        """Returns the URL of a path below the repository, such as `manifests/1`."""
        return self._root + path

    def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        most: int = _MAX_SMALL,
    ) -> Answer:
        """Sends a small request that may be repeated, and reads its small answer, whatever its status.

        Args:
            method: The method.
            path: A path below the repository, or a URL.
            headers: Further headers.
            content: The body.
            most: The most bytes of the answer.

        Raises:
            RegistryError: The registry cannot be reached, refuses the user, or sends too much.
        """
        attempts = Attempts(self.options, f"{method} {self._shown(path)}")
        while True:
            try:
                with self.send(method, path, headers=headers, body=lambda: content) as response:
                    answer = Answer(response.status, response.headers, _small(response, most))
            except TransportError as error:
                attempts.failed(error)
                continue
            if answer.status not in _BUSY:
                return answer
            attempts.failed(self.refusal(answer, method, path), answer.headers)

    @contextlib.contextmanager
    def send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: Body = lambda: None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Sends one request, with redirects and what the registry asks for before it answers.

        The connection is closed after the block unless the answer was read to its end.

        Raises:
            RegistryError: The registry refuses the user, or redirects too often or to where it must not.
            urllib3.exceptions.HTTPError: The connection failed.
        """
        url = urljoin(self._root, path)
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._authorized(method, url, dict(headers or {}), body)
            target = response.headers.get("location")
            if method not in ("GET", "HEAD") or response.status not in _REDIRECTS or target is None:
                with contextlib.closing(response):
                    yield response
                return
            response.close()
            url = urljoin(url, target)
        raise RegistryError(f"{self.reference.host} redirects more than {_MAX_REDIRECTS} times, last to {_bare(url)}")

    def refusal(self, answer: Answer, method: str, path: str) -> RegistryError:
        """Makes the error of an answer whose status is not one that the caller knows."""
        said = _said(answer.content)
        return RegistryError(
            f"{self.reference.host} answered {method} {self._shown(path)} with status {answer.status}"
            + (f": {said}" if said else ""),
            hint="You may have no right to do that there." if answer.status in (401, 403) else None,
        )

    def _shown(self, path: str) -> str:
        return _bare(urljoin(self._root, path)).removeprefix(self._origin)

    def _authorized(self, method: str, url: str, headers: dict[str, str], body: Body) -> urllib3.BaseHTTPResponse:
        own = _origin_of(self._checked(url)) == self._origin
        response = self._request(method, url, headers | (self._authorization.headers if own else {}), body())
        if response.status != 401 or not own:
            return response
        challenges = response.headers.getlist("www-authenticate")
        response.close()
        self._authorization.answer(challenges)
        return self._request(method, url, headers | self._authorization.headers, body())

    def _fetch(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> tuple[int, bytes]:
        """Asks the authority of tokens. A redirect is not followed: it would take the password elsewhere."""
        attempts = Attempts(self.options, f"{method} {_bare(url)}")
        while True:
            try:
                with contextlib.closing(self._request(method, url, dict(headers), body)) as response:
                    return response.status, _small(response, _MAX_SMALL)
            except TransportError as error:
                attempts.failed(error)

    def _request(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> urllib3.BaseHTTPResponse:
        parts = self._checked(url)
        return self._pool(parts).request(
            method,
            url,
            headers={"Accept-Encoding": "identity", "User-Agent": "exportkit", **headers},
            body=body,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def _checked(self, url: str) -> SplitResult:
        """Refuses a URL that the registry may not send anybody to."""
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            parts, host = SplitResult("", "", "", "", ""), None
        plain = self._plain_allowed and (self.options.plain_http or (host is not None and is_loopback(host)))
        if host and parts.username is None and (parts.scheme == "https" or (parts.scheme == "http" and plain)):
            return parts
        raise RegistryError(
            f"{self.reference.host} sends to {_bare(url)!r}, which is not https",
            hint="--registry-plain-http allows http, for a network that you trust: whoever is in it may read all.",
        )

    def _pool(self, parts: SplitResult) -> urllib3.PoolManager:
        """Returns the connections, through the proxy of HTTP_PROXY and HTTPS_PROXY unless NO_PROXY names the host."""
        assert parts.hostname is not None
        direct = is_loopback(parts.hostname) or urllib.request.proxy_bypass(parts.hostname)
        proxy = None if direct else urllib.request.getproxies().get(parts.scheme)
        if (parts.scheme, proxy) not in self._pools:
            given: dict[str, Any] = {
                "retries": False,
                "timeout": _TIMEOUT,
                "ssl_context": _tls_context(self.options.authorities) if parts.scheme == "https" else None,
                "blocksize": _BLOCK,
            }
            made = urllib3.PoolManager(**given) if proxy is None else urllib3.ProxyManager(proxy, **given)
            self._pools[parts.scheme, proxy] = made
        return self._pools[parts.scheme, proxy]


class Attempts:
    """Counts the attempts of one piece of work, and waits between them."""

    def __init__(self, options: RegistryOptions, what: str) -> None:
        """`what` is the work, for the error."""
        self._options, self._what = options, what
        self._failed = 0

    def progressed(self) -> None:
        """Begins to count anew."""
        self._failed = 0

    def failed(self, reason: Exception, headers: Mapping[str, str] | None = None) -> None:
        """Waits before the next attempt, as long as `Retry-After` of the headers says.

        Raises:
            RegistryError: That was the last one.
        """
        if isinstance(reason, urllib3.exceptions.SSLError):
            raise RegistryError(
                f"{self._what}: {_reason(reason)}",
                hint="--registry-ca names the authority of a certificate that the system does not know.",
            ) from reason
        self._failed += 1
        if self._failed >= self._options.attempts:
            if isinstance(reason, RegistryError):
                raise reason
            raise RegistryError(f"{self._what}: {_reason(reason)} ({self._failed} attempts)") from reason
        asked = (headers or {}).get("retry-after", "")
        wait = float(asked) if asked.isascii() and asked.isdigit() else self._options.first_wait * 2**self._failed / 2
        time.sleep(min(wait, _LONGEST_WAIT))


def _tls_context(authorities: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{authorities} has no authorities' certificates in PEM: {error}") from error
    return context


def _origin_of(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc}".lower()


def _small(response: urllib3.BaseHTTPResponse, most: int) -> bytes:
    content = response.read(most + 1)
    if len(content) > most:
        raise RegistryError(f"a registry answers with more than {most} bytes where little is expected")
    return content


def _bare(url: str) -> str:
    """Returns a URL without its query, which may hold a signature that gives access."""
    return url.partition("?")[0]


def _reason(error: Exception) -> str:
    """Says why a request failed. urllib3 begins its reasons with the object that they happened to."""
    text = str(getattr(error, "reason", None) or error)
    return text.rpartition(">: ")[2] or type(error).__name__


class _Fault(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Faults(msgspec.Struct):
    errors: list[_Fault] = []


def _said(content: bytes) -> str:
    """Returns what a registry says about an error, by the specification."""
    try:
        faults = msgspec.json.decode(content, type=_Faults).errors
    except msgspec.DecodeError:
        return ""
    return "; ".join(f"{fault.code} {fault.message}".strip()[:200] for fault in faults[:3])
