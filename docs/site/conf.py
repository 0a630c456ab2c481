"""Configuration of Sphinx for the site: see `build.py`, which makes its source folder."""

import os

project = "Trackbed"
release = version = os.environ.get("TRACKBED_VERSION", "")
html_title = f"Trackbed {release}"
author = copyright = "the developers of Trackbed"  # noqa: A001  the name that Sphinx reads
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_linkify_fuzzy_links = False
# Examples of files and of terminals are no language that a lexer knows to the last line.
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_show_search_summary = False  # they are fetched, which a browser refuses for files
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_permalinks_icon = "#"
