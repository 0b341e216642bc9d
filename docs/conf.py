"""Sphinx builds the pages with this: ``make docs``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

import neula  # noqa: E402

project, author = "neula", "The neula developers"
copyright = "The neula developers, MIT licence"
release = version = neula.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "generated",
]
exclude_patterns = ["gallery", "_static/**"]
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(numpy|scipy|torch|sklearn|dask|h5py|zarr|concurrent)\..*")]
suppress_warnings = ["config.cache"]

# --- docstrings -------------------------------------------------------------------------------------------
autosummary_generate = True
autodoc_typehints = "none"  # numpydoc's sections say the types
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
numpydoc_show_class_members = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# --- pages ------------------------------------------------------------------------------------------------
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
html_theme = "pydata_sphinx_theme"
html_title = "neula"
html_show_search_summary = False  # Sphinx's script fails for a match whose anchor has no text
html_static_path = ["_static"]
html_css_files = ["katex/katex.min.css", "neula.css"]
html_search_scorer = str(DOCS / "search_scorer.js")
html_js_files = ["katex/katex.min.js"]
mathjax_path = "math.js"  # formulas are drawn by the KaTeX beside it: nothing is loaded from elsewhere
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "tango",
}
html_context = {"default_mode": "auto"}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
linkcheck_timeout, linkcheck_retries = 20, 3
linkcheck_anchors = False  # scripts make those of many pages
linkcheck_ignore = [r"https://doi\.org/"]  # publishers refuse programs

# --- examples ---------------------------------------------------------------------------------------------
INK = "#7c8088"
"""Frames and letters of pictures: readable on white and on black, since pictures have no background."""


def reset_torch(*_: object) -> None:
    """Undo what other examples have set: which ones ran before in this process depends on their times."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def style_pictures(*_: object) -> None:
    """Make pictures as wide as a phone, and warnings of neula errors."""
    import matplotlib as mpl

    for category in (UserWarning, RuntimeWarning):
        warnings.simplefilter("error", category)
    mpl.rcParams.update(
        {
            **{f"{key}.color": INK for key in ("text", "xtick", "ytick", "grid")},
            **{f"axes.{key}color": INK for key in ("edge", "label", "title")},
            "axes.prop_cycle": mpl.cycler(color=["#3d8fd6", "#e0762b", "#2fa36b", "#b565c9", "#c9a227"]),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.facecolor": "none",
            "figure.facecolor": "none",
            "savefig.facecolor": "none",
            "figure.figsize": (5.2, 3.6),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.titlesize": 12,
            "legend.frameon": False,
        }
    )


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"\.py$",
    "reset_modules": ("matplotlib", reset_torch, style_pictures),
    "image_srcset": ["2x"],
    "abort_on_example_error": True,
    "within_subsection_order": "generated.ExampleOrder",
    "backreferences_dir": "api/examples",
    "doc_module": ("neula",),
    "parallel": 2,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "write_computation_times": False,
}
