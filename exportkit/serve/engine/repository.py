"""The models that are served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from exportkit.errors import ExportkitError, UsageError
from exportkit.serve.engine.folder import PackageFile, check_names, newest_last, packages_in, single_package
from exportkit.serve.engine.loading import load_copies
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.statistics import Statistics
from exportkit.serve.serve_options import ServeOptions
from exportkit.serve.statuses import BackendError, BadRequestError, NotReadyError, NotServedError

State = Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True)
class IndexEntry:
    """A version of a model in the repository. `reason` says why it is not ready."""

    name: str
    version: str
    state: State
    reason: str


@dataclass
class _Entry:
    """A version of a model. `loaded` is what the file and the weights were when it was loaded."""

    package: PackageFile
    version: str  # empty until the package is loaded, unless the folder says it
    state: State = "LOADING"
    reason: str = ""
    served: ServedModel | None = None
    loaded: tuple[Any, ...] | None = None
    counted: Statistics = field(default_factory=Statistics)


class Repository:
    """The models that are served. All methods are for the event loop's thread."""

    def __init__(self, options: ServeOptions) -> None:
        """Nothing is loaded yet.

        Raises:
            UsageError: The model repository cannot be read, or two packages have the same name.
        """
        self._options = options
        self._entries = [_Entry(package, package.version or "") for package in self._packages()]
        self._changing = asyncio.Lock()  # loads and unloads follow one another
        self._closing: set[asyncio.Future[None]] = set()  # models that were exchanged and have requests to answer
        self._opened = False
        self._draining = False

    def _packages(self) -> list[PackageFile]:
        """Returns what could be served."""
        packages = [single_package(path) for path in self._options.packages]
        if self._options.repository is not None:
            packages += packages_in(self._options.repository)
        check_names(packages)
        return packages

    async def open(self) -> None:
        """Loads and warms up every package. A package that cannot be loaded raises its error."""
        async with self._changing:
            for entry in list(self._entries):
                await self._load(entry, None)
            self._opened = True

    async def drain(self) -> None:
        """Accepts no more requests, waits until every accepted one is answered, and closes the models."""
        self._draining = True
        for model in self.models():
            model.refuse_new("the server drains")
        # Not after loads that are under way: `_load` sees by itself that it is too late.
        await asyncio.gather(*(self._close(entry, "the server drains") for entry in self._entries), *self._closing)

    @property
    def ready(self) -> bool:
        """Whether every model is ready and the server does not drain."""
        return self._opened and not self._draining and all(model.ready for model in self.models())

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    def model(self, name: str, version: str = "") -> ServedModel:
        """Returns a model. Without a version, the newest that is ready.

        Raises:
            NotServedError: No such model or version.
            NotReadyError: It is not loaded.
        """
        named = [entry for entry in self._entries if entry.package.name == name]
        found = [entry for entry in named if not version or entry.version in ("", version)]
        if not found:
            known = ", ".join(sorted({entry.package.name for entry in self._entries})) or "none"
            raise NotServedError(
                f"the model {name} has no version {version}" if named else f"no model is named {name}",
                hint=f"Its versions are {', '.join(entry.version for entry in named)}."
                if named
                else f"The models are {known}.",
            )
        served = [entry.served for entry in found if entry.served is not None]
        if not served:
            entry = found[0]
            raise NotReadyError(f"the model {name} is not ready: {entry.reason or entry.state.lower()}")
        return max(served, key=lambda model: (model.ready, newest_last(model.version)))

    def models(self) -> Sequence[ServedModel]:
        """Returns every version that is loaded, by name and version."""
        served = [entry.served for entry in self._entries if entry.served is not None]
        return sorted(served, key=lambda model: (model.name, newest_last(model.version)))

    def index(self) -> Sequence[IndexEntry]:
        """Returns what there is, loaded or not. It looks into the model repository again."""
        found = [_indexed(entry) for entry in self._entries]
        known = {entry.package.path for entry in self._entries}
        with contextlib.suppress(UsageError):  # the folder cannot be read now
            found += [
                IndexEntry(package.name, package.version or "", "UNAVAILABLE", "not loaded")
                for package in self._packages()
                if package.path not in known
            ]
        return sorted(found, key=lambda entry: (entry.name, newest_last(entry.version)))

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Loads a model of the repository, or loads it again while the old one goes on answering.

        All versions that are there are loaded; those whose file is as it was stay. `weights`, a parameter, names a
        safetensors file beside the package. Its weights replace those of the newest version until the next `load`.

        Raises:
            BadRequestError: A parameter is not allowed: `file:` content would be code of a stranger.
            NotServedError: The repository has no such model.
            BackendError: The package cannot be loaded. The old one goes on.
        """
        weights = weights_of(parameters)
        async with self._changing:
            if self._draining:
                raise NotReadyError("the server drains")
            try:
                packages = await asyncio.to_thread(self._packages)
            except UsageError as error:
                raise BackendError(error.message, hint=error.hint) from error
            named = [package for package in packages if package.name == name]
            if not named:
                raise NotServedError(f"the repository has no model {name}")
            named.sort(key=lambda package: newest_last(package.version or ""))
            source = None if weights is None else _weights_file(named[-1], weights)
            try:
                for package in named:
                    await self._load(self._entry_of(package), source if package is named[-1] else None)
            except NotReadyError:
                raise
            except ExportkitError as error:
                raise BackendError(f"the model {name} cannot be loaded: {error.message}", hint=error.hint) from error
            except (OSError, RuntimeError) as error:  # such as memory that is missing
                raise BackendError(f"the model {name} cannot be loaded: {error}") from error
            gone = [e for e in self._entries if e.package.name == name and e.package.path not in _paths(named)]
            await asyncio.gather(*(self._close(entry, "it is unloaded") for entry in gone))
            self._entries = [entry for entry in self._entries if entry not in gone]

    async def unload(self, name: str) -> None:
        """Unloads a model after its accepted requests.

        Raises:
            NotServedError: No such model is loaded.
        """
        async with self._changing:
            loaded = [e for e in self._entries if e.package.name == name and e.served is not None]
            if not loaded:
                raise NotServedError(f"no model {name} is loaded")
            await asyncio.gather(*(self._close(entry, "it is unloaded") for entry in loaded))

    def _entry_of(self, package: PackageFile) -> _Entry:
        """Returns the entry of a package, which may be new."""
        for entry in self._entries:
            if entry.package.path == package.path:
                entry.package = package
                return entry
        self._entries.append(_Entry(package, package.version or ""))
        return self._entries[-1]

    async def _load(self, entry: _Entry, weights: Path | None) -> None:
        """Loads an entry, unless it is loaded already, and exchanges it with what was served."""
        old, package = entry.served, entry.package
        loaded = (package.identity(), weights, weights and weights.stat().st_mtime_ns)
        if old is not None and old.ready and entry.loaded == loaded:
            return
        began = time.perf_counter()
        if old is None:
            entry.state, entry.reason = "LOADING", ""
        try:
            copies = await asyncio.to_thread(load_copies, package, self._options.load, self._options.batch, weights)
            same = old is None or old.version == copies.described.version
            model = ServedModel(copies, entry.counted if same else Statistics())
            await model.prepared()
            if self._draining:
                await model.close()
                raise NotReadyError("the server drains")
        except BaseException as error:
            if old is None:
                entry.state = "UNAVAILABLE"
                entry.reason = error.message if isinstance(error, ExportkitError) else type(error).__name__
            raise
        name = model.name  # the model itself would keep what it has in memory, by a circle
        model.versions = lambda: [each.version for each in self.models() if each.name == name]
        entry.counted = model.counted
        entry.counted.load_seconds = time.perf_counter() - began
        entry.served, entry.state, entry.reason, entry.loaded = model, "READY", "", loaded
        entry.version = model.version
        if old is not None:
            # Nobody waits for it: a slow client may still send it a body.
            closing = asyncio.ensure_future(old.close(successor=model))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close(self, entry: _Entry, reason: str) -> None:
        """Unloads an entry after its accepted requests."""
        model = entry.served
        if model is None:
            return
        entry.state, entry.reason = "UNLOADING", ""
        model.refuse_new(reason)
        await model.close()
        entry.served, entry.state, entry.reason, entry.loaded = None, "UNAVAILABLE", "unloaded", None


def _paths(packages: Sequence[PackageFile]) -> set[Path]:
    return {package.path for package in packages}


def _indexed(entry: _Entry) -> IndexEntry:
    state, reason = entry.state, entry.reason
    if entry.served is not None and state == "READY" and not entry.served.ready:
        state, reason = "UNAVAILABLE", entry.served.failure or "not ready"
    return IndexEntry(entry.package.name, entry.version, state, reason)


def _weights_file(package: PackageFile, name: str) -> Path:
    if name not in package.weights:
        there = ", ".join(package.weights) or "none"
        raise BadRequestError(f"there are no weights {name!r} beside the package {package.name}: {there}")
    return package.weights[name]


# --- what a request to load a model may ask for ---------------------------------------------------------------------


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    string_value: str


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    weights: _Text


class _Config(msgspec.Struct, forbid_unknown_fields=True):
    """The part of Triton's ModelConfig that can be given."""

    parameters: _Parameters


_CONFIG = msgspec.json.Decoder(_Config)


def weights_of(parameters: Mapping[str, Any]) -> str | None:
    """Returns the name of the weights that a request asks for; None for the package's.

    Triton's clients can give no other parameter than `config`, so the name may be there, too: as text of a ModelConfig
    with `{"parameters": {"weights": {"string_value": "tuned.safetensors"}}}`.

    Raises:
        BadRequestError: Something else is asked for.
    """
    for name in parameters:
        if name.startswith("file:"):
            raise BadRequestError(
                "a model is not loaded from a request: it would be code of a stranger",
                hint="Put the package into the model repository.",
            )
        if name not in ("weights", "config"):
            raise BadRequestError(f"`{name}` is not a parameter of loading", hint="`weights` is.")
    if len(parameters) > 1:
        raise BadRequestError("`weights` and `config` were both given", hint="Give one of them.")
    weights = parameters.get("weights")
    if "config" in parameters:
        weights = _weights_in(parameters["config"])
    if weights is not None and not isinstance(weights, str):
        raise BadRequestError(f"`weights` must be the name of a file, got {weights!r}")
    return weights


def _weights_in(config: Any) -> str:
    try:
        return _CONFIG.decode(config if isinstance(config, (str, bytes)) else b"null").parameters.weights.string_value
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequestError(
            f"the configuration of a model comes from its package, but for the weights: {error}",
            hint='It may be {"parameters": {"weights": {"string_value": "<file>.safetensors"}}}.',
        ) from error
