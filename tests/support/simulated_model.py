"""A Model in a simulated cluster: each plan is executed in memory, and a test ends the Jobs."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from controller.models.claims import ObservedClaims
from controller.models.job_pods import ObservedPods
from controller.models.observation import ObservedModel
from controller.models.reconciler import decide_model
from controller.models.source_secret import SecretVerdict
from controller.pod_settings import UNLIMITED, PodSettings
from controller.reconcile.conditions import find
from controller.reconcile.plan import Plan
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.meta import Condition, ObjectMeta
from crds.model import Model, ModelSpec
from kube.client import Obj
from kube.kinds import PersistentVolumeClaim
from kube.resources import JOBS, PVCS

START = datetime(2026, 11, 21, 12, tzinfo=UTC)
HTTP = "http://models.example/tiny.gguf"
SETTINGS = PodSettings("pomona:test", {"HF_ENDPOINT": "http://mirror.example"})
SHA = "ab" * 32
INSPECTED = {
    "revision": '"etag-1"',
    "file": "tiny.gguf",
    "sizeBytes": 100 * 1024 * 1024,
    "gguf": {"architecture": "llama", "quantization": "F32"},
}


class SimulatedModel:
    """A Model with its children, in their state after each executed plan."""

    def __init__(self, **spec: Any) -> None:
        metadata = ObjectMeta(name="tiny", namespace="team", uid="model-uid", generation=1)
        self.model = Model(metadata=metadata, spec=ModelSpec(**({"source": HTTP} | spec)))
        self.now = START
        self.jobs: dict[str, Obj] = {}
        self.pods: dict[str, list[Obj]] = {}
        self.refusals: dict[str, str] = {}
        """The API server's words about the pod of a Job, by the uid of the Job."""
        self.claims: dict[str, Obj] = {}
        self.mounted: set[str] = set()
        self.leaving: set[str] = set()
        self.expandable: set[str] = set()
        self.claim_phase = "Bound"
        self.consumers: list[InferenceService] = []
        self.undecided: InferenceService | None = None
        self.made: list[Obj] = []
        self.secret: SecretVerdict | None = None
        self.limits = UNLIMITED
        self.image = SETTINGS.image
        self.pull_secrets: tuple[str, ...] = ()

    def decide(self) -> Plan:
        observed = ObservedModel(
            jobs=list(self.jobs.values()),
            pods=ObservedPods(self.pods, self.refusals),
            claims=ObservedClaims(
                claims=[msgspec.convert(claim, PersistentVolumeClaim) for claim in self.claims.values()],
                leaving=frozenset(self.leaving),
                mounted=frozenset(self.mounted),
                expandable=frozenset(self.expandable),
            ),
            consumer=next(iter(self.consumers), None),
            undecided=lambda: self.undecided,
            secret=self.secret,
        )
        settings = msgspec.structs.replace(
            SETTINGS, limits=self.limits, image=self.image, image_pull_secrets=self.pull_secrets
        )
        return decide_model(self.model, observed, settings, self.now)

    def step(self) -> Plan:
        """Decide once, execute the plan, and return it."""
        plan = self.decide()
        for resource, obj in plan.create:
            stored = json.loads(json.dumps(obj))
            stored["metadata"]["uid"] = f"uid-{len(self.made)}"
            self.made.append(stored)
            if resource == JOBS:
                assert stored["metadata"]["name"] not in self.jobs
                self.jobs[stored["metadata"]["name"]] = stored
            else:
                assert resource == PVCS
                self._add_claim(stored)
        for patch in plan.patch:
            for operation in patch.operations:
                if operation["op"] == "replace":
                    assert operation["path"] == "/spec/resources/requests/storage"
                    self.claims[patch.ref.name]["spec"]["resources"]["requests"]["storage"] = operation["value"]
        for ref in plan.delete:
            children = {JOBS: self.jobs, PVCS: self.claims}[ref.resource]
            assert children[ref.name]["metadata"]["uid"] == ref.uid
            assert ref.name not in self.mounted, "pods serve from it"
            del children[ref.name]
        status = json.loads(json.dumps(plan.status))
        for condition in status["conditions"]:
            condition.setdefault("lastTransitionTime", "2026-11-21T12:00:00Z")
        self.model = msgspec.convert(msgspec.to_builtins(self.model) | {"status": status}, Model)
        return plan

    def _add_claim(self, stored: Obj) -> None:
        assert stored["metadata"]["name"] not in self.claims
        stored["metadata"]["creationTimestamp"] = self.now.isoformat()
        stored["spec"].setdefault("storageClassName", "standard")
        capacity = stored["spec"]["resources"]["requests"]["storage"]
        status = {"phase": self.claim_phase, "capacity": {"storage": capacity}}
        self.claims[stored["metadata"]["name"]] = stored | {"status": status}

    @property
    def claim(self) -> Obj | None:
        """The only claim; None if there is none."""
        assert len(self.claims) <= 1
        return next(iter(self.claims.values()), None)

    @claim.setter
    def claim(self, claim: Obj | None) -> None:
        self.claims = {claim["metadata"]["name"]: claim} if claim else {}

    def settle(self) -> Plan:
        """Decide until a plan changes nothing, and return that plan."""
        for _ in range(5):
            before = self.model
            plan = self.step()
            if not (plan.create or plan.patch or plan.delete) and before == self.model:
                return plan
        raise AssertionError(f"does not settle: {plan}")

    def edit(self, **spec: Any) -> None:
        metadata = msgspec.structs.replace(self.model.metadata, generation=self.model.metadata.generation + 1)
        self.model = msgspec.structs.replace(
            self.model, metadata=metadata, spec=msgspec.structs.replace(self.model.spec, **spec)
        )

    def add_consumer(self, **spec: Any) -> None:
        metadata = ObjectMeta(name=f"chat-{len(self.consumers)}", namespace="team")
        self.consumers.append(InferenceService(metadata=metadata, spec=InferenceServiceSpec(model_ref="tiny", **spec)))

    def begin_fetch(self) -> None:
        """Inspect the Model, and start the fetch of its weights for a service."""
        self.add_consumer()
        self.settle()
        self.end("inspect", 0, INSPECTED)
        self.settle()

    def job(self, verb: str) -> Obj:
        jobs = [job for name, job in self.jobs.items() if f"-{verb}-" in name]
        (running,) = [job for job in jobs if "status" not in job] if len(jobs) > 1 else jobs
        return running

    def end(self, verb: str, exit_code: int, message: object) -> None:
        """End the only Job of this verb and its pod."""
        job = self.job(verb)
        text = message if isinstance(message, str) else json.dumps(message)
        terminated = {"exitCode": exit_code, "message": text, "finishedAt": self.now.isoformat()}
        self.pods[job["metadata"]["uid"]] = [pod({"terminated": terminated})]
        self.mark(verb, "Complete" if exit_code == 0 else "Failed")

    def mark(self, verb: str, kind: str, **said: str) -> None:
        condition = {"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat(), **said}
        self.job(verb)["status"] = {"conditions": [condition]}

    def lose_claim(self) -> None:
        self.claims.clear()

    def condition(self, kind: str) -> Condition:
        found = find(self.model.status.conditions, kind)
        assert found is not None
        return found


def pod(state: Obj) -> Obj:
    return {
        "metadata": {"creationTimestamp": "2026-11-21T12:00:00Z"},
        "status": {"containerStatuses": [{"state": state}]},
    }


def make_inspected(**spec: Any) -> SimulatedModel:
    simulated = SimulatedModel(**spec)
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    return simulated


def make_cached(**spec: Any) -> SimulatedModel:
    simulated = make_inspected(**spec)
    simulated.add_consumer()
    simulated.settle()
    simulated.end("fetch", 0, {"sizeBytes": 1})
    simulated.settle()
    return simulated
