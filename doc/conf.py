"""How the documentation is built: `make doc`."""

import os
import re
import sys
import tomllib
import warnings
from pathlib import Path

import matplotlib
from numpydoc.xref import DEFAULT_LINKS
from sphinx_gallery.sorting import ExplicitOrder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the examples' tensors are small: more threads only wait
matplotlib.use("agg")
sys.path.insert(0, str(Path(__file__).parent))  # where `_described` is

from skksivi import plotting
from skksivi._utils import DOCUMENTATION, __version__

# warnings of the examples are shown, without the paths of the machine that builds
warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)

project = "skksivi"
author = "The skksivi developers"
copyright = author
version = release = __version__

repository = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Repository"
]
rst_epilog = f".. |repository| replace:: {repository}"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas without a server of others
    "sphinx_copybutton",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "_source",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "gallery/**/GALLERY_HEADER.rst", "gallery/GALLERY_HEADER.rst"]
default_role = "py:obj"
smartquotes = False  # quoted values are to be copied as they are

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # but these
numpydoc_xref_aliases = {
    **{name: name for name in DEFAULT_LINKS},  # types of Python and numpy have no page here
    **{name: f"skksivi.{name}" for name in ("KSIVIApproximator", "HKSIVIApproximator")},
    **{name: f"skksivi.plotting.{name}" for name in plotting.__all__},
    **{name: f"skksivi.diagnostics.{name}" for name in ("Diagnosis", "Check")},
    **{name: f"skksivi.metrics.{name}" for name in ("KSDTest", "NoiseFloor")},
    "Calibration": "skksivi.calibration.Calibration",
    "Kernel": "skksivi.kernels.Kernel",
    "Target": "skksivi.targets.Target",
}
# Links to other manuals need their inventories, so only where the manual is published: it builds without a network.
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "sklearn": ("https://scikit-learn.org/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "arviz": ("https://python.arviz.org/en/stable", None),
        "pymc": ("https://www.pymc.io/projects/docs/en/stable", None),
        "numpyro": ("https://num.pyro.ai/en/stable", None),
    }
    if os.environ.get("READTHEDOCS")
    else {}
)
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not copied
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "/plot_",
    "within_subsection_order": ExplicitOrder(
        [
            *(
                "plot_orings.py",
                "plot_waveform.py",
                "plot_predictors.py",
                "plot_classification.py",
                "plot_numpyro.py",
            ),
            *("plot_pymc.py", "plot_comparison.py", "plot_diagnose.py", "plot_calibration.py"),
            *("plot_hierarchy.py", "plot_mode_weights.py"),
            *("plot_toys.py", "plot_convergence.py", "plot_gradient_norms.py", "plot_smoothness.py"),
            *("plot_logistic_regression.py", "plot_diffusion.py", "plot_student.py", "*"),
        ]
    ),
    "remove_config_comments": True,
    "image_scrapers": ("_described",),
    "image_srcset": ["2x"],
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
html_js_files = ["skksivi.js"]
html_show_sourcelink = False
html_domain_indices = False
published = os.environ.get("READTHEDOCS_VERSION")  # elsewhere there are no other versions to switch to
html_theme_options = {
    "navbar_end": [*(["version-switcher"] if published else []), "theme-switcher", "navbar-icon-links"],
    # the newest list, so that the pages of an old version know those that came after it
    "switcher": {
        "json_url": DOCUMENTATION.removesuffix("stable") + "latest/_static/switcher.json",
        "version_match": published or release,
    },
    "check_switcher": False,  # which would load the list in a build
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "icon_links": [{"name": "Repository", "url": repository, "icon": "fa-brands fa-github"}],
    "footer_start": [],
    "footer_end": [],
}
WIDE = (
    *("index", "installation", "quick_start", "nuts", "ksivi", "sklearn"),
    *("how", "diagnose", "messages", "comparison", "contributing", "changelog"),
)
html_sidebars = {name: [] for name in WIDE}


def name_the_paper(_1, _2, _3, _4, _5, lines):
    """Say which paper a docstring means that has no reference to it; a quoted name that ends in "_" is no link."""
    lines[:] = [line if ">>>" in line else re.sub(r'"(\w+)_"', r'"\1\\_"', line) for line in lines]
    text = " ".join(lines)
    if re.search(r"\b[Tt]he paper\b", text) and "2405.18997" not in text:
        lines += ["", "The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__."]


def setup(app):
    """Leave out the fields of named tuples, which the attributes of their classes describe, and name the paper."""
    app.connect("autodoc-process-docstring", name_the_paper, priority=900)  # after numpydoc
    app.connect("autodoc-skip-member", lambda _1, _2, _3, member, *_: type(member).__name__ == "_tuplegetter" or None)
