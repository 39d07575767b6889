"""The report of an inspection: the facts of weights that are known without downloading them.

A Job of the controller writes it as its result, and a host's agent into the status of a MetalProcess. Whoever reads it
from a host has to judge it first, because a stolen host can write anything.
"""

from typing import Annotated

from msgspec import Meta

from crds.cache import Sha256
from crds.meta import LARGEST_AMOUNT, ApiStruct, described
from crds.model import Revision
from crds.weights_header import GGUF, Layout, WeightsFormat

_Reported = Annotated[int, Meta(ge=0, le=LARGEST_AMOUNT)]
"""A number of a report, which a stolen host can write: a report with another one is refused whole."""


class InspectionReport(ApiStruct, frozen=True):
    """The facts in the headers of weights, with the revision that they were read at."""

    revision: Annotated[Revision, described("Exact revision that was inspected; empty if a mirror was read.")] = ""
    sha256: Annotated[Sha256 | None, described("SHA-256 of the file, if the user states it or the source does.")] = None
    file: Annotated[
        str,
        Meta(max_length=1024),
        described("Name of the file, or of the first part of a split model. Absent for a folder."),
    ] = ""
    size_bytes: Annotated[_Reported | None, described("Size of all files in bytes.", format="int64")] = None
    format: Annotated[WeightsFormat | None, described("Format of the weights.")] = None
    total_parameters: Annotated[_Reported | None, described("Number of parameters.", format="int64")] = None
    active_parameters: Annotated[
        _Reported | None,
        described("Number of parameters that a token uses, of a model with experts.", format="int64"),
    ] = None
    gguf: Annotated[
        GGUF | None, described("Facts from the artifact's header, or from the config.json of a folder.")
    ] = None
    layout: Annotated[Layout | None, described("Dimensions that decide how much memory serving takes.")] = None
