"""The repository of any source, by its scheme."""

from artifacts.errors import ArtifactError
from artifacts.repositories.hub_repository import HubRepository
from artifacts.repositories.local_repository import LocalRepository
from artifacts.repositories.registry_repository import RegistryRepository
from artifacts.repositories.repository import Repository, SourceAccess
from artifacts.repositories.s3_repository import S3Repository
from artifacts.repositories.web_repository import WebRepository
from artifacts.source import Source


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
