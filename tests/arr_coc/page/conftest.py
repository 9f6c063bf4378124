"""The browser of the tests of the server's page."""

from tests.serve.page.conftest import _own_cache, browser, launch

__all__ = ["_own_cache", "browser", "launch"]
