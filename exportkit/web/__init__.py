"""What the pages of the server and of the report share: their look, how elements are made, light and dark."""

from pathlib import Path

STATIC = Path(__file__).with_name("static")
