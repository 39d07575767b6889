"""The repository of any source, by its scheme."""

from artifacts.hub_repository import HubRepository
from artifacts.local_repository import LocalRepository
from artifacts.registry_repository import RegistryRepository
from artifacts.repository import Repository, SourceAccess
from artifacts.source import Source
from artifacts.web_repository import WebRepository


def open_repository(source: Source, access: SourceAccess) -> Repository:
    """Return the repository of a source, by its scheme."""
    if source.scheme == "hf":
        return HubRepository(source, access)
    if source.scheme == "oci":
        return RegistryRepository(source, access)
    return LocalRepository(source, access) if source.scheme == "file" else WebRepository(source, access)
