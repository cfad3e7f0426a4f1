"""The role `source`: a name inside the package, with a link to its code among the pages of `sphinx.ext.viewcode`."""

import importlib
import posixpath

from docutils import nodes
from sphinx import addnodes
from sphinx.ext.viewcode import OUTPUT_DIRNAME, viewcode_anchor
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxRole


def split(name):
    """Return the module and the rest of a dotted name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        return ".".join(parts[:n]), ".".join(parts[n:])
    raise ValueError(f"There is no module of {name}.")


class Source(SphinxRole):
    """``:source:`stein._estimators.value_and_gradients``` shows the name and leads to its lines."""

    def run(self):
        """Return the name, and note that its module is to have a page."""
        module, name = split(f"skksivi.{self.text}")
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.find_tags()
        if name not in analyzer.tags:
            raise ValueError(f"{module} has no {name} at a line of its own.")
        modules = self.env.__dict__.setdefault("_viewcode_modules", {})
        public = module.split("._")[0]
        entry = modules.setdefault(module, (analyzer.code, analyzer.tags, {}, public))
        shown = nodes.literal("", self.text.replace(".", ".\u200b"))  # a long name may break there
        if name not in entry[2]:
            entry[2][name] = self.env.docname
            shown["ids"].append(f"{entry[3]}.{name}")  # where "[docs]" beside the code leads
        page = posixpath.join(OUTPUT_DIRNAME, module.replace(".", "/"))
        return [shown, viewcode_anchor(reftarget=page, refid=name, refdoc=self.env.docname)], []


def add_short_ids(_app, doctree):
    """Name each part of ``skksivi.diagnostics`` as a part of the package, too. "[docs]" beside its code leads there:
    all of one file lead to one module, and `diagnose` belongs to the package.
    """
    for signature in doctree.findall(addnodes.desc_signature):
        if signature.get("module") == "skksivi.diagnostics":
            signature["ids"] += [name.replace("skksivi.diagnostics.", "skksivi.") for name in signature["ids"]]


def setup(app):
    """Add the role."""
    app.add_role("source", Source())
    app.connect("doctree-read", add_short_ids)
    return {"version": "1", "parallel_read_safe": True}
