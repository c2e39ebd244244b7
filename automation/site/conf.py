"""Settings of Sphinx for the documentation site. `nox -s docs` uses them."""

from __future__ import annotations

import sys
from pathlib import Path

# Sphinx loads this file by its path, so the root of the repository is not in sys.path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gdrkit

project = "gdrkit"
author = "the authors of gdrkit"
version = release = gdrkit.__version__
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

# Make link targets for headings down to level 4. Sphinx warns about a link without a target, and `nox -s docs` makes
# each warning an error.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
# The description of a class lists its attributes. Without this setting, each attribute would be described a second
# time.
napoleon_use_ivar = True
napoleon_use_rtype = False

# Some names exist in several packages, and Sphinx warns that a reference to such a name is ambiguous. Each docstring
# refers to its own package, so this warning is of no use.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"gdrkit {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
# A block of code that does not name its language is shown as plain text.
highlight_language = "text"
# With smart quotes, the two hyphens of an option, such as --help, would become a dash.
smartquotes = False
