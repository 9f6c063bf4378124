"""Certificates for tests: an authority, a server, a client, and a stranger's client."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = """
set -eu
authority() {  # NAME
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=$1" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
    -keyout "$1.key" -out "$1.pem"
}
leaf() {  # NAME AUTHORITY EXTENSIONS
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
  printf '%s' "$3" > "$1.ext"
  openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -days 2 -extfile "$1.ext" -out "$1.pem"
}
authority authority
authority strangers
leaf server authority 'subjectAltName=IP:127.0.0.1,DNS:localhost'
leaf client authority 'extendedKeyUsage=clientAuth'
leaf stranger strangers 'extendedKeyUsage=clientAuth'
chmod 600 *.key
"""


def make_certificates(folder: Path) -> Path:
    """Writes `authority`, `server`, `client`, `strangers` and `stranger`, each with .pem and .key."""
    subprocess.run(["bash", "-c", _SCRIPT], cwd=folder, check=True, capture_output=True)
    return folder
