"""The routes of the density API: what each asks for, what it answers, and which right it takes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from console.access_reviews import SEE_NODES, AccessDemand
from console.api_requests import (
    MODEL_PARAMETER,
    NODE_PARAMETER,
    PAGE_PARAMETERS,
    QUERY_PARAMETERS,
    SEARCH_PARAMETER,
    ParameterSchema,
    check_text,
    read_density_query,
    read_page,
    read_simulation,
    read_text,
)
from console.density_answers import (
    CatalogAnswer,
    CostAnswer,
    InstalledModelsAnswer,
    NodeDetailAnswer,
    NodesAnswer,
    QueryAnswer,
    RuntimesAnswer,
    SimulateAnswer,
    SimulateRequest,
)
from console.density_costs import list_costs
from console.density_prices import DensityPrices
from console.density_queries import (
    describe_node,
    list_catalog,
    list_installed_models,
    list_nodes,
    list_runtimes,
    query_nodes,
)
from console.density_service import DensityService
from console.density_simulation import ModelNotFound, simulate_model
from console.density_snapshot import DensitySnapshot, Visibility
from console.fit_table import FitTable
from console.llmfit_answers import list_llmfit_models
from fitness.llmfit_rows import describe_system


class NothingFoundError(Exception):
    """Nothing exists that the path names; the message is for the client."""


class AskedRequest(NamedTuple):
    """The parts of a request by which it is answered."""

    query: Mapping[str, str]
    name: str = ""
    """Last part of the path, where it names something."""
    body: bytes = b""
    visible: Visibility = frozenset()
    """The scope that the caller may see."""


class DensityContext(NamedTuple):
    """The inputs of all routes."""

    service: DensityService
    prices: DensityPrices


Answer = Callable[[DensityContext, AskedRequest], Awaitable[Any]]


class ApiRoute(NamedTuple):
    """One route."""

    method: str
    path: str
    summary: str
    answer: Answer
    answer_type: type | None
    """Struct of the answer; None: an object in llmfit's keys."""
    parameters: tuple[ParameterSchema, ...] = ()
    demand: AccessDemand | None = SEE_NODES
    """The right that it takes; None: whoever has a valid token, who sees his own namespaces."""
    body_type: type | None = None


async def _answer_nodes(context: DensityContext, asked: AskedRequest) -> NodesAnswer:
    page, vendors = read_page(asked.query), context.service.view.vendors
    return await context.service.compute(
        lambda snapshot, table: list_nodes(snapshot, table, vendors, asked.visible, page)
    )


async def _answer_node(context: DensityContext, asked: AskedRequest) -> NodeDetailAnswer:
    page, vendors, name = read_page(asked.query), context.service.view.vendors, check_text("name", asked.name)
    answer = await context.service.compute(
        lambda snapshot, table: describe_node(snapshot, table, vendors, asked.visible, name=name, page=page)
    )
    if answer is None:
        raise NothingFoundError("no node and no host has this name: GET /api/v1/density/nodes lists them")
    return answer


async def _answer_runtimes(context: DensityContext, asked: AskedRequest) -> RuntimesAnswer:
    page, vendors = read_page(asked.query), context.service.view.vendors
    return await context.service.compute(lambda snapshot, _: list_runtimes(snapshot, vendors, asked.visible, page))


async def _answer_installed(context: DensityContext, asked: AskedRequest) -> InstalledModelsAnswer:
    page = read_page(asked.query)
    return await context.service.compute(lambda snapshot, _: list_installed_models(snapshot, asked.visible, page))


async def _answer_query(context: DensityContext, asked: AskedRequest) -> QueryAnswer:
    page, query = read_page(asked.query), read_density_query(asked.query, read_text(asked.query, "model"))
    return await context.service.compute(
        lambda snapshot, table: query_nodes(snapshot, table, asked.visible, query, page)
    )


async def _answer_catalog(context: DensityContext, asked: AskedRequest) -> CatalogAnswer:
    page = read_page(asked.query)
    return await context.service.compute(lambda snapshot, table: list_catalog(snapshot, table, asked.visible, page))


async def _answer_simulation(context: DensityContext, asked: AskedRequest) -> SimulateAnswer:
    request = read_simulation(asked.body)
    try:
        return await context.service.compute(
            lambda snapshot, table: simulate_model(snapshot, table, asked.visible, request)
        )
    except ModelNotFound as error:
        raise NothingFoundError(str(error)) from error


async def _answer_cost(context: DensityContext, asked: AskedRequest) -> CostAnswer:
    page = read_page(asked.query)
    return await context.service.compute(lambda snapshot, _: list_costs(snapshot, context.prices, asked.visible, page))


async def _answer_models(context: DensityContext, asked: AskedRequest) -> dict[str, Any]:
    page, node = read_page(asked.query), read_text(asked.query, "node", "")
    text = read_text(asked.query, "search", "*") or "*"
    query = read_density_query(asked.query, text)

    def answer(snapshot: DensitySnapshot, table: FitTable) -> dict[str, Any]:
        if node and node not in snapshot.machines:
            raise NothingFoundError("no node and no host has this name: GET /api/v1/density/nodes lists them")
        return list_llmfit_models(snapshot, table, asked.visible, query, page, node=node)

    return await context.service.compute(answer)


async def _answer_system(context: DensityContext, asked: AskedRequest) -> dict[str, Any]:
    node = read_text(asked.query, "node")
    snapshot = context.service.take_snapshot()
    if node not in snapshot.machines:
        raise NothingFoundError("no node and no host has this name: GET /api/v1/density/nodes lists them")
    return {"node": {"name": node, "os": "linux"}, "system": describe_system(snapshot.describe_machine(node))}


_DENSITY: Final = "/api/v1/density"
ROUTES: Final = (
    ApiRoute(
        *("GET", f"{_DENSITY}/nodes", "All nodes and hosts, with their hardware", _answer_nodes, NodesAnswer),
        PAGE_PARAMETERS,
    ),
    ApiRoute(
        *("GET", f"{_DENSITY}/nodes/{{name}}", "One node or host, with the models that fit", _answer_node),
        *(NodeDetailAnswer, PAGE_PARAMETERS),
    ),
    ApiRoute(
        *("GET", f"{_DENSITY}/runtimes", "The engines of all nodes and hosts", _answer_runtimes, RuntimesAnswer),
        PAGE_PARAMETERS,
    ),
    ApiRoute(
        *("GET", f"{_DENSITY}/installed-models", "The models on all nodes and hosts", _answer_installed),
        *(InstalledModelsAnswer, PAGE_PARAMETERS),
    ),
    ApiRoute(
        *("GET", f"{_DENSITY}/query", "Nodes and hosts for a model, the best first", _answer_query, QueryAnswer),
        (MODEL_PARAMETER, *QUERY_PARAMETERS, *PAGE_PARAMETERS),
    ),
    ApiRoute(
        *("GET", "/api/v1/catalog", "All models, and where each fits", _answer_catalog, CatalogAnswer),
        PAGE_PARAMETERS,
    ),
    ApiRoute(
        *("POST", f"{_DENSITY}/simulate", "Each node before and after a model", _answer_simulation, SimulateAnswer),
        body_type=SimulateRequest,
    ),
    ApiRoute(
        *("GET", f"{_DENSITY}/cost", "What services and namespaces take, and cost", _answer_cost, CostAnswer),
        PAGE_PARAMETERS,
        demand=None,
    ),
    ApiRoute(
        *("GET", "/api/v1/models", "Models in the keys of llmfit", _answer_models, None),
        (SEARCH_PARAMETER, NODE_PARAMETER, *QUERY_PARAMETERS, *PAGE_PARAMETERS),
    ),
    ApiRoute(
        *("GET", "/api/v1/system", "The hardware of a node in the keys of llmfit", _answer_system, None),
        (NODE_PARAMETER._replace(is_required=True),),
    ),
)
