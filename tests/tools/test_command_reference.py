from tools.command_reference import DOCUMENT, reference


def test_the_command_line_reference_is_what_the_commands_say():
    assert DOCUMENT.read_text() == reference(), "stale: run `make docs`"
