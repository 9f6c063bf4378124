"""OpenSSL's libcrypto, which the reader of packages opens by its name, beside another OpenSSL in the process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from exportkit.package.signing import sign_package
from tests.cpp_reader import program
from tests.package.signers import package, signer


def test_a_process_with_another_openssl_checks_signatures(tmp_path: Path) -> None:
    """Calls of libcrypto's own functions would end the process if they reached those of the other one."""
    release, signed = signer(tmp_path, "release"), package(tmp_path)
    sign_package(signed, release.key)
    ctypes.CDLL("libcrypto.so.3")
    maps = Path("/proc/self/maps").read_text().split()
    functions = _functions(next(word for word in maps if word.endswith("/libcrypto.so.3")))
    assert "EVP_DigestVerifyInit" in functions
    source = tmp_path / "other.c"
    source.write_text("void abort(void);\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in functions))
    other = source.with_suffix(".so")
    subprocess.run([os.environ.get("CC", "gcc"), "-w", "-shared", "-fPIC", source, "-o", other], check=True)
    command = list(map(str, [program(), "trust", tmp_path / "no-policy", signed, "", release.public]))
    done = subprocess.run(command, env={"LD_PRELOAD": str(other)}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ok": True, "value": [str(release.public)]}


def _functions(library: str) -> list[str]:
    """The functions that a library exports."""
    with ELFFile.load_from_path(library) as elf:
        symbols = elf.get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        functions = (each for each in symbols.iter_symbols() if each["st_info"]["type"] == "STT_FUNC")
        return sorted({each.name for each in functions if each["st_shndx"] != "SHN_UNDEF"})
