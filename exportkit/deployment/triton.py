"""Writes a package into a model repository of Triton, and starts Triton with exportkit's backend. Imports no torch."""

from __future__ import annotations

import filecmp
import importlib.util
import os
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exportkit.errors import HostError, UsageError
from exportkit.libraries import LIBRARY_DIR
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import check_writable, temporary_folder, write_whole
from exportkit.package.consistency import is_complete
from exportkit.package.trust import Trust, signature_info
from exportkit.runtime.targets import host, survey

# What a client that knows no key must not do: load a package that it sends, map /dev/shm, name files to write.
_RESTRICTED = "model-repository,shared-memory,trace,logging"
_KEY_HEADER = "exportkit-key"
_PROGRAM = "tritonserver"


class TritonModel(NamedTuple):
    """A model in a repository: the package's method that it answers with. `written`: it was not there already."""

    name: str
    method: str
    folder: Path
    written: bool


class TritonCommand(NamedTuple):
    """How to start Triton: the program and its options, and what has to be set for it."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def found(self) -> bool:
        """Whether this machine has the program."""
        return shutil.which(self.arguments[0]) is not None

    @property
    def text(self) -> str:
        """The command for a shell, an option on each line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        program, *options = map(shlex.quote, self.arguments)
        return " \\\n    ".join([" ".join([*variables, program]), *options])


def write_triton_models(
    package: Path,
    repository: Path,
    *,
    methods: Sequence[str] = (),
    parameters: Mapping[str, str] | None = None,
    trust: Trust = Trust(),
) -> tuple[TritonModel, ...]:
    """Adds a package to a model repository of Triton, once for each method. Checks every digest before.

    The default method's model has the package's name. Another one's is `<package>.<method>`, as for `exportkit serve`.
    A model's folder appears when it is complete.

    Args:
        package: The package. Signature files beside it are copied, too.
        repository: The repository; it is made if its parent exists.
        methods: The methods' names. Default: the default method.
        parameters: The backend's parameters, `threads` and `cuda_graphs`.
        trust: The required signatures.

    Raises:
        UsageError: The package lacks a method, a target or libraries, or the repository has another model of the name.
        NoTargetError: No target of the package runs here, and none is for a GPU, which another machine may have.
        PackageError: The package breaks a rule of the format or lacks a required signature.
        OSError: The repository cannot be written.
    """
    with PackageReader(package, demand=trust.demand()) as reader:
        reader.verify()
        _check_targets(reader)
        manifest = reader.manifest
        signatures = [trust.signature] if trust.signature else [info.path for info in signature_info(reader)]
        chosen = {manifest.method(name).name: manifest.method(name) for name in methods or (None,)}
        check_writable(repository, reader.size)
        repository.mkdir(exist_ok=True)
        with temporary_folder(repository, ".exportkit-triton-") as temporary:
            made = []
            for method in chosen.values():
                default = method is manifest.default
                name = manifest.name if default else f"{manifest.name}.{method.name}"
                given = {} if default else {"method": method.name}
                _write_model(temporary / name, reader, signatures, {**given, **(parameters or {})})
                made.append(TritonModel(name, method.name, repository / name, _is_new(temporary / name, repository)))
            reader.check_unchanged()
            for model in made:
                if model.written:
                    os.rename(temporary / model.name, model.folder)
    return tuple(made)


def _check_targets(reader: PackageReader) -> None:
    manifest, path = reader.manifest, reader.path.name
    if not manifest.targets:
        raise UsageError(
            f"{path} has no compiled target", hint="`exportkit export` makes one, unless --format says otherwise."
        )
    if not is_complete(manifest):
        raise UsageError(
            f"{path} has no libraries for its operators", hint="`exportkit package` adds the operator libraries."
        )
    if all(target.device == "cpu" for target in manifest.targets):
        survey(manifest.targets, "cpu", host(with_cuda=False), manifest.libraries)


def _write_model(
    folder: Path, reader: PackageReader, signatures: Sequence[Path], parameters: Mapping[str, str]
) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    shutil.copyfile(f"/proc/self/fd/{reader.fileno()}", version / "model.pt2")  # what was checked, if it was replaced
    for signature in signatures:
        suffix = openssf.SUFFIX if signature.name.endswith(openssf.SUFFIX) else own.SUFFIX
        shutil.copyfile(signature, version / f"model.pt2{suffix}")
    lines = ['backend: "exportkit"']
    lines += [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
    write_whole(folder / "config.pbtxt", "".join(f"{line}\n" for line in lines).encode())


def _is_new(made: Path, repository: Path) -> bool:
    """Whether the repository has no such model. Raises UsageError if it has another one of the name."""
    there = repository / made.name
    if not os.path.lexists(there):
        return True
    files, others = ({p.relative_to(f): p for p in f.rglob("*") if p.is_file()} for f in (made, there))
    if files.keys() == others.keys() and all(filecmp.cmp(files[p], others[p], shallow=False) for p in files):
        return False
    raise UsageError(
        f"{there} exists, and is another model",
        hint="Remove it, write to another repository, or package the model under another name: "
        "`exportkit package --name`.",
    )


# --- how to start it --------------------------------------------------------------------------------------------------


def triton_command(repository: Path, *, trust: Trust = Trust(), options: Sequence[str] = ()) -> TritonCommand:
    """Returns the command that starts Triton with all models of a repository, on loopback addresses.

    Who wants to load models or to map shared memory must send the header `exportkit-key`, over gRPC
    `triton-grpc-protocol-exportkit-key`, with the key in the command, which is new for each call of this function.

    Args:
        repository: The repository.
        trust: Keys, one of which must have signed every package.
        options: Further options of Triton, which win over those here.

    Raises:
        HostError: The installation has no backend for the installed torch.
    """
    restriction = f"{_RESTRICTED}:{_KEY_HEADER}={secrets.token_hex(16)}"
    arguments = [
        _find_program(),
        f"--model-repository={repository.resolve()}",
        f"--backend-directory={_backends()}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--http-restricted-api={restriction}",
        f"--grpc-restricted-protocol={restriction}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
    ]
    if trust.keys:
        keys = ":".join(os.path.abspath(key) for key in trust.keys)
        arguments.append(f"--backend-config=exportkit,public-key={keys}")
    return TritonCommand((*arguments, *options), _environment())


def _backends() -> Path:
    """Returns the folder with the backend for the installed torch."""
    minor = ".".join(host(with_cuda=False).torch.split(".")[:2])
    folder = LIBRARY_DIR / f"torch{minor}" / "triton"
    library = folder / "exportkit" / "libtriton_exportkit.so"
    if not library.exists():
        built = sorted(path.parts[-4].removeprefix("torch") for path in LIBRARY_DIR.glob("torch*/triton/*/*.so"))
        raise HostError(
            f"there is no backend of Triton for torch {minor}: {library} does not exist; this installation has it for "
            f"{'torch ' + ', '.join(built) if built else 'no torch'}",
            hint="`make build` builds it for the installed torch.",
        )
    return folder


def _environment() -> dict[str, str]:
    """Returns what makes torch's libraries found, unless torch lies beside exportkit: there they are looked for."""
    torch = _folder("torch")
    if torch is None or torch.parent == LIBRARY_DIR.parents[1]:
        return {}
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(torch / "lib"), os.environ.get("LD_LIBRARY_PATH")]))}


def _find_program() -> str:
    """Returns the program on PATH, of NVIDIA's image or of nvidia-pytriton; its mere name if there is none."""
    places = [_PROGRAM, f"/opt/{_PROGRAM}/bin/{_PROGRAM}"]
    if wheel := _folder("pytriton"):
        places.append(f"{wheel}/{_PROGRAM}/bin/{_PROGRAM}")
    return next((place for place in places if shutil.which(place)), _PROGRAM)


def _folder(module: str) -> Path | None:
    """Returns the folder of an installed module, which is not imported."""
    found = importlib.util.find_spec(module)
    return Path(found.origin).parent if found and found.origin else None


def run_triton(command: TritonCommand) -> None:
    """Turns this process into Triton.

    Raises:
        HostError: This machine has no Triton.
    """
    if not command.found:
        raise HostError(
            f"{_PROGRAM} is neither on PATH nor in /opt/{_PROGRAM}, and nvidia-pytriton is not installed",
            hint="`pip install nvidia-pytriton` brings Triton, and so does NVIDIA's image (deploy/triton/Dockerfile).",
        )
    os.execvpe(command.arguments[0], command.arguments, {**os.environ, **command.environment})
