"""The routes of the density API: what each asks for, what it answers, and which right it takes."""

from collections.abc import Callable, Mapping
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
    Page,
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
from devices.vendors import Vendors
from fitness.llmfit_rows import describe_system


class NothingFoundError(Exception):
    """Nothing exists that the path names; the message is for the client."""


class DensityContext(NamedTuple):
    """The inputs of all routes."""

    service: DensityService
    prices: DensityPrices


class AskedRequest(NamedTuple):
    """A request, and the cluster by which it is answered."""

    snapshot: DensitySnapshot
    table: FitTable
    vendors: Vendors
    prices: DensityPrices
    visible: Visibility
    """The scope that the caller may see."""
    query: Mapping[str, str]
    name: str
    """Last part of the path, where it names something."""
    body: bytes

    @property
    def page(self) -> Page:
        """The page that is asked for. Raises BadRequestError."""
        return read_page(self.query)

    def check_node(self, name: str) -> str:
        """Return the name of a node or host. Raises NothingFoundError."""
        if name not in self.snapshot.machines:
            raise NothingFoundError("no node and no host has this name: GET /api/v1/density/nodes lists them")
        return name


class ApiRoute(NamedTuple):
    """One route."""

    path: str
    summary: str
    answer: Callable[[AskedRequest], Any]
    """Returns the answer. Raises BadRequestError, NothingFoundError and SimulationRefused."""
    answer_type: type | None
    """Struct of the answer; None: an object in llmfit's keys."""
    parameters: tuple[ParameterSchema, ...] = PAGE_PARAMETERS
    method: str = "GET"
    demand: AccessDemand | None = SEE_NODES
    """The right that it takes; None: whoever has a valid token, who sees his own namespaces."""
    body_type: type | None = None


def _answer_nodes(asked: AskedRequest) -> NodesAnswer:
    return list_nodes(asked.snapshot, asked.table, asked.vendors, asked.visible, asked.page)


def _answer_node(asked: AskedRequest) -> NodeDetailAnswer:
    name = asked.check_node(check_text("name", asked.name))
    return describe_node(asked.snapshot, asked.table, asked.vendors, asked.visible, name=name, page=asked.page)


def _answer_runtimes(asked: AskedRequest) -> RuntimesAnswer:
    return list_runtimes(asked.snapshot, asked.vendors, asked.visible, asked.page)


def _answer_installed(asked: AskedRequest) -> InstalledModelsAnswer:
    return list_installed_models(asked.snapshot, asked.visible, asked.page)


def _answer_query(asked: AskedRequest) -> QueryAnswer:
    query = read_density_query(asked.query, read_text(asked.query, "model"))
    return query_nodes(asked.snapshot, asked.table, asked.visible, query, asked.page)


def _answer_catalog(asked: AskedRequest) -> CatalogAnswer:
    return list_catalog(asked.snapshot, asked.table, asked.visible, asked.page)


def _answer_simulation(asked: AskedRequest) -> SimulateAnswer:
    """Answer POST /simulate: each node and host with the model of the body on it; an unknown model is a 404."""
    try:
        return simulate_model(asked.snapshot, asked.table, asked.visible, read_simulation(asked.body))
    except ModelNotFound as error:
        raise NothingFoundError(str(error)) from error


def _answer_cost(asked: AskedRequest) -> CostAnswer:
    return list_costs(asked.snapshot, asked.prices, asked.visible, asked.page)


def _answer_models(asked: AskedRequest) -> dict[str, Any]:
    """Answer /api/v1/models, as llmfit does: the models that match `search`, on one node or on the best."""
    node = read_text(asked.query, "node", "")
    search = read_text(asked.query, "search", "*") or "*"  # "*" matches all models
    query = read_density_query(asked.query, search)
    if node:
        asked.check_node(node)  # raises NothingFoundError unless there is such a node or host
    return list_llmfit_models(asked.snapshot, asked.table, asked.visible, query, asked.page, node=node)


def _answer_system(asked: AskedRequest) -> dict[str, Any]:
    node = asked.check_node(read_text(asked.query, "node"))
    return {"node": {"name": node, "os": "linux"}, "system": describe_system(asked.snapshot.describe_machine(node))}


_DENSITY: Final = "/api/v1/density"
_OF_NODE: Final = (NODE_PARAMETER._replace(is_required=True),)
_OF_MODEL: Final = (MODEL_PARAMETER, *QUERY_PARAMETERS, *PAGE_PARAMETERS)
_OF_SEARCH: Final = (SEARCH_PARAMETER, NODE_PARAMETER, *QUERY_PARAMETERS, *PAGE_PARAMETERS)
ROUTES: Final = (
    ApiRoute(f"{_DENSITY}/nodes", "All nodes and hosts, with their hardware", _answer_nodes, NodesAnswer),
    ApiRoute(f"{_DENSITY}/nodes/{{name}}", "One node or host, and the models that fit", _answer_node, NodeDetailAnswer),
    ApiRoute(f"{_DENSITY}/runtimes", "The engines of all nodes and hosts", _answer_runtimes, RuntimesAnswer),
    ApiRoute(f"{_DENSITY}/installed-models", "The models on nodes and hosts", _answer_installed, InstalledModelsAnswer),
    ApiRoute(f"{_DENSITY}/query", "Nodes and hosts for a model, the best first", _answer_query, QueryAnswer, _OF_MODEL),
    ApiRoute("/api/v1/catalog", "All models, and where each fits", _answer_catalog, CatalogAnswer),
    ApiRoute(
        f"{_DENSITY}/simulate",
        "Each node before and after a model",
        _answer_simulation,
        SimulateAnswer,
        (),
        method="POST",
        body_type=SimulateRequest,
    ),
    ApiRoute(f"{_DENSITY}/cost", "What services and namespaces take, and cost", _answer_cost, CostAnswer, demand=None),
    ApiRoute("/api/v1/models", "Models in the keys of llmfit", _answer_models, None, _OF_SEARCH),
    ApiRoute("/api/v1/system", "The hardware of a node in the keys of llmfit", _answer_system, None, _OF_NODE),
)
