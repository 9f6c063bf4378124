"""Sphinx's settings for the site. `python -m tools.site` gathers the pages and calls Sphinx."""

import exportkit

project = "exportkit"
version = release = exportkit.__version__
project_copyright = "the exportkit developers"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["front.css"]
html_title = f"exportkit {version}"
html_show_sphinx = False
html_copy_source = False

default_role = "code"  # what stands in backquotes in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False

# A block that the tests run may end in `...`, and a console block is no program of any language.
suppress_warnings = ["misc.highlighting_failure"]

today_fmt = " "  # the man page says no date, so that it is the same on every day
man_pages = [("cli", "exportkit", "PyTorch modules with custom operators as one verified package", [], 1)]
