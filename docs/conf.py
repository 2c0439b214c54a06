"""Settings of the documentation: `make docs` builds it into docs/_build, without a network."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import docstrings
import jaxtyping  # noqa: F401  first, so that signatures show shapes

from ropewalk import __version__

project = "Ropewalk"
author = copyright = "the Ropewalk authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "mathml"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Ropewalk {version}"
html_show_copyright = html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["ropewalk.css"]
html_math_renderer = "mathml"

smartquotes = False
maximum_signature_line_length = 80

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = docstrings.SECTIONS
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(torch|jaxtyping|matplotlib|decimal|collections|pathlib)\..*|Tensor")
]  # not documented here
