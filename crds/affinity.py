"""Affinity of a service's pods, in Kubernetes' own fields: to nodes, to other pods, and away from other pods.

It is typed, because the affinity that the hardware demands is added to each term of it. The API server checks the rest,
such as the syntax of labels, when the Deployment is applied; its message becomes the condition Ready.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

from crds.meta import ApiStruct, Labels

_MOST_TERMS: Final = 16
_Weight = Annotated[int, Meta(ge=1, le=100)]


class LabelRequirement(ApiStruct, frozen=True):
    """`corev1.NodeSelectorRequirement`, and `metav1.LabelSelectorRequirement`."""

    key: Annotated[str, Meta(max_length=317), "Key of the label."]
    operator: Annotated[
        Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"],
        "Relation of the label to the values. Gt and Lt compare integers, and are for nodes only.",
    ]
    values: Annotated[
        list[Annotated[str, Meta(max_length=63)]],
        Meta(max_length=64),
        "Values; none for Exists and DoesNotExist, one for Gt and Lt.",
    ] = []


_Requirements = Annotated[list[LabelRequirement], Meta(max_length=_MOST_TERMS)]


class NodeTerm(ApiStruct, frozen=True):
    """`corev1.NodeSelectorTerm`."""

    match_expressions: Annotated[_Requirements, "Requirements on the labels of a node, which must all be met."] = []
    match_fields: Annotated[_Requirements, "Requirements on the fields of a node, such as metadata.name."] = []


class NodeTerms(ApiStruct, frozen=True):
    """`corev1.NodeSelector`."""

    node_selector_terms: Annotated[
        list[NodeTerm], Meta(min_length=1, max_length=_MOST_TERMS), "Terms of which a node must meet one."
    ]


class PreferredNodes(ApiStruct, frozen=True):
    """`corev1.PreferredSchedulingTerm`."""

    weight: Annotated[_Weight, "Weight of the preference, from 1 to 100."]
    preference: Annotated[NodeTerm, "Nodes that are preferred."]


class NodeAffinity(ApiStruct, frozen=True):
    """`corev1.NodeAffinity`."""

    required_during_scheduling_ignored_during_execution: Annotated[
        NodeTerms | None, "Nodes on which pods may run. What spec.hardware demands is added to each term."
    ] = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[PreferredNodes], Meta(max_length=_MOST_TERMS), "Nodes that the scheduler prefers."
    ] = []


class LabelSelector(ApiStruct, frozen=True):
    """`metav1.LabelSelector`."""

    match_labels: Annotated[Labels, "Labels that an object must have."] = {}
    match_expressions: Annotated[_Requirements, "Requirements on the labels, which must all be met."] = []


class PodTerm(ApiStruct, frozen=True):
    """`corev1.PodAffinityTerm` about pods of the same namespace: others' pods must not be kept off nodes."""

    topology_key: Annotated[
        str,
        Meta(min_length=1, max_length=317),
        "Label of nodes: nodes with the same value are one place, for example kubernetes.io/hostname.",
    ]
    label_selector: Annotated[LabelSelector | None, "The other pods, of the same namespace. Default: no pods."] = None


class PreferredPods(ApiStruct, frozen=True):
    """`corev1.WeightedPodAffinityTerm`."""

    weight: Annotated[_Weight, "Weight of the preference, from 1 to 100."]
    pod_affinity_term: Annotated[PodTerm, "Pods whose place is preferred, or avoided."]


class PodAffinity(ApiStruct, frozen=True):
    """`corev1.PodAffinity` and `corev1.PodAntiAffinity`."""

    required_during_scheduling_ignored_during_execution: Annotated[
        list[PodTerm], Meta(max_length=_MOST_TERMS), "Terms that must all be met."
    ] = []
    preferred_during_scheduling_ignored_during_execution: Annotated[
        list[PreferredPods], Meta(max_length=_MOST_TERMS), "Terms that the scheduler prefers."
    ] = []


class Affinity(ApiStruct, frozen=True):
    """`corev1.Affinity`."""

    node_affinity: Annotated[NodeAffinity | None, "Affinity to nodes."] = None
    pod_affinity: Annotated[PodAffinity | None, "Affinity to the places of other pods."] = None
    pod_anti_affinity: Annotated[PodAffinity | None, "Affinity away from the places of other pods."] = None
