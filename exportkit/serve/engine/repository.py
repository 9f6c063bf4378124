"""The models that are served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from exportkit.errors import ExportkitError, RevokedError, UsageError
from exportkit.serve.engine.folder import PackageFile, check_names, newest_last, packages_in, single_package
from exportkit.serve.engine.home import Home
from exportkit.serve.engine.load_parameters import weights_of
from exportkit.serve.engine.loaded_package import LoadedPackage
from exportkit.serve.engine.loading import load_copies
from exportkit.serve.engine.own_thread import in_own_thread
from exportkit.serve.engine.servable import Servable, check_packages
from exportkit.serve.engine.served import ServedModel
from exportkit.serve.engine.served_package import Named, ServedPackage
from exportkit.serve.engine.served_sequences import ServedSequences
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
    """A version of a package, whose methods are served.

    Attributes:
        package: The file.
        version: The version; empty until the package is loaded, unless the folder says it.
        state: The state of all methods.
        reason: Why they are not ready.
        served: The methods that are served, by the name by which they are.
        whole: The same as one; None: nothing is served.
        offered: What is served and what is not, when the package was loaded.
        loaded: What the file and the weights were when it was loaded.
    """

    package: PackageFile
    version: str
    state: State = "LOADING"
    reason: str = ""
    served: dict[str, ServedModel] = field(default_factory=dict)
    whole: ServedPackage | None = None
    offered: Servable | None = None
    loaded: tuple[Any, ...] | None = None

    def has(self, name: str) -> bool:
        """Whether a name means this package or a method that it serves."""
        return name in self.served or name == self.package.name

    def named(self, name: str) -> Named | None:
        """Returns what is served by a name that this entry has; None: nothing."""
        return self.served.get(name) or self.whole

    @property
    def ready(self) -> bool:
        """Whether it is loaded, and every method ready."""
        return bool(self.served) and all(model.ready for model in self.served.values())


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
        self._sequences: dict[str, ServedSequences] = {}  # by the package's name, whatever the version
        self._counted: dict[tuple[str, str], Statistics] = {}  # by name and version, also of those that are gone
        self._opened = False
        self._draining = False

    def _packages(self) -> list[PackageFile]:
        """Returns what could be served."""
        keys = self._options.load.public_keys
        packages = [single_package(path, keys) for path in self._options.packages]
        if self._options.repository is not None:
            packages += packages_in(self._options.repository, keys)
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
    def lost(self) -> str | None:
        """Why only another process can use a model's device, so that this one has to end; None: it goes on."""
        return next((model.lost for model in self.models() if model.lost is not None), None)

    def abandon(self, reason: str) -> None:
        """Accepts no more requests, and answers those that wait with NotReadyError."""
        self._draining = True
        for model in self.models():
            model.refuse_new(reason, waiting=True)

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    def model(self, name: str, version: str = "", method: str | None = None) -> ServedModel:
        """Returns a model, or the method of a package. Without a version, the newest that is ready.

        Raises:
            NotServedError: No such model, version or method.
            NotReadyError: It is not loaded.
            BadRequestError: The name is that of another method.
        """
        found = self.named(name, version)
        return found.chosen(name, method) if isinstance(found, ServedPackage) else found.of_method(method)

    def named(self, name: str, version: str = "") -> Named:
        """Returns a model, or a package that has no default method. Raises what `model` raises."""
        named = [entry for entry in self._entries if entry.has(name)]
        found = [entry for entry in named if not version or entry.version in ("", version)]
        if not found:
            if not named and (reason := self._why_left_out(name)) is not None:
                raise NotServedError(reason[0], hint=reason[1])
            known = ", ".join(sorted({each for entry in self._entries for each in _names(entry)})) or "none"
            raise NotServedError(
                f"the model {name} has no version {version}" if named else f"no model is named {name}",
                hint=f"Its versions are {', '.join(entry.version for entry in named)}."
                if named
                else f"The models are {known}.",
            )
        served = [each for entry in found if (each := entry.named(name)) is not None]
        if not served:
            entry = found[0]
            raise NotReadyError(f"the model {name} is not ready: {entry.reason or entry.state.lower()}")
        return served[0] if len(served) == 1 else max(served, key=_newest_ready)

    def models(self) -> Sequence[ServedModel]:
        """Returns every version that is loaded, by name and version."""
        served = [model for entry in self._entries for model in entry.served.values()]
        return sorted(served, key=lambda model: (model.name, newest_last(model.version)))

    def counted(self) -> Mapping[tuple[str, str], Statistics]:
        """Returns what was counted of every version that was served, by name and version: a total never shrinks."""
        return self._counted

    def sequences(self) -> Mapping[str, ServedSequences]:
        """Returns the sequences of packages with state, by the package's name."""
        return self._sequences

    def left_out(self) -> Mapping[str, str]:
        """Returns why methods are not served, by the name by which they would be."""
        return {
            f"{entry.package.name}.{method}": reason
            for entry in self._entries
            if entry.offered is not None
            for method, reason in entry.offered.left_out.items()
        }

    def _why_left_out(self, name: str) -> tuple[str, str] | None:
        """Returns why a method is not served, and what is; None if the name is no method's."""
        for entry in self._entries:
            served = f"{entry.package.name} is served as {', '.join(entry.served)}."
            if (reason := self.left_out().get(name)) and name.startswith(f"{entry.package.name}."):
                method = name.removeprefix(f"{entry.package.name}.")
                return f"the method {method} of {entry.package.name} is not served: it {reason}", served
        return None

    def index(self) -> Sequence[IndexEntry]:
        """Returns what there is, loaded or not. It looks into the model repository again."""
        found = [each for entry in self._entries for each in _indexed(entry)]
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
                self._refuse_method(name)
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
            loaded = [e for e in self._entries if e.package.name == name and e.served]
            if not loaded:
                self._refuse_method(name)
                raise NotServedError(f"no model {name} is loaded")
            await asyncio.gather(*(self._close(entry, "it is unloaded") for entry in loaded))

    def _refuse_method(self, name: str) -> None:
        """Refuses to load or unload a method by itself."""
        for entry in self._entries:
            if name in entry.served:
                raise BadRequestError(
                    f"{name} is a method of the package {entry.package.name}, which is loaded and unloaded as a whole",
                    hint=f"Name {entry.package.name}.",
                )

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
        old, package = dict(entry.served), entry.package
        loaded = (package.identity(), weights, weights and weights.stat().st_mtime_ns)
        if entry.ready and entry.loaded == loaded:
            return await self._close_revoked(entry)
        began = time.perf_counter()
        if not old:
            entry.state, entry.reason = "LOADING", ""
        try:
            options = self._options
            copies = await in_own_thread(load_copies, package, options.load, options.batch, weights, options.sequences)
            models = await self._prepared(entry, copies)
        except BaseException as error:
            if not old:
                entry.state = "UNAVAILABLE"
                entry.reason = error.message if isinstance(error, ExportkitError) else type(error).__name__
            raise
        for model in models:
            # The model itself would keep what it has in memory, by a circle.
            model.versions = partial(self._versions, model.name)
            model.counted.load_seconds = time.perf_counter() - began
            self._counted[model.name, model.version] = model.counted
        entry.served = {model.name: model for model in models}
        entry.whole = ServedPackage(package.name, copies.offered, models)
        entry.offered, entry.state, entry.reason, entry.loaded = copies.offered, "READY", "", loaded
        entry.version = models[0].version
        for name, each in old.items():
            # Nobody waits for it: a slow client may still send it a body.
            closing = asyncio.ensure_future(each.close(successor=partial(_served_by, entry, name)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_revoked(self, entry: _Entry) -> None:
        """Unloads a package that was revoked since it was loaded, and raises its error."""
        options = self._options
        try:
            await asyncio.to_thread(
                check_packages, [entry.package.path], options.load.public_keys, sequences=options.sequences.most > 0
            )
        except RevokedError as error:
            await self._close(entry, "it is revoked")
            entry.reason = error.message
            raise

    async def _prepared(self, entry: _Entry, loaded: LoadedPackage) -> list[ServedModel]:
        """Starts the runners of all methods, and waits until they are warmed up."""
        models: list[ServedModel] = []
        try:
            if taken := self._taken(entry, [method.described.name for method in loaded.methods]):
                raise UsageError(f"two packages would be served as {taken}", hint="Rename one of them.")
            home = Home(loaded.methods[0].described.manifest, loaded.models)
            stateful = any(method.described.stateful for method in loaded.methods)
            sequences = self._sequences_of(entry.package.name) if stateful else None
            for method in loaded.methods:
                known = self._counted.get((method.described.name, method.described.version))
                models.append(ServedModel(method, known or Statistics(), sequences, home))
            for model in models:
                await model.prepared()
            if self._draining:
                raise NotReadyError("the server drains")
        except BaseException:
            await asyncio.gather(*(model.close() for model in models))
            await in_own_thread(loaded.close)
            raise
        return models

    def _sequences_of(self, name: str) -> ServedSequences:
        """Returns the sequences of a package, which go on when it is loaded again."""
        if name not in self._sequences:
            limits = self._options.sequences
            # Of the time in which the server has to end, others need a part.
            finish = min(limits.finish_seconds, self._options.drain_seconds / 2)
            self._sequences[name] = ServedSequences(name, replace(limits, finish_seconds=finish))
        return self._sequences[name]

    def _taken(self, entry: _Entry, names: Sequence[str]) -> str | None:
        """Returns a name that a method of another package has."""
        others = [each for each in self._entries if each.package.name != entry.package.name]
        return next((name for name in names for each in others if name in _names(each)), None)

    def _versions(self, name: str) -> list[str]:
        return [each.version for each in self.models() if each.name == name]

    async def _close(self, entry: _Entry, reason: str) -> None:
        """Unloads an entry after its accepted requests."""
        models = list(entry.served.values())
        if not models:
            return
        entry.state, entry.reason = "UNLOADING", ""
        for model in models:
            model.refuse_new(reason)
        await asyncio.gather(*(model.close() for model in models))
        entry.served, entry.whole, entry.loaded = {}, None, None
        entry.state, entry.reason = "UNAVAILABLE", "the server drains" if self._draining else "unloaded"


def _served_by(entry: _Entry, name: str) -> ServedModel | None:
    return entry.served.get(name)


def _paths(packages: Sequence[PackageFile]) -> set[Path]:
    return {package.path for package in packages}


def _names(entry: _Entry) -> Collection[str]:
    """Returns the names that an entry has, or will have when it is loaded."""
    return entry.served or {entry.package.name}


def _indexed(entry: _Entry) -> Iterator[IndexEntry]:
    """Yields the methods that are served, or the package."""
    for name in _names(entry):
        state, reason, model = entry.state, entry.reason, entry.served.get(name)
        if model is not None and state == "READY" and not model.ready:
            state, reason = "UNAVAILABLE", model.failure or "not ready"
        yield IndexEntry(name, entry.version, state, reason)


def _weights_file(package: PackageFile, name: str) -> Path:
    if name not in package.weights:
        there = ", ".join(package.weights) or "none"
        raise BadRequestError(f"there are no weights {name!r} beside the package {package.name}: {there}")
    return package.weights[name]


def _newest_ready(model: Named) -> tuple[object, ...]:
    return model.ready, newest_last(model.version)
