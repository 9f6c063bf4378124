"""Replaces the weights of a package, and records its cases again. Its compiled targets stay the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from exportkit.errors import StateError, UsageError, WeightsError
from exportkit.export.record.cases import digest_of_state
from exportkit.export.record.host_copies import elements, initial_record
from exportkit.fine_tune.recording import record_again
from exportkit.package.archive import STOCK_RECORDS, Content, PackageReader, StoredRecord, write_package
from exportkit.package.consistency import STATE_OWNER, WEIGHTS_DIR, match_state
from exportkit.package.manifest import Manifest, Size, StateTensor
from exportkit.package.weights_hints import advised
from exportkit.progress import Progress
from exportkit.runtime.state_file import read_state as read_session_state
from exportkit.runtime.weights import described, read_state, replaced_weights


def fine_tune(
    package: Path, weights: Path, model: str | None, *, unnamed: str, timeout: float, progress: Progress
) -> Manifest:
    """Replaces the weights of a package in place. Its recorded answers cannot hold: MODEL gives new ones.

    Args:
        package: The package, in a private folder. Operators that MODEL does not load come from its libraries.
        weights: A safetensors file with the model's whole state, or the file of a session's state.
        model: MODEL, if one may be imported.
        unnamed: Why none may.
        timeout: Seconds that a call of MODEL may take.
        progress: Called with each step before it starts.

    Returns:
        The new manifest. It has no program, which has the old weights inside.

    Raises:
        WeightsError: The weights do not fit.
        UsageError: There are cases, and no MODEL to record them with.
        ExportError: MODEL fails.
        StateError: A session's file is another model's.
    """
    progress(f"replacing the weights with {weights.name}")
    tuned = package.with_name(f"{package.name[:200]}.tuned")
    with PackageReader(package) as reader:
        records: dict[str, Content] = {
            name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS
        }
        replaced = begin_with if _is_of_a_session(weights) else replace_weights
        manifest = replaced(reader, reader.manifest, records, weights)
        if reader.manifest.cases:
            if model is None:
                raise UsageError(
                    f"the recorded answers belong to the old weights, and nothing can give the new ones: {unnamed}",
                    hint="Name the model with --model. Or export it with these weights.",
                )
            progress(f"recording the cases again, with {model}")
            initial = {str(name): records[name] for each in manifest.state if (name := each.initial) is not None}
            cases, files = record_again(reader, manifest, model, weights, initial, package.parent, timeout=timeout)
            manifest, records = msgspec.structs.replace(manifest, cases=cases), {**records, **files}
        manifest = write_package(tuned, manifest, records)
    os.replace(tuned, package)
    return manifest


def replace_weights(reader: PackageReader, manifest: Manifest, records: dict[str, Content], weights: Path) -> Manifest:
    """Replaces the weights in a manifest and in its records, and removes the cases and the program.

    Args:
        reader: The package, which has the old weights.
        manifest: Its manifest, perhaps with fewer targets.
        records: The records, which are changed.
        weights: A safetensors file with the model's whole state.

    Raises:
        WeightsError: The weights do not fit the model, or the package's weights are inside the compiled code.
    """
    if not any(weight.state for weight in manifest.weights):
        raise WeightsError(
            f"{reader.path.name} has no weights outside its compiled code",
            hint="Export the model with these weights and without --embed-weights.",
        )
    state = read_state(weights)
    with advised(weights, [weight.name for weight in manifest.weights if weight.state], state):
        replaced = replaced_weights(reader, manifest, manifest.targets, state)
    _forget(manifest, records, {weight.record for weight in manifest.weights})
    listed = []
    for weight in manifest.weights:
        if weight.record is not None:
            content = elements(replaced[weight.name])
            weight = msgspec.structs.replace(weight, record=f"{WEIGHTS_DIR}/{hashlib.sha256(content).hexdigest()}")
            records[str(weight.record)] = content
        listed.append(weight)
    source = msgspec.structs.replace(manifest.source, state_sha256=digest_of_state(whole_state(manifest, state)))
    return msgspec.structs.replace(manifest, weights=tuple(listed), cases=(), program=None, source=source)


def begin_with(reader: PackageReader, manifest: Manifest, records: dict[str, Content], saved: Path) -> Manifest:
    """Lets sessions begin with the state that one saved: what it has learnt. State with rows begins as before.

    Arguments are those of `replace_weights`, with the file of a session's state.

    Raises:
        StateError: It is another model's, or all of the state has rows.
    """
    fixed = [each for each in manifest.state if not _has_rows(each)]
    if not fixed:
        raise StateError(
            f"{saved.name} is the state of a session of {manifest.name}, all of which has rows: it begins as before",
            hint="Give the model's whole state_dict, or load the file into a session: session.load_state(path).",
        )
    given = read_state(saved)
    rows = {
        each.shape[0].dimension: given[each.name].shape[0]
        for each in manifest.state
        if each.shape and isinstance(each.shape[0], Size) and each.name in given and given[each.name].dim()
    }
    values = read_session_state(saved, reader, rows)
    _forget(manifest, records, {each.initial for each in fixed} - {e.initial for e in manifest.state if _has_rows(e)})
    listed = []
    for each in manifest.state:
        if not _has_rows(each):
            name, content = initial_record(values[each.name])
            each = msgspec.structs.replace(each, initial=name)
            if name is not None:
                records[name] = content
        listed.append(each)
    return msgspec.structs.replace(manifest, state=tuple(listed), cases=(), program=None)


def _is_of_a_session(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return STATE_OWNER in (file.metadata() or {})
    except (OSError, SafetensorError):  # who reads it says why
        return False


def _has_rows(state: StateTensor) -> bool:
    return any(isinstance(size, Size) for size in state.shape)


def _forget(manifest: Manifest, records: dict[str, Content], names: set[str | None]) -> None:
    """Removes these records, the cases and the program."""
    names = names | {case.record for case in manifest.cases}
    names |= set(manifest.program.records.values()) if manifest.program else set()
    for name in names - {None}:
        records.pop(str(name), None)


def whole_state(manifest: Manifest, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the model's state with a tied weight under each of its names, of which `state` may have one only.

    Raises:
        WeightsError: The state does not fit the manifest's weights.
    """
    given = match_state(manifest.weights, described(state), manifest.state)
    whole: dict[str, torch.Tensor] = {}
    for weight in manifest.weights:
        if weight.state:
            whole |= dict.fromkeys((weight.name, *weight.aliases), state[given[weight.name][0]])
    return whole
