"""The README for package indexes: relative links become URLs of the repository.

The repository is named in ``[project.urls]`` of pyproject.toml. Without it, links stay relative.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def absolute(text: str, repository: str, version: str) -> str:
    """Replace relative links to pages and pictures by URLs of the tag of a version."""
    base = repository.rstrip("/")
    text = re.sub(r"\]\((?!\w+:|#)", f"]({base}/blob/v{version}/", text)
    return re.sub(r'\b(src|srcset)="(?!\w+:)', rf'\1="{base}/raw/v{version}/', text)


def dynamic_metadata(field: str, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """The field ``readme``, for scikit-build-core."""
    text = Path("README.md").read_text("utf-8")
    urls = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    if "Repository" in urls:
        text = absolute(text, urls["Repository"], project["version"])
    return {"content-type": "text/markdown", "text": text}
