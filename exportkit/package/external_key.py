"""Signs with a command, so that the private key can stay in a hardware module or with a key service.

The command gets what is to be signed on stdin and answers with the signature on stdout. Nothing is believed of the
answer: it counts if it is the public key's signature of what was given, checked as a reader checks it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import byref, c_int
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exportkit.errors import SigningError, UsageError
from exportkit.package import core
from exportkit.package.keys import PublicKey, read_public_key

SignInput = Literal["message", "digest"]

_MAX_ANSWER_BYTES = 64 << 10
_ED25519_BYTES = 64


@dataclass(frozen=True)
class CommandKey:
    """A key that a command signs with, and `public` checks.

    Attributes:
        public: The public key.
        pem: Its PEM text.
        command: The program and its arguments. No shell sees them.
        gets: Whether the command gets the message, or only the digest by the curve's hash.
        timeout: The seconds after which the command is ended.
    """

    public: PublicKey
    pem: str
    command: tuple[str, ...]
    gets: SignInput
    timeout: float

    def sign(self, message: bytes) -> bytes:
        """Returns the command's signature, as a private key makes it.

        Raises:
            SigningError: The command cannot be started, fails, takes too long, or its answer is not a signature by
                this key of this message.
        """
        given = message
        if self.gets == "digest":
            name = core.text("ek_public_key_hash", core.encoded(self.pem)).decode()
            given = hashlib.new(name, message).digest()
        answer = _answer(self.command, given, self.timeout)
        for signature in _readings(answer, self.public.is_ed25519):
            if _is_valid(self.pem, signature, message):
                return signature
        what = "64 bytes of Ed25519" if self.public.is_ed25519 else "ECDSA in DER, or r and s"
        raise SigningError(
            f"the command {self.command[0]} answered {len(answer)} bytes, which are not a signature by the key "
            f"{self.public.source} of what it was given",
            hint=f"Allowed are {what}, as bytes or in base64. It must be the private half of this key that signs the "
            f"{self.gets}; --sign-input chooses between message and digest.",
        )


def command_key(command: str, public_key: Path, gets: SignInput = "message", timeout: float = 60.0) -> CommandKey:
    """Makes a key of a command line.

    Args:
        command: The command, split into words as a shell does; no shell runs it.
        public_key: The PEM file of the public key.
        gets: What the command gets on stdin.
        timeout: The seconds that it may take.

    Raises:
        UsageError: The command has no words, the key cannot be used, or an Ed25519 key is to sign a digest.
        HostError: libcrypto is not installed.
    """
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--sign-command {command!r} cannot be split into words: {error}") from error
    if not words:
        raise UsageError("--sign-command is empty", hint="Give the command that signs what it reads from stdin.")
    public = read_public_key(public_key)  # refuses what is too large, too
    if public.is_ed25519 and gets == "digest":
        raise UsageError(
            f"the key {public_key} is an Ed25519 key, which signs the message itself",
            hint="Leave out --sign-input digest, or use a key on a NIST curve.",
        )
    return CommandKey(public, public_key.read_text(), words, gets, timeout)


def _answer(command: tuple[str, ...], given: bytes, timeout: float) -> bytes:
    """Runs a command and returns its stdout. Its stderr is ours."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as stdin:  # a file, because some tools ask for the size of what they sign
        stdin.write(given)
        stdin.seek(0)
        try:
            # In a session of its own all its children can be ended; a person's PIN needs the terminal of this one.
            process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, start_new_session=not sys.stdin.isatty()
            )
        except OSError as error:
            raise SigningError(f"the command {command[0]} cannot be started: {error.strerror}") from error
    try:
        answer = _read(process, command[0], deadline, timeout)
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise _too_long(command[0], timeout) from None
    finally:
        _end(process)
    if status != 0:
        raise SigningError(
            f"the command {command[0]} ended with status {status} and made no signature",
            hint="What it said is above, if it said anything.",
        )
    return answer


def _read(process: subprocess.Popen[bytes], name: str, deadline: float, timeout: float) -> bytes:
    """Reads a process's stdout to its end."""
    assert process.stdout is not None
    answer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _too_long(name, timeout)
            block = os.read(process.stdout.fileno(), _MAX_ANSWER_BYTES)
            if not block:
                return answer
            answer += block
            if len(answer) > _MAX_ANSWER_BYTES:
                raise SigningError(f"the command {name} answered more than {_MAX_ANSWER_BYTES} bytes")


def _too_long(name: str, timeout: float) -> SigningError:
    return SigningError(
        f"the command {name} made no signature within {timeout:g} s", hint="Allow it more with --sign-timeout SECONDS."
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and its children if it has a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, 9)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _readings(answer: bytes, ed25519: bool) -> Iterator[bytes]:
    """Yields what an answer may mean: bytes or base64; for a curve, DER or r and s of equal length."""
    decoded = [answer]
    text = b"".join(answer.split()).translate(bytes.maketrans(b"-_", b"+/"))
    with suppress(binascii.Error, ValueError):
        decoded.append(base64.b64decode(text + b"=" * (-len(text) % 4), validate=True))
    for signature in decoded:
        if ed25519:
            if len(signature) == _ED25519_BYTES:
                yield signature
            continue
        yield signature
        if signature and len(signature) % 2 == 0:
            half = len(signature) // 2
            yield _der(signature[:half], signature[half:])


def _der(*numbers: bytes) -> bytes:
    """Returns big-endian numbers as a sequence in DER."""
    body = b"".join(_tagged(2, n.to_bytes(n.bit_length() // 8 + 1, "big")) for n in map(_number, numbers))
    return _tagged(0x30, body)


def _number(content: bytes) -> int:
    return int.from_bytes(content, "big")


def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _is_valid(pem: str, signature: bytes, message: bytes) -> bool:
    valid = c_int()
    arguments = (core.encoded(pem), signature, len(signature), message, len(message))
    core.call("ek_verify_signature", *arguments, byref(valid))
    return bool(valid.value)
