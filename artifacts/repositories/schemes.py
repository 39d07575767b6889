"""The repository of any source, by its scheme."""

from artifacts.repositories.hub_cache import CachedHubRepository
from artifacts.repositories.hub_repository import HubRepository
from artifacts.repositories.local_files import LocalRepository
from artifacts.repositories.repository import Repository, SourceAccess
from artifacts.repositories.web_repository import WebRepository
from artifacts.source import Source


def open_repository(source: Source, access: SourceAccess) -> Repository:
    """Return the repository of a source, by its scheme. Raises ArtifactError if no repository can read it."""
    if source.scheme == "hf":
        return CachedHubRepository(source, access.hub_cache) if access.hub_cache else HubRepository(source, access)
    # Few hosts have sources of these two, whose modules take a MiB.
    if source.scheme == "oci":
        from artifacts.repositories.registry_repository import RegistryRepository  # noqa: PLC0415

        return RegistryRepository(source, access)
    if source.scheme == "s3":
        from artifacts.repositories.s3_repository import S3Repository  # noqa: PLC0415

        return S3Repository(source, access)
    if source.scheme == "pvc":
        raise source.error("SourceInvalid", "only pods can read a claim: where its volume is mounted, use file://")
    return LocalRepository(source, access) if source.scheme == "file" else WebRepository(source, access)
