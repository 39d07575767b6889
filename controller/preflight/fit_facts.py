"""The facts by which preflight judges a service that is not stored yet, from the watch cache.

They are found as the reconciler finds them for the condition `Fits`, but nothing is kept of them and no queue follows
them: whoever may ask could else fill the memory of the controller with names.
"""

from collections.abc import Callable

from controller.models.served import read_companions
from controller.placement.pool_table import read_pools
from controller.pod_settings import PodSettings
from controller.preflight.preflight_verdict import FitFacts
from controller.reconcile.plan import Snapshot
from controller.services.candidates import check_candidate, list_candidates, state_accelerator
from controller.services.checked_replica import check_replica
from controller.services.class_speeds import FindSpeeds, sort_speeds
from crds.inferenceservice import InferenceService
from crds.model import Model
from kube.resources import MODELS, ObjectKey


def find_fit_facts(
    snapshot: Snapshot,
    service: InferenceService,
    settings: PodSettings,
    find_speeds: FindSpeeds,
    has_unknown_devices: Callable[[str], bool],
) -> FitFacts:
    """Return the facts about a service.

    Args:
        snapshot: the cluster.
        service: the service, which need not be stored.
        settings: options of the controller.
        find_speeds: returns the speed of a replica on the device classes of an accelerator, and keeps nothing.
        has_unknown_devices: returns whether nobody says of some devices of an accelerator what they are.
    """
    hardware = service.spec.hardware
    least = service.spec.placement.min_tokens_per_second
    expects_nodes = hardware.memory is not None or hardware.device_selector is not None
    key = ObjectKey(service.metadata.namespace, service.metadata.name)
    model = snapshot.read(MODELS, ObjectKey(key.namespace, service.spec.model_ref), Model)
    companions = read_companions(lambda key: snapshot.read(MODELS, key, Model), service)
    table = read_pools(snapshot.store, settings.vendors)
    names = list_candidates(service, model, table, settings.vendors)
    if not names:
        replica = check_replica(snapshot.store, service, model, companions, settings)
        classes = find_speeds(key, service, replica.accelerator, replica.checked.served)
        problem = replica.checked.problem
        has_unknown = problem is None and has_unknown_devices(replica.accelerator or "")
        return FitFacts(classes, [problem] if problem is not None else [], expects_nodes, has_unknown, least)
    checked = [
        check_candidate(
            snapshot.store,
            state_accelerator(service, name, table, 1),
            model,
            companions,
            settings,
            find_speeds=find_speeds,
        )
        for name in names
    ]
    return FitFacts(
        sort_speeds(speed for candidate in checked for speed in candidate.speeds),
        [candidate.problem for candidate in checked if candidate.problem is not None],
        expects_nodes,
        any(candidate.problem is None and has_unknown_devices(candidate.accelerator) for candidate in checked),
        least,
    )
