"""How the documentation is built: `make doc`."""

import os
import warnings

import matplotlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the examples' tensors are small: more threads only wait
matplotlib.use("agg")

from skksivi._version import __version__

# warnings of the examples are shown, without the paths of the machine that builds
warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)

project = "skksivi"
author = "The skksivi developers"
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "gallery/**/GALLERY_HEADER.rst", "gallery/GALLERY_HEADER.rst"]
default_role = "py:obj"

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "/plot_",
    "abort_on_example_error": True,
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("skksivi",),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"skksivi {release}"
html_static_path = ["_static"]
html_css_files = ["skksivi.css"]
html_show_sourcelink = False
html_domain_indices = False
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 5,
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": [],
}
html_sidebars = {
    name: []
    for name in (
        *("index", "quick_start", "scores", "bridges", "diagnose", "comparison", "search"),
        *("equations", "benchmarks", "contributing", "changelog"),
    )
}
