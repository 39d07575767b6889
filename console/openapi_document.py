"""The OpenAPI document of the density API, generated from its routes and structs."""

import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import msgspec

from console.api_requests import LONGEST_TEXT, ParameterSchema
from console.api_routes import ROUTES, ApiRoute
from console.density_answers import ErrorAnswer

OPENAPI: Final = "3.1.0"
_REFERENCE: Final = "#/components/schemas/{name}"
_FAILURES: Final = {
    "400": "The request is impossible; the message says why.",
    "401": "The token is missing or not valid.",
    "403": "The user of the token has no right to this.",
    "404": "The named object does not exist.",
    "413": "The body is too large.",
    "503": "The cluster is not known yet, or the token cannot be reviewed: try again.",
}


@functools.cache
def build_document() -> Mapping[str, Any]:
    """Return the OpenAPI document of all routes, with a JSON schema of each struct that they take or answer with."""
    # 1. The structs of all routes; None: a route takes no body, or answers with no struct.
    types = [
        message_type
        for route in ROUTES
        for message_type in (route.answer_type, route.body_type)
        if message_type is not None
    ]
    unique = list(dict.fromkeys([*types, ErrorAnswer]))

    # 2. Their schemas. references: how to refer to each, in the order of `unique`; components: the schemas by name
    references, components = msgspec.json.schema_components(unique, ref_template=_REFERENCE)
    schemas = dict(zip(unique, references, strict=True))

    # 3. The operations by path and method.
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_route(route, schemas)

    return {
        "openapi": OPENAPI,
        "info": {"title": "Pomona density API", "version": version("pomona")},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the cluster, such as `kubectl create token NAME` prints.",
                }
            },
        },
    }


def _describe_route(route: ApiRoute, schemas: Mapping[type, Any]) -> dict[str, Any]:
    """Return the OpenAPI operation of a route: parameters, body, answer, and the failures that all routes share.

    `schemas` has, for each struct, the reference to its schema in the document.
    """
    # 1. The responses by status. _FAILURES: what each status of a failure means
    answer = schemas[route.answer_type] if route.answer_type is not None else {"type": "object"}
    responses: dict[str, Any] = {
        "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}}
    }
    if route.method == "GET":
        responses["304"] = {"description": "The client has this answer already: its ETag is in If-None-Match."}
    for status, text in _FAILURES.items():
        responses[status] = {"description": text, "content": {"application/json": {"schema": schemas[ErrorAnswer]}}}

    # 2. The parameters: first the one in the path, if there is one, then those of the query.
    parameters = [_describe_parameter(parameter) for parameter in route.parameters]
    if "{name}" in route.path:
        name = {"type": "string", "maxLength": LONGEST_TEXT}
        parameters.insert(0, {"name": "name", "in": "path", "required": True, "schema": name})

    # 3. The body, for the routes that take one.
    described: dict[str, Any] = {"summary": route.summary, "parameters": parameters, "responses": responses}
    if route.body_type is not None:
        content = {"application/json": {"schema": schemas[route.body_type]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _describe_parameter(parameter: ParameterSchema) -> dict[str, Any]:
    """Return the parameter object of a query parameter."""
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.description,
        "required": parameter.is_required,
        "schema": dict(parameter.schema),
    }
