"""From the docstrings' numpydoc markup to the Markdown that mkdocstrings reads (a Griffe extension)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, GriffeError, Module, Object

_ROLE = re.compile(r":\w+:`~?([\w.]+)`")
_CITATION = re.compile(r"\[(\d+)\]_")
_REFERENCE = re.compile(r"^\.\. (\[\d+\] .+(?:\n   .+)*)", re.M)
_CHOICES = re.compile(r"^(\w+ : )\{(.+?)\}", re.M)
_SHAPE = re.compile(r"^((?:\w[\w, ]* : )?\w+), shape \(", re.M)
_SPECIAL = re.compile(r"[*_<\[\]]")
_DEFINITION = re.compile(r"^(``.+``)\n((?: {4}.+(?:\n|$))+)", re.M)


class Numpydoc(Extension):
    """Turns roles into links, citations and references into text, definition lists into Markdown's.

    Types are kept from looking like Python, as which Griffe would read them: it takes the first of several
    choices for the default, and a shape for a call. Comments about the fields of a class become a section of
    its docstring.
    """

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Rewrite every docstring of a package that has been read."""
        _rewrite(pkg)


def _rewrite(obj: Object) -> None:
    if obj.docstring is not None:
        fields = _fields(obj) if isinstance(obj, Class) else ""
        obj.docstring.value = _markdown(obj.docstring.value, obj) + fields
    for member in obj.members.values():
        if not member.is_alias:
            _rewrite(member)


def _fields(cls: Class) -> str:
    """The fields of a class as a section, if comments beside or above some of them explain them."""
    lines, entries, explained = cls.lines, [], False
    for name, member in cls.members.items():
        is_field = lines and not member.is_alias and member.is_attribute and not member.docstring
        if not is_field or member.annotation is None:
            continue
        place = member.lineno - cls.lineno
        text, above = lines[place].partition("  # ")[2], place - 1
        while not text and lines[above].lstrip().startswith("# "):
            above -= 1
        comments = [text, *(line.strip()[2:] for line in lines[above + 1 : place])]
        text = _SPECIAL.sub(r"\\\g<0>", " ".join(x for x in comments if not x.startswith(("noqa", "type:"))))
        explained = explained or bool(text.strip())
        entries.append(f"{name} : {member.annotation}\n    {text.strip()}")
    return "\n\nAttributes\n----------\n" + "\n".join(entries) if explained else ""


def _markdown(text: str, obj: Object) -> str:
    text = _ROLE.sub(lambda match: _link(match[1], obj), text)
    text = _CITATION.sub(r"[\1]", text)
    text = _REFERENCE.sub(lambda match: match[1].replace("\n   ", "\n"), text)
    text = _CHOICES.sub(r"\1one of \2", text)
    text = _SHAPE.sub(r"\1 of shape (", text)
    return _DEFINITION.sub(lambda match: f"{match[1]}\n:   {match[2].lstrip()}\n", text)


def _link(name: str, obj: Object) -> str:
    """A link to a name with a docstring in this package, found from where ``obj`` is; code for any other."""
    try:
        path = name if name.startswith("neula.") else obj.resolve(name)
        found = obj.modules_collection[path]
        if found.is_alias:
            path, found = found.final_target.path, found.final_target
        # Of a module and the function in it that has its name the function is meant.
        if found.is_module and found.name in found.members:
            path, found = f"{path}.{found.name}", found.members[found.name]
        documented = found.has_docstring
    except (GriffeError, KeyError):
        documented = False
    return f"[`{name}`][{path}]" if documented else f"`{name}`"
