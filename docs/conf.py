"""How the site is built: ``python -m sphinx -W -b html docs build/site``."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

from numpydoc.xref import DEFAULT_LINKS
from sphinx_gallery.sorting import ExplicitOrder

from fedppl import _SPACES

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
    "sphinx.ext.intersphinx",
    "mathml",  # docs/mathml.py
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["paper.md", "figures", "inventories"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
# Pages of namespaces are called what users write after "fedppl.": curves for coregional.curves.
autosummary_context = {
    "spaces": {f"fedppl.{module.removeprefix('fedppl.')}": name for name, (module, _, _) in _SPACES.items()}
}
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

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "fedppl"
html_theme_options = {"navigation_with_keys": False, "show_nav_level": 2, "secondary_sidebar_items": ["page-toc"]}
html_show_sourcelink = False

# What is kept of an execution names no folder of the machine that it was on.
warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"

# Scripts are executed where their digest is not that of what docs/gallery keeps; a fresh clone executes none.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "subsection_order": ExplicitOrder(
        [f"../examples/gallery/{part}" for part in ("start", "outcomes", "sites", "trust")]
    ),
    "within_subsection_order": "FileNameSortKey",
    "nested_sections": False,  # one index page
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("fedppl",),
    "inspect_global_variables": False,
    "thumbnail_size": (320, 224),
    "ignore_repr_types": r"matplotlib",
    # What would differ from one execution to the next, or can be made from the script.
    "min_reported_time": 10_000,
    "write_computation_times": False,
    "download_all_examples": False,
    "notebook_extensions": set(),
    "show_signature": False,
}
html_sidebars = {"gallery/**": []}  # room for code
html_css_files = ["gallery.css"]
html_static_path = ["_static"]
_ZIP = re.compile(r"\n    \.\. container:: sphx-glr-download sphx-glr-download-zip\n\n.*\n")


def without_zip(app: Any, docname: str, source: list[str]) -> None:
    """Take out the link to an archive of one script, which is beside it anyway."""
    if docname.startswith("gallery/"):
        source[0] = _ZIP.sub("", source[0])


def setup(app: Any) -> None:
    """Connect what changes pages before they are read."""
    app.connect("source-read", without_zip)
