"""Build the reference with pdoc, and fail where a public name has no docstring.

Usage: python docs/build.py FOLDER
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pdoc
import pdoc.doc

PACKAGE = "hushgrad"


def undocumented(namespace: pdoc.doc.Namespace) -> Iterator[str]:
    """Full names of the public members of `namespace`, at any depth, that say nothing."""
    for member in namespace.own_members:
        # Fields are told by their name and type, and pdoc does not see the text below a constant
        # that another module defines; tests/test_public_names.py does.
        is_property = isinstance(getattr(namespace.obj, member.name, None), property)
        if member.name.startswith("_") or (member.kind == "variable" and not is_property):
            continue
        if not member.docstring.strip():
            yield member.fullname
        if isinstance(member, pdoc.doc.Namespace):
            yield from undocumented(member)


def main(folder: Path) -> None:
    """Write the reference of the whole package to `folder`."""
    package = pdoc.doc.Module.from_name(PACKAGE)
    if missing := sorted(set(undocumented(package))):
        sys.exit("expected a docstring for every public name, got none for " + ", ".join(missing))
    pdoc.pdoc(PACKAGE, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
