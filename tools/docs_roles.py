"""Show as code on the site what docstrings name as Sphinx does (:func:`x`), for `make docs`."""

import re

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([\w.]+)`")


class Roles(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
