from __future__ import annotations

import logging

from exportkit.serve.process_settings import IndentedFormatter


def test_no_text_of_a_client_passes_for_another_entry():
    record = logging.LogRecord("x", logging.ERROR, "", 0, "GET %s failed", ('/a\n{"status": 200}\r\x1b[2J',), None)
    text = IndentedFormatter("%(levelname)s: %(message)s").format(record)
    assert text == 'ERROR: GET /a failed\n  {"status": 200}\\r\\x1b[2J failed'.replace("/a failed", "/a")


def test_a_traceback_is_kept():
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (type(error), error, error.__traceback__))
    first, *others = IndentedFormatter("%(message)s").format(record).splitlines()
    assert first == "failed"
    assert others[-1] == "  ValueError: why"
    assert all(line.startswith("  ") for line in others)
