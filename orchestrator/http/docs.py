"""GET /docs: the application's own OpenAPI description as a page that loads nothing from elsewhere."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from jinja2 import Environment

from .page import HEADERS

_TEMPLATE = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
PATHS = ("/docs", "/openapi.json")
"""The page and the description that it is made of: they hold nothing of a deployment"""
LOADED = ("/page.css", "/icon.svg")
"""The files of orchestrator.page that it loads"""


def add_docs(app: FastAPI) -> None:
    """Add the page to an application, which must serve LOADED, too."""
    environment = Environment(autoescape=True)
    environment.filters["type_of"] = _type_of
    template = environment.from_string(_TEMPLATE)

    @cache  # strangers may ask for it
    def page() -> str:
        return template.render(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page(), media_type="text/html", headers=HEADERS)


def _type_of(schema: dict[str, Any]) -> str:
    """The type of a field in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type_of(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "items" in schema:
        return f"list of {_type_of(schema['items'])}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return ", ".join(map(json.dumps, values))
    bounds = {"at least": schema.get("minimum"), "at most": schema.get("maximum")}
    told = [f"{name} {value:g}" for name, value in bounds.items() if value is not None]
    return ", ".join([schema["type"], *told])
