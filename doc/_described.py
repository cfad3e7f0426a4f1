"""Figures of examples with texts that say what they show, for readers who do not see them."""

import re

import matplotlib.pyplot as plt
from sphinx_gallery.scrapers import matplotlib_scraper


def described(block, block_vars, gallery_conf, **options):
    """Save the figures as sphinx-gallery does, each with its label as alternative text."""
    labels = [plt.figure(number).get_label() for number in plt.get_fignums()]
    if not all(labels):
        raise ValueError(f"{block_vars['src_file']}: a figure has no description; give it one by `set_label`.")
    texts = iter(labels)
    page = matplotlib_scraper(block, block_vars, gallery_conf, **options)
    return re.sub(r":alt: .*", lambda _: f":alt: {next(texts)}", page)


def _get_sg_image_scraper():
    return described
