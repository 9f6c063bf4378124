"""The models that are served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from exportkit.errors import ExportkitError, RevokedError, UsageError
from exportkit.serve.engine.folder import PackageFile, check_names, newest_last, packages_in, single_package, weights_of
from exportkit.serve.engine.loading import LoadedPackage, load_replicas
from exportkit.serve.engine.package_load import in_own_thread
from exportkit.serve.engine.servable import check_packages
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
        load: What is served; None: nothing.
        loaded: What the file and the weights were when it was loaded.
    """

    package: PackageFile
    version: str
    state: State = "LOADING"
    reason: str = ""
    load: ServedPackage | None = None
    loaded: tuple[Any, ...] | None = None

    @property
    def served(self) -> dict[str, ServedModel]:
        """The methods that are served, by the name by which they are."""
        return {} if self.load is None else {model.name: model for model in self.load.models.values()}

    @property
    def names(self) -> Collection[str]:
        """The names that it has, or will have when it is loaded."""
        return self.served or {self.package.name}

    def has(self, name: str) -> bool:
        """Whether a name means this package or a method that it serves."""
        return name in self.served or name == self.package.name

    def named(self, name: str) -> Named | None:
        """Returns what is served by a name that this entry has; None: nothing."""
        return self.served.get(name) or self.load

    @property
    def ready(self) -> bool:
        """Whether it is loaded, and every method ready."""
        return self.load is not None and self.load.ready


class Repository:
    """The models that are served. All methods are for the event loop's thread."""

    def __init__(self, options: ServeOptions, report: Callable[[str], object] = lambda line: None) -> None:
        """Nothing is loaded yet. `report` gets a line for whatever is loaded, is not, and is unloaded.

        Raises:
            UsageError: The model repository cannot be read, or two packages have the same name.
        """
        self._options = options
        self._report = report
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
                try:
                    await self._load(entry, None)
                except ExportkitError as error:
                    if (path := str(entry.package.path)) in error.message:
                        raise
                    raise type(error)(f"{path}: {error.message}", hint=error.hint) from error
            self._opened = True

    async def drain(self) -> None:
        """Accepts no more requests, waits until every accepted one is answered, and closes the models."""
        self._draining = True
        for load in self._loads():
            load.refuse_new("the server drains")
        # Not after loads that are under way: `_load` sees by itself that it is too late.
        await asyncio.gather(*(self._close(entry, "the server drains") for entry in self._entries), *self._closing)

    @property
    def ready(self) -> bool:
        """Whether every model is ready and the server does not drain."""
        return self._opened and not self._draining and all(load.ready for load in self._loads())

    @property
    def lost(self) -> str | None:
        """Why only another process can use a model's device, so that this one has to end; None: it goes on."""
        return next((load.lost for load in self._loads() if load.lost is not None), None)

    def abandon(self, reason: str) -> None:
        """Accepts no more requests, and answers those that wait with NotReadyError."""
        self._draining = True
        for load in self._loads():
            load.refuse_new(reason, waiting=True)

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
        return (found if isinstance(found, ServedPackage) else found.package).chosen(name, method)

    def named(self, name: str, version: str = "") -> Named:
        """Returns a model, or a package that has no default method. Raises what `model` raises."""
        named = [entry for entry in self._entries if entry.has(name)]
        found = [entry for entry in named if not version or entry.version in ("", version)]
        if not found:
            for load in self._loads():
                named_so = {f"{load.name}.{method}": method for method in load.offered.left_out}
                if name in named_so:
                    raise load.not_served(named_so[name])
            known = ", ".join(sorted({each for entry in self._entries for each in entry.names})) or "none"
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

    def _loads(self) -> list[ServedPackage]:
        return [entry.load for entry in self._entries if entry.load is not None]

    def counted(self) -> Mapping[tuple[str, str], Statistics]:
        """Returns what was counted of every version that was served, by name and version: a total never shrinks."""
        return self._counted

    def sequences(self) -> Mapping[str, ServedSequences]:
        """Returns the sequences of packages with state, by the package's name."""
        return self._sequences

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
                self._report(f"error: the model {name} is not loaded: {error.message}")
                raise BackendError(error.message, hint=error.hint) from error
            named = [package for package in packages if package.name == name]
            if not named:
                self._refuse_method(name)
                raise NotServedError(f"the repository has no model {name}")
            named.sort(key=lambda package: newest_last(package.version or ""))
            source = None if weights is None else _weights_file(named[-1], weights)
            for package in named:
                entry = self._entry_of(package)
                try:
                    await self._load(entry, source if package is named[-1] else None)
                except NotReadyError:
                    raise
                except (ExportkitError, OSError, RuntimeError) as error:  # such as memory that is missing
                    why, hint = (error.message, error.hint) if isinstance(error, ExportkitError) else (str(error), None)
                    goes_on = f"; version {entry.version} goes on" if entry.load else ""
                    self._report(f"error: the model {name} is not loaded from {package.path}: {why}{goes_on}")
                    raise BackendError(f"the model {name} cannot be loaded: {why}", hint=hint) from error
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
        old, package, options = entry.load, entry.package, self._options
        loaded = (package.identity(), weights, weights and weights.stat().st_mtime_ns)
        if entry.ready and entry.loaded == loaded:
            return await self._close_revoked(entry)
        began = time.perf_counter()
        if old is None:
            entry.state, entry.reason = "LOADING", ""
        try:
            made = await in_own_thread(load_replicas, package, options.load, options.batch, weights, options.sequences)
            load = await self._started(entry, made)
        except BaseException as error:
            if old is None:
                entry.state = "UNAVAILABLE"
                entry.reason = error.message if isinstance(error, ExportkitError) else type(error).__name__
            raise
        for model in load.models.values():
            model.counted.load_seconds = time.perf_counter() - began
            self._counted[model.name, model.version] = model.counted
        entry.load, entry.state, entry.reason, entry.loaded = load, "READY", "", loaded
        entry.version = load.version
        source = f"from {package.path}" + (f" with {weights.name}" if weights else "")
        instead = f", in place of version {old.version}" if old is not None else ""
        for described in made.methods:
            on = ", ".join(described.devices)
            self._report(f"model {described.name}, version {described.version}, on {on}, {source}{instead}")
            for warning in described.warnings():
                self._report(f"warning: {warning}")
        for method, reason in load.offered.left_out.items():
            self._report(f"not served: {load.name}.{method}, which {reason}")
        if old is not None:
            # Nobody waits for it: a slow client may still send it a body.
            closing = asyncio.ensure_future(old.close(successor=lambda: entry.load))
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

    async def _started(self, entry: _Entry, loaded: LoadedPackage) -> ServedPackage:
        """Starts the runners of all methods, and waits until they are warmed up."""
        load: ServedPackage | None = None
        try:
            if taken := self._taken(entry, [method.name for method in loaded.methods]):
                raise UsageError(f"two packages would be served as {taken}", hint="Rename one of them.")
            stateful = any(method.stateful for method in loaded.methods)
            sequences = self._sequences_of(entry.package.name) if stateful else None
            load = ServedPackage(entry.package.name, loaded, self._counted_for, sequences)
            await load.start()
            if self._draining:
                raise NotReadyError("the server drains")
        except BaseException:
            await (in_own_thread(loaded.close) if load is None else load.close())
            raise
        return load

    def _counted_for(self, name: str, version: str) -> Statistics:
        """Returns the counters of a version, which go on when it is loaded again."""
        return self._counted.get((name, version)) or Statistics()

    def _sequences_of(self, name: str) -> ServedSequences:
        """Returns the sequences of a package, which go on when it is loaded again."""
        if name not in self._sequences:
            limits = self._options.sequences
            # Of the time in which the server has to end, others need a part.
            finish = min(limits.finish_seconds, self._options.drain_seconds / 2)
            self._sequences[name] = ServedSequences(
                name, replace(limits, finish_seconds=finish), self._options.adapters
            )
        return self._sequences[name]

    def _taken(self, entry: _Entry, names: Sequence[str]) -> str | None:
        """Returns a name that a method of another package has."""
        others = [each for each in self._entries if each.package.name != entry.package.name]
        return next((name for name in names for each in others if name in each.names), None)

    async def _close(self, entry: _Entry, reason: str) -> None:
        """Unloads an entry after its accepted requests."""
        if (load := entry.load) is None:
            return
        entry.state, entry.reason = "UNLOADING", ""
        load.refuse_new(reason)
        await load.close()
        entry.load, entry.loaded = None, None
        entry.state, entry.reason = "UNAVAILABLE", "the server drains" if self._draining else "unloaded"
        if not self._draining:
            self._report(f"model {load.name}, version {load.version}, is unloaded")


def _paths(packages: Sequence[PackageFile]) -> set[Path]:
    return {package.path for package in packages}


def _indexed(entry: _Entry) -> Iterator[IndexEntry]:
    """Yields the methods that are served, or the package."""
    for name in entry.names:
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
