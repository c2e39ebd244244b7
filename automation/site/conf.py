"""Settings of Sphinx for the documentation site. `nox -s docs` uses them."""

from __future__ import annotations

import sys
from pathlib import Path

# Sphinx loads this file by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gdrkit

project = "gdrkit"
author = "the authors of gdrkit"
version = release = gdrkit.__version__
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}

# A link to a heading that does not exist is a warning, and the session makes each warning an error.
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

# Sphinx warns about a name that several packages have. A docstring means the class or attribute of its own package.
suppress_warnings = ["ref.python"]

html_theme = "furo"
html_title = f"gdrkit {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
# Code in the documents is plain text if it does not name its language.
highlight_language = "text"
# Options begin with two hyphens, which would become a dash.
smartquotes = False
