"""How the documentation is built: Sphinx with MyST pages, the docstrings read in."""

from __future__ import annotations

from wholebatch import __version__

project = "wholebatch"
author = "the wholebatch authors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]

html_theme = "furo"
html_title = "wholebatch"
html_show_sphinx = False
html_show_copyright = False
