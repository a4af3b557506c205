"""How the site is built: ``python -m sphinx -W -b html docs build/site``."""

from __future__ import annotations

import importlib.metadata
import runpy
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

project = "fedppl"
templates_path = ["_templates"]
author = "The fedppl developers"
release = importlib.metadata.version("fedppl")
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx_design",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["paper.md", "figures", "inventories"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # types stand in the text
autodoc_default_options = {"members": True, "inherited-members": False}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
default_role = "code"

# Types in docstrings that other packages document, by inventories that stand here: the site is built without a network.
_inventories = runpy.run_path(str(Path(__file__).parent / "inventories.py"))
intersphinx_mapping = _inventories["mapping"]()
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {word: word for word in DEFAULT_LINKS} | _inventories["aliases"]()  # no others than ours

html_theme = "pydata_sphinx_theme"
html_title = "fedppl"
html_theme_options = {"navigation_with_keys": False, "show_nav_level": 2, "secondary_sidebar_items": ["page-toc"]}
html_show_sourcelink = False
