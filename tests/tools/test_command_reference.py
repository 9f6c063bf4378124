from tools.command_reference import DOCUMENT, page, reference


def test_the_page_of_the_commands_is_what_they_say():
    assert DOCUMENT.read_text() == page(), "stale: run `make docs`"


def test_the_reference_of_the_site_has_the_options_of_every_command():
    text = reference()
    for heading in ("## exportkit export\n", "## exportkit ops\n", "## exportkit ops check\n"):
        assert text.count(heading) == 1
    assert "--dynamic PARAM:DIM=SIZE" in text
    assert "--help " not in text.partition("## exportkit export")[2]
