"""The repository of any source, by its scheme."""

from artifacts.errors import ArtifactError
from artifacts.hub_repository import HubRepository
from artifacts.local_repository import LocalRepository
from artifacts.registry_repository import RegistryRepository
from artifacts.repository import Repository, SourceAccess
from artifacts.s3_repository import S3Repository
from artifacts.source import Source
from artifacts.web_repository import WebRepository


def open_repository(source: Source, access: SourceAccess) -> Repository:
    """Return the repository of a source, by its scheme. Raises ArtifactError for one that nothing here can read."""
    if source.scheme == "hf":
        return HubRepository(source, access)
    if source.scheme == "oci":
        return RegistryRepository(source, access)
    if source.scheme == "s3":
        return S3Repository(source, access)
    if source.scheme == "pvc":
        raise ArtifactError(
            "SourceInvalid", f"{source.display}: only pods can read a claim: where its volume is mounted, use file://"
        )
    return LocalRepository(source, access) if source.scheme == "file" else WebRepository(source, access)
