"""The browser of the tests of the server's page."""

from tests.serve.page.conftest import browser

__all__ = ["browser"]
