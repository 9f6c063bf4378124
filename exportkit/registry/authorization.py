"""Says to a registry who asks: with a password (Basic), or with a token that its authority gives for one (Bearer).

The protocol: https://distribution.github.io/distribution/spec/auth/token/ and, for identity tokens, .../auth/oauth/.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlencode

import msgspec

from exportkit.errors import RegistryError
from exportkit.registry.docker_credentials import Credentials, find_credentials

# Sends (method, url, headers, body) and returns the status and the body, which is small.
Fetch = Callable[[str, str, Mapping[str, str], bytes | None], tuple[int, bytes]]

_CHALLENGE = re.compile(r"\s*(Basic|Bearer)\b\s*(.*)", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))')
_PLAIN = re.compile(r"[\x21-\x7e]+")  # what may stand in a header
_CLIENT = "exportkit"


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Authorization:
    """The value of the header `Authorization` for one registry, once that has said what it asks for."""

    def __init__(self, host: str, scope: str, fetch: Fetch) -> None:
        """Asks nothing yet.

        Args:
            host: The registry, whose credentials are looked for when it asks.
            scope: What a token is for, such as `repository:models/net:pull`.
            fetch: Asks the authority that gives tokens.
        """
        self._host, self._scope, self._fetch = host, scope, fetch
        self._value: str | None = None
        self._credentials: Credentials | None = None
        self._looked = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers that say who asks; empty before the registry asked for it."""
        return {} if self._value is None else {"Authorization": self._value}

    def answer(self, challenges: Sequence[str]) -> None:
        """Gets what a registry asked for with status 401.

        Args:
            challenges: The values of `WWW-Authenticate`.

        Raises:
            RegistryError: It asks for what is not known here, there are no credentials, or its authority refuses them.
            UsageError: docker's configuration cannot be used.
        """
        for challenge in challenges:
            if (match := _CHALLENGE.match(challenge)) is None:
                continue
            if match[1].lower() == "basic":
                self._value = self._basic()
            else:
                parameters = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(match[2])}
                self._value = f"Bearer {self._token(parameters)}"
            return
        raise RegistryError(f"{self._host} refuses without saying what it asks for (status 401, no known challenge)")

    def _found(self) -> Credentials | None:
        if not self._looked:
            self._credentials, self._looked = find_credentials(self._host), True
        return self._credentials

    def _basic(self) -> str:
        found = self._found()
        if found is None or not found.user:
            raise RegistryError(
                f"{self._host} asks for a password, and docker's configuration has none for it",
                hint=f"Run `docker login {self._host}`, or set DOCKER_CONFIG to a folder whose config.json has one.",
            )
        return "Basic " + base64.b64encode(f"{found.user}:{found.secret}".encode()).decode()

    def _token(self, parameters: Mapping[str, str]) -> str:
        """Asks the authority that the registry names: anonymously, with a password, or with an identity token."""
        realm, service = parameters.get("realm", ""), parameters.get("service", "")
        asked = {"service": service, "scope": parameters.get("scope") or self._scope}
        found = self._found()
        if found is not None and not found.user:
            form = {"grant_type": "refresh_token", "refresh_token": found.secret, "client_id": _CLIENT, **asked}
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            status, content = self._fetch("POST", realm, kind, urlencode(form).encode())
        else:
            url = realm + ("&" if "?" in realm else "?") + urlencode(asked)
            status, content = self._fetch("GET", url, {} if found is None else {"Authorization": self._basic()}, None)
        if status != 200:
            given = "without credentials, as docker's configuration has none" if found is None else "with its password"
            raise RegistryError(
                f"{realm} gives no token for {asked['scope']} at {self._host} {given} (status {status})",
                hint=f"Check the name and that you may use it; `docker login {self._host}` changes who asks.",
            )
        try:
            answer = msgspec.json.decode(content, type=_Token)
        except msgspec.DecodeError as error:
            raise RegistryError(f"{realm} answered what is not a token: {error}") from error
        token = answer.token or answer.access_token
        if not _PLAIN.fullmatch(token):
            raise RegistryError(f"{realm} answered without a token that can be sent")
        return token
