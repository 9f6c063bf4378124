from exportkit.cli.reference import REFERENCE, reference


def test_the_command_line_reference_is_what_the_commands_say():
    assert REFERENCE.read_text() == reference(), "stale: run `make docs`"
