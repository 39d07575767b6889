"""Follow changes of what `pomona up` serves: of its files, and of the models that are added to it.

What is valid in the files is served, and what is not changes nothing.

Folders are watched, not files: editors and tools put a new file in place of the old one. A file is read again after
any event in its folder, which costs little, so that no event has to be understood.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog
from watchfiles import awatch

from standalone.manifests import ManifestError, Manifests, load_manifests

_DEBOUNCE_MILLISECONDS: Final = 100
"""A program that writes several files, or one in several steps, has ended within it."""
_STEP_MILLISECONDS: Final = 100
"""Pause between two looks of the watch at what the system has told it; shorter ones cost most of an idle process."""
_LOOK_SECONDS: Final = 5.0
"""Pause between two looks whether a folder was replaced, which is no event, or can be watched again."""

log = structlog.get_logger()


class LiveFiles:
    """The manifests of `paths`, files and folders, and what is served beside them.

    Args:
        paths: as the user gave them.
        found: the Models and services of the files, as they were read last.
        further: those of --model, which stay.
        added: those that were added, of which a name in the files, or of --model, is left out.
        served: the manifests that are served now.
        replace: serves other manifests from now on.
        report: prints a line for the user.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        found: Manifests,
        further: Manifests,
        added: Manifests,
        served: Manifests,
        *,
        replace: Callable[[Manifests], None],
        report: Callable[[str], None],
    ) -> None:
        """Read no file before `run`."""
        self._paths, self._found, self._further, self._added = paths, found, further, added
        self._served, self._replace, self._report = served, replace, report
        self._last_problems: Sequence[str] = ()

    async def run(self) -> None:
        """Read the files after each change, until cancelled."""
        async for _ in _watch({path if path.is_dir() else path.parent for path in self._paths}):
            try:
                found = await asyncio.to_thread(load_manifests, self._paths)
                check_names(found, self._further)
            except ManifestError as error:
                self._report_problems(error.problems)
                continue
            self._last_problems, self._found = (), found
            try:
                self._apply("files changed")
            except Exception as error:
                log.exception("files_not_applied")
                self._report_problems([f"internal error: {type(error).__name__}: {error}"])

    def replace_added(self, added: Manifests) -> None:
        """Serve these models in place of those that were added before."""
        self._added = added
        self._apply("by command")

    def _apply(self, cause: str) -> None:
        """Serve what is wanted now, and print what has changed."""
        manifests = merge_manifests(self._found, self._further, self._added)
        if change := describe_change(self._served, manifests):
            log.info("manifests_changed", cause=cause, change=change)
            self._served = manifests
            self._replace(manifests)
            self._report(f"{cause}: {change}")

    def _report_problems(self, problems: Sequence[str]) -> None:
        """Print the problems of the files, once."""
        if problems == self._last_problems:
            return
        self._last_problems = problems
        for problem in problems:
            self._report(problem)
        self._report("the files have errors: what was served before serves on")


async def _watch(folders: Collection[Path]) -> AsyncIterator[None]:
    """Yield after each change in the folders, and once after each begin of the watch, before which some may have been.

    The watch begins anew when another folder is in the place of one. While the system does not watch, as its limit is
    reached or a folder is away, yield at intervals.
    """
    names = {str(folder) for folder in folders}
    while True:
        watched, has_begun = _identify(folders), False
        try:
            watching = awatch(
                *folders,
                debounce=_DEBOUNCE_MILLISECONDS,
                step=_STEP_MILLISECONDS,
                rust_timeout=round(_LOOK_SECONDS * 1e3),
                yield_on_timeout=True,
                recursive=False,
                ignore_permission_denied=True,
                watch_filter=None,
            )
            async for changes in watching:  # empty after the time-out
                if changes or not has_begun:
                    has_begun = True
                    yield
                is_deleted = any(path in names for _, path in changes)  # another one may have the same inode
                if is_deleted or _identify(folders) != watched:
                    break
        except (OSError, RuntimeError) as error:  # watchfiles raises RuntimeError for errors of the system
            log.warning("files_not_watched", error=str(error))
            await asyncio.sleep(_LOOK_SECONDS)
            yield


def _identify(folders: Iterable[Path]) -> list[tuple[int, int] | None]:
    """Return what identifies each folder at its path; None: there is none."""
    found = list[tuple[int, int] | None]()
    for folder in folders:
        try:
            status = folder.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def check_names(found: Manifests, further: Manifests) -> None:
    """Raise ManifestError if the files have a name of --model."""
    if taken := find_taken(found, further):
        problem = f"InferenceService {taken[0]}: the name is taken by a source of --model: rename it in the file"
        raise ManifestError([problem])


def find_taken(manifests: Manifests, others: Manifests) -> list[str]:
    """Return the sorted names of services that others have, too, or that are those of Models of others."""
    names = {key.name for key in [*others.services, *others.models]}
    return sorted(key.name for key in manifests.services if key.name in names)


def merge_manifests(found: Manifests, further: Manifests, added: Manifests) -> Manifests:
    """Return all manifests: those of the files, those of --model, and those that were added with names of their own."""
    stated = Manifests(found.models | further.models, found.services | further.services, found.skipped)
    taken = find_taken(added, stated)
    models = {key: model for key, model in added.models.items() if key.name not in taken}
    services = {key: service for key, service in added.services.items() if key.name not in taken}
    return Manifests(stated.models | models, stated.services | services, stated.skipped)


def describe_change(before: Manifests, after: Manifests) -> str:
    """Return which services are added, edited and removed; "" if none is. A service is edited with its Models, too."""
    added = [key.name for key in after.services if key not in before.services]
    removed = [key.name for key in before.services if key not in after.services]
    edited = [
        key.name for key in after.services if key in before.services and before.list_parts(key) != after.list_parts(key)
    ]
    named = {"added": added, "edited": edited, "removed": removed}
    return ", ".join(f"{verb} {', '.join(names)}" for verb, names in named.items() if names)
