"""How the site is built: ``python -m sphinx -W -b html docs build/site``."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "fedppl"
templates_path = ["_templates"]
author = "The fedppl developers"
release = importlib.metadata.version("fedppl")
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "mathml",  # docs/mathml.py
    "sphinx_design",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["paper.md", "figures"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # types stand in the text
autodoc_default_options = {"members": True, "inherited-members": False}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
default_role = "code"

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "fedppl"
html_theme_options = {"navigation_with_keys": False, "show_nav_level": 2, "secondary_sidebar_items": ["page-toc"]}
html_show_sourcelink = False
